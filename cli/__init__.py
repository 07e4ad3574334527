"""The ``treewarden`` command."""

"""The ``treewarden`` command."""

from ._app import main as main

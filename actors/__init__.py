"""The living tree: the only part that runs tasks."""

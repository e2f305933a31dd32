"""The old name of what is now `worlds`, `controller`, `workers`, `weights`, `setup` and `store`."""

"""Starting ranks without MPI: a function of a notebook or a script runs on all of them and returns each one's result."""

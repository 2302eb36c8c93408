"""Starts jobs on hosts: the user's programs, under mpirun or the engine's own launcher."""

"""The plan of a cluster, what was asked for, and the lock, as data."""

"""Horovod's collectives on torch tensors, one per file. CPU tensors are read and written where they lie."""

"""The version of Horovod whose interface this is."""

__version__ = "0.28.1"

"""Turns a list of bare Linux hosts into a cluster that trains."""

__version__ = "0.1.0"

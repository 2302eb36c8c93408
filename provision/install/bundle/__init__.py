"""Closed networks: everything that a plan needs, gathered on the controller into one file, and installed from there.

`gather` needs a network on the controller and changes nothing on the hosts; `archive` is the file; `up --bundle FILE` reads it.
"""

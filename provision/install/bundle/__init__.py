"""Closed networks: everything that a plan needs in one file, gathered where there is a network and installed where there is none.

`gather` changes nothing on the hosts; `archive` is the file; `up --bundle FILE` reads it.
"""

"""The survey as a program for hosts: `provision.base.resources.script` joins its modules, from `__main__` on, into one text."""

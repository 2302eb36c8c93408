"""Optional parts, which the core does not import: an interface names them (lazy.py), or a program's choice has the core load one."""

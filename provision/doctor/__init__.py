"""`provision doctor`: known errors on hosts, by checks of their facts and connections, and in logs (`provision/diagnosis`).

Nothing but ``--fix`` (`fixes.py`) changes anything.
"""

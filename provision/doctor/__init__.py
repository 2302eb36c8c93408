"""`provision doctor`: known errors, found on hosts by their facts and in logs by what programs print.

``signatures`` hold what is known, as data; ``logs`` reads logs; ``checks`` looks at hosts; neither changes anything.
"""

"""Jobs whose ranks come and go: the ranks that are left meet again and go on, new ones join.

Who is there is decided in one place, the assembly (assembly.py), which runs where the job was started (launch/elastic.py) and keeps the
roll (roll.py). Every worker has a line to it (line.py) and asks it for its rank whenever it joins (worker.py). What a program does with
that is in collective_core.torch.elastic.
"""

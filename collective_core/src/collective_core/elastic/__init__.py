"""Jobs whose ranks come and go: the ranks that are left meet again and go on, new ones join.

Who is a member is decided in one process, the rendezvous server (rendezvous_server.py), which runs where the job was started
(launch/elastic_driver.py) and keeps the membership (generations.py). Every worker has a control channel to it (control_channel.py) and
asks it for its rank whenever it joins (worker.py). What a program does with that is in collective_core.common.elastic_states.
"""

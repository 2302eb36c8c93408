"""How hosts are reached: ssh, Ansible, the session of a run, the locks of its hosts, its progress."""

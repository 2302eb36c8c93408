"""The variable names we know: ours, Ansible's that say how to connect, and what people write instead of them. Data only."""

from __future__ import annotations

import re

# How a host may be called, an IPv6 address among them.
HOST_NAME = re.compile(r"\[?[\w:][\w.:%-]*\]?")

# Ours, with what they must be.
OURS = {
    "slots": "ranks to start on the host, a whole number from 1",
    "provision_prefix": "folder for everything that is installed, an absolute path",
    "provision_sudo": "no: do without root on this host although sudo is there",
    "provision_python": "the Python to build the environment with, an absolute path or a name like python3.11",
    "provision_interface": "the network interface that MPI and NCCL use, such as eth0",
}
OUR_PREFIX = "provision_"

# How to reach a host and become root there (docs.ansible.com: "Connecting to hosts: behavioral inventory parameters", and the
# variables of the ssh and sudo plugins; ansible-core 2.21, 2026-11). `reading.known_to_ansible` adds what the installed version knows.
CONNECTION = (
    "ansible_become",
    "ansible_become_exe",
    "ansible_become_flags",
    "ansible_become_method",
    "ansible_become_pass",
    "ansible_become_password",
    "ansible_become_user",
    "ansible_connection",
    "ansible_host",
    "ansible_host_key_checking",
    "ansible_password",
    "ansible_pipelining",
    "ansible_port",
    "ansible_private_key_file",
    "ansible_python_interpreter",
    "ansible_remote_tmp",
    "ansible_scp_extra_args",
    "ansible_sftp_extra_args",
    "ansible_shell_executable",
    "ansible_shell_type",
    "ansible_ssh_args",
    "ansible_ssh_common_args",
    "ansible_ssh_executable",
    "ansible_ssh_extra_args",
    "ansible_ssh_host",
    "ansible_ssh_pass",
    "ansible_ssh_pipelining",
    "ansible_ssh_port",
    "ansible_ssh_private_key_file",
    "ansible_ssh_retries",
    "ansible_ssh_timeout",
    "ansible_ssh_transfer_method",
    "ansible_ssh_user",
    "ansible_sudo_pass",
    "ansible_timeout",
    "ansible_user",
)

# What people write although it does nothing; too far from the right name for a comparison of letters to find it.
CONFUSED = {
    "ansible_address": "ansible_host",
    "ansible_hostname": "ansible_host",
    "ansible_ip": "ansible_host",
    "ansible_key": "ansible_ssh_private_key_file",
    "ansible_key_file": "ansible_ssh_private_key_file",
    "ansible_keyfile": "ansible_ssh_private_key_file",
    "ansible_interpreter": "ansible_python_interpreter",
    "ansible_login": "ansible_user",
    "ansible_pass": "ansible_password",
    "ansible_python": "ansible_python_interpreter",
    "ansible_ssh_key": "ansible_ssh_private_key_file",
    "ansible_ssh_key_file": "ansible_ssh_private_key_file",
    "ansible_ssh_keyfile": "ansible_ssh_private_key_file",
    "ansible_ssh_private_key": "ansible_ssh_private_key_file",
    "ansible_sudo": "ansible_become",
    "ansible_username": "ansible_user",
}

# Close to one of ours by its letters, yet a word of its own that people may well use.
OTHER_WORDS = frozenset({"plots", "spots", "shots", "slats", "slits", "lots", "clots", "blots", "pilots", "slopes"})

# Variables we read ourselves and so resolve when they are templates; the others stay as they are.
READ_BY_US = (
    "ansible_host",
    "ansible_ssh_host",
    "ansible_port",
    "ansible_ssh_port",
    "ansible_user",
    "ansible_ssh_user",
    "ansible_connection",
    "ansible_private_key_file",
    "ansible_ssh_private_key_file",
    "ansible_ssh_args",
    "ansible_ssh_common_args",
    "ansible_ssh_extra_args",
    *OURS,
)

# Folders that belong to the system: a prefix is removed as a whole, so it must be a folder of its own.
SYSTEM_FOLDERS = frozenset(
    {"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin", "/srv"}
    | {"/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/local/lib", "/var", "/var/lib", "/var/tmp"}  # noqa: S108
)

# Endings by which a HOSTS argument is meant as a file, whether or not it is there.
FILE_ENDINGS = (".ini", ".yml", ".yaml", ".json", ".cfg", ".conf", ".txt", ".toml", ".inv", ".inventory", ".hosts", ".py", ".sh")

"""The sandbox's inventory: an ordinary Ansible inventory in INI form, commented for the person who opens it."""

from __future__ import annotations

from provision.sandbox.model import Sandbox

FILE = "hosts.ini"


def render(sandbox: Sandbox, slots: int) -> str:
    """The inventory's text.

    Args:
        sandbox: whose hosts to list.
        slots: processes to run on each host, at most.
    """
    width = max(len(host.name) for host in sandbox.hosts)
    hosts = "\n".join(f"{host.name:<{width}}  ansible_host={host.address}  slots={slots}" for host in sandbox.hosts)
    become = f"\n# {sandbox.user}'s sudo asks for the password in {sandbox.become_password}\n" if sandbox.become_password else ""
    return f"""\
# Throw-away hosts of the sandbox '{sandbox.name}', made by `provision sandbox up`. They are gone after `provision sandbox down`.
# One line per host: its name, where it is, and how many processes it may run at once (slots).
{hosts}

# How to log in. The hosts' keys are known beforehand, so a host that is someone else is refused. User root takes the same key.
[all:vars]
ansible_user={sandbox.user}
ansible_ssh_private_key_file={sandbox.key}
ansible_ssh_common_args='{" ".join(_quoted(option) for option in ssh_options(sandbox))}'
ansible_python_interpreter=/usr/bin/python3
{become}"""


def ssh_options(sandbox: Sandbox) -> list[str]:
    """Arguments for ``ssh`` besides user, key and host: only the sandbox's own keys count, on both ends."""
    known = str(sandbox.known_hosts)
    if " " in known:  # ssh takes several files apart at blanks
        known = f'"{known}"'
    return [
        "-o",
        f"UserKnownHostsFile={known}",
        "-o",
        "GlobalKnownHostsFile=/dev/null",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "IdentitiesOnly=yes",
    ]


def _quoted(argument: str) -> str:
    return argument if " " not in argument else '"' + argument.replace('"', '\\"') + '"'

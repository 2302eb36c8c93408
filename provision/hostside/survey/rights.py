"""Whether root is to be had on the host, and what sudo says."""

import grp
import os


SUDO_GROUPS = {"sudo", "wheel", "admin"}


def read_sudo(status, complaint, groups):
    """What `sudo -n true` says: (nopasswd | password | none | None when it cannot be told, the sentence)."""
    sentence = next((line.strip() for line in complaint.splitlines() if line.strip()), None)
    if status == 0:
        return "nopasswd", None
    if status is None:
        return ("none" if "not found" in complaint else None), sentence
    for denial in (
        "not in the sudoers",
        "may not run sudo",
        "not allowed to",
        "no new privileges",
        "must have a tty",
        "must be owned by uid 0",
        "must be setuid",
    ):
        if denial in complaint:
            return "none", sentence
    if "password is required" in complaint or "password" in complaint:
        # sudo asks everyone for a password first, also those it would then refuse: only the group tells them apart.
        likely = bool(set(groups) & SUDO_GROUPS)
        return "password", sentence if likely else (sentence or "") + " (and the user is in none of the groups sudo, wheel, admin)"
    return "none", sentence


def group_names():
    names = []
    for group_id in sorted(set(os.getgroups()) | {os.getgid()}):
        try:
            names.append(grp.getgrgid(group_id).gr_name)
        except KeyError:
            names.append(str(group_id))
    return sorted(names)


def rights_of(machine):
    """sudo and what it says, and whether root is to be had: not where sudo asks for a password that nobody gives and would hardly take."""
    wish = machine.options.get("root")
    if os.geteuid() == 0:
        return {"sudo": "root", "sudo_says": None, "can_become": True}
    if wish == "no":
        return {"sudo": "unwanted", "sudo_says": None, "can_become": False}
    status, _, complaint = machine.run(["sudo", "-n", "true"])
    groups = group_names()
    verdict, sentence = read_sudo(status, complaint, groups)
    hopeless = verdict == "none" or (verdict == "password" and wish != "password" and not set(groups) & SUDO_GROUPS)
    return {"sudo": verdict, "sudo_says": sentence, "can_become": not hopeless}

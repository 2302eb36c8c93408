"""What on a host root, or the login user, may use: nothing that another user could have written. Python 3.6+, standard library only."""

import grp
import os
import pwd
import re
import stat


def trusted_users():
    """Ids of the users whose files are ours: root, this user, and the one who ran sudo."""
    caller = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return {0, os.geteuid()} | ({int(caller)} if caller.isdigit() else set())


def unmapped_root():
    """The id that root's files have in a user namespace without root, such as Apptainer's; other users' have it there, too."""
    with open("/proc/self/uid_map") as users, open("/proc/sys/kernel/overflowuid") as nobody:
        return set() if any(line.split()[0] == "0" for line in users) else {int(nobody.read())}


def entry_of(lookup, number):
    """The entry of a user (``pwd.getpwuid``) or group (``grp.getgrgid``), which begins with its name; a container's need not have one."""
    try:
        return lookup(number)
    except KeyError:
        return (str(number), "", number, ())


def writers(seen):
    """Who but trusted users may write, by the mode of an `os.lstat`; empty where no other may."""
    group, _, _, members = entry_of(grp.getgrgid, seen.st_gid)
    names = {entry_of(pwd.getpwuid, uid)[0] for uid in trusted_users()}
    is_unused = 0 < seen.st_gid < 1000 and all(user.pw_gid != seen.st_gid for user in pwd.getpwall())  # such as Debian's staff
    if seen.st_mode & stat.S_IWGRP and seen.st_gid != 0 and not ((group in names or is_unused) and names.issuperset(members)):
        return "group " + group  # and not one of that user alone
    return "every user" if seen.st_mode & stat.S_IWOTH else ""


def way_to(path):
    """The absolute path itself and, before it, every folder and link on the way there."""
    above = os.path.dirname(path)
    way = [path] if above == path else way_to(above) + [path]
    if os.path.islink(path) and os.path.exists(path):  # else links may lead to each other
        way += way_to(os.path.normpath(os.path.join(os.path.realpath(above), os.readlink(path))))
    return way


def distrust(*paths):
    """Why another user could have made, or can exchange, what is at one of these absolute paths or above it; None where none can."""
    for path, place in [(each, place) for each in paths for place in way_to(each) if os.path.lexists(place)]:
        seen = os.lstat(place)
        is_above = os.path.realpath(place) != os.path.realpath(path)
        is_sticky = seen.st_mode & stat.S_ISVTX and is_above
        if seen.st_uid not in trusted_users() | (unmapped_root() if is_above else set()):
            return "%s belongs to %s" % (place, entry_of(pwd.getpwuid, seen.st_uid)[0])
        if not stat.S_ISLNK(seen.st_mode) and not is_sticky and writers(seen):
            return "%s can be written by %s" % (place, writers(seen))
    return None


def invalid_name(record):
    """The first entry of a host's record that is neither a plain name nor an absolute path without detours; None where all are."""
    packages = record.get("packages", {})
    forms = (
        (r"(?!\.\.?$)[^/\0]+", record.get("contents", [])),
        (r"(?!.*/\.\.?(/|$))/[^\0]*", record.get("claimed", []) + [entry["path"] for entry in record.get("files", {}).values()]),
        (r"\w[\w.+:~-]*", record.get("held", []) + [name for part in ("added", "asked", "unsure") for name in packages.get(part, [])]),
    )
    return next((name for form, names in forms for name in names if not re.match("(?:%s)\\Z" % form, name, re.S)), None)

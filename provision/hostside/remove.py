"""Removal of what provision has installed on one host: what the host's record names, and what killed jobs and modules have left.

It is sent over SSH as a whole (``python3 -c``): standard library only, Python 3.6 and later. For each part it prints a JSON document between
two marker lines:

    {"nothing": true or false, "removed": [...], "left": [{"what": ..., "why": ...}], "error": null or a sentence}

Standard input is JSON: {"lock": {...}, "dry_run": ..., "parts": [[record, prefix], ...]}
    lock       what host_lock.acquire takes; it is held meanwhile
    dry_run    change nothing; "removed" is then what would be removed
    record     the host's record (see playbooks/module_utils/host_record.py); ~ is the login user's home
    prefix     the folder of the record, whose "contents" are removed as a whole; null for the record in the home
"""

import contextlib
import glob
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile

from .abandoned import remove_abandoned
from .host_lock import acquire, release
from .trust import distrust, invalid_name

BEGIN = "===PROVISION-REMOVED-BEGIN==="
END = "===END==="

EXTENDED_STATES = "/var/lib/apt/extended_states"  # where apt marks packages as installed automatically
APT_ARCHIVES = "/var/cache/apt/archives"
MAX_NAMED = 20  # files of one push


class Removal:
    """One removal and its result."""

    def __init__(self, record_path, prefix, dry_run):
        self.record_path, self.prefix, self.dry_run = record_path, prefix, dry_run
        self.removed, self.left, self.kept_files = [], [], set()
        self.gone = {record_path}  # files and trees that are removed as a whole; a dry run tells by them which folders become empty
        why = distrust(*filter(None, (prefix, record_path)))
        if why:
            raise RuntimeError("nothing is removed, because another user could have written it: %s" % why)
        with open(record_path) as file:
            self.record = json.load(file)
        # What `provision push` and `provision run` have copied to the login's home has records of its own there.
        self.home, self.pushed = os.path.realpath(os.path.dirname(record_path)), {}
        for path in glob.glob(os.path.join(glob.escape(self.home), "provision-data/.records/*.json")):
            if distrust(path) is None:
                with open(path) as file:
                    self.pushed[path] = pushed = json.load(file)
                self.record["claimed"] += pushed["claimed"]
                self.gone.add(path)
        for record in [self.record] + [{"claimed": list(pushed["files"])} for pushed in self.pushed.values()]:
            if invalid_name(record) is not None:
                raise RuntimeError("nothing is removed, because the record names %r" % invalid_name(record))

    def leave(self, what, why):
        self.left.append({"what": what, "why": why})

    def call(self, argv, check=True):
        done = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, LC_ALL="C", DEBIAN_FRONTEND="noninteractive"),
            universal_newlines=True,
        )
        said = done.communicate()[0]
        if check and done.returncode != 0:
            raise RuntimeError("%s: %s" % (" ".join(argv[:3]), " ".join(said.split())[-500:]))
        return done.returncode, said


    def remove_files(self):
        linker = False
        for entry in self.record["files"].values():
            path, marker = entry["path"], entry["marker"]
            try:
                content = read(path)
            except OSError:
                continue  # it is gone
            before, ours, after = "", content, ""
            if marker is not None:
                before, block, after = block_of(content.decode("utf-8", "surrogateescape"), marker)
                if block is None:
                    continue
                ours = block.encode("utf-8", "surrogateescape")
            elif not entry["made"]:
                self.kept_files.add(path)
                self.leave(path, "it was there before provision wrote it; what it held then is not known")
                continue
            elif self.owner(path):
                self.leave(path, "it belongs to package %s now" % self.owner(path))
                continue
            if hashlib.sha256(ours).hexdigest() not in entry["sha256"]:
                self.kept_files.add(path)
                self.leave(path, "it was changed since provision wrote it" if marker is None else "our lines in it were changed since")
                continue
            rest = before + after
            self.removed.append(path if marker is None else "our lines in %s" % path)
            linker = linker or path.startswith("/etc/ld.so.conf.d/")
            is_whole = entry["made"] and not rest.strip()
            if is_whole:
                self.gone.add(path)
            if self.dry_run:
                continue
            if is_whole:
                os.unlink(path)
            else:
                rewrite(path, rest)
        if linker and not self.dry_run:
            self.call(["ldconfig"])

    def remove_pushed(self, pushed):
        """Remove what one record of pushes names, in one line: there may be a million files. Those that were changed stay."""
        place, there = pushed["path"].replace(self.home + "/", "~/", 1), [path for path in pushed["files"] if os.path.lexists(path)]
        changed = [path for path in there if digest_of(path, pushed["piece"]) not in pushed["files"][path].split()]
        ours = set(there).difference(changed)
        self.gone |= ours
        for path in ours if not self.dry_run else ():
            os.unlink(path)
        if ours:
            self.removed.append("%d file%s in %s" % (len(ours), "s" * (len(ours) != 1), place) if pushed["path"] not in ours else place)
        for path in changed if len(changed) <= MAX_NAMED else ["%d files in %s" % (len(changed), place)]:
            self.leave(path, "it was changed since provision wrote it" if len(changed) <= MAX_NAMED else "they were changed since")

    def owner(self, path):
        """The package that a file belongs to, or an empty string."""
        if shutil.which("dpkg-query"):
            code, said = self.call(["dpkg-query", "--search", path], check=False)
            return said.split(":")[0] if code == 0 else ""
        code, said = self.call(["rpm", "--query", "--file", "--queryformat=%{NAME}\n", path], check=False)
        return said.split()[0] if code == 0 else ""

    def remove_prefix_contents(self):
        if not self.prefix:
            return
        kept = {os.path.realpath(path) for path in self.kept_files}
        ours = self.record.get("contents", [])
        for name in ours:
            path = os.path.join(self.prefix, name)
            if os.path.lexists(path):
                self.removed.append(path)
                real = os.path.realpath(path)
                if os.path.islink(path) or not any((one + os.sep).startswith(real + os.sep) for one in kept):
                    self.gone.add(path)
                if not self.dry_run:
                    remove_tree(path, kept)
        record = os.path.basename(self.record_path)
        for name in sorted(os.listdir(self.prefix)):
            path = os.path.join(self.prefix, name)
            if name not in ours and name != record and os.path.realpath(path) not in kept:
                self.leave(path, "provision did not put it there")

    def remove_claimed(self):
        """Remove single files and folders that were not there before us; inner ones first."""
        for path in sorted(self.record["claimed"], key=lambda path: -path.count("/")):
            if not os.path.lexists(path):
                continue
            if not os.path.isdir(path) and self.owner(path):
                self.leave(path, "it belongs to package %s now" % self.owner(path))
                continue
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            is_draft = is_folder and os.path.basename(path).startswith(".provision-push-")  # of a push that has not ended
            try:
                if self.dry_run:
                    if is_folder and not is_draft and not all(os.path.join(path, name) in self.gone for name in os.listdir(path)):
                        continue  # what is in it may still go with a package
                elif is_folder:
                    shutil.rmtree(path) if is_draft else os.rmdir(path)
                else:
                    os.unlink(path)
                self.removed.append(path)
                self.gone.add(path)
            except OSError:
                if not any(entry["what"].startswith(path) for entry in self.left):
                    self.leave(path, "there is something in it that provision did not put there")


    def remove_packages(self):
        """Remove the packages that we have installed and that no other package needs, as apt or rpm says."""
        noted = self.record["packages"]
        installed = set(self.states())
        ours, unsure = set(noted["added"]) & installed, set(noted.get("unsure", [])) & installed
        for name, version in sorted(self.record.get("replaced", {}).items()):
            if any(one.split(":")[0] == name for one in installed - ours):
                self.leave("package " + name, "it was there before, in version %s, which is not restored" % version)
        if self.record.get("driver"):
            release = "apt-mark unhold" if shutil.which("dpkg") else "dnf versionlock delete"
            self.leave("NVIDIA's driver (%s)" % self.record["driver"], "it belongs to the system, and stays held: `%s` releases it" % release)
        for name in self.record["removed"]:
            self.leave(name, "provision removed it because it breaks Open MPI; it is not installed again")
        held = sorted(installed & set(self.record["held"]))
        if held and not self.dry_run:  # our holds, also on packages that stay
            self.call(["apt-mark", "unhold"] + held if shutil.which("dpkg") else ["dnf", "-q", "versionlock", "delete"] + held)
        if noted["before"] is not None:  # an interrupted installation
            unsure |= installed - set(noted["before"]) - ours
        requested = {name for name in unsure if name.split(":")[0] in noted.get("asked", [])}
        if shutil.which("dpkg"):
            going, why = self.plan_with_apt(ours | requested, unsure, noted["before"]), "other packages depend on it"
        else:
            going, why = self.plan_with_rpm(ours | requested)
        for name in sorted((ours | requested) - going):
            self.leave("package " + name, why)
        if not going:
            return
        self.removed.append("%d packages: %s" % (len(going), " ".join(sorted(going))))
        if not self.dry_run:
            self.call((["dpkg", "--purge"] if shutil.which("dpkg") else ["rpm", "--erase"]) + sorted(going))

    def states(self):
        """{installed package: "installed ok", or another state where its installation was interrupted}"""
        if not shutil.which("dpkg-query"):
            names = self.call(["rpm", "--query", "--all", "--queryformat=%{NAME}\n"])[1].split()
            return {name: "installed ok" for name in names}
        form = "${db:Status-Status} ${db:Status-Eflag} ${binary:Package}\n"
        rows = [line.rsplit(" ", 1) for line in self.call(["dpkg-query", "--show", "--showformat=" + form])[1].splitlines()]
        return {name: state for state, name in rows if state.split()[0] not in ("not-installed", "config-files")}

    def plan_with_apt(self, ours, unsure, before):
        """The packages to remove: those that apt would remove automatically if ``ours`` had not been requested, and that are new with us.

        Args:
            ours: packages that we have installed, or asked for.
            unsure: packages that an interrupted installation, or another user at that time, has installed.
            before: what was installed before an interrupted installation, or None.
        """
        if not ours and not unsure:
            return set()  # apt may be broken here
        automatic = set(self.call(["apt-mark", "showauto"])[1].split())
        states = self.states()
        interrupted = sorted(name for name in ours | unsure if states[name] != "installed ok")
        if interrupted and self.dry_run:
            return ours | unsure  # apt plans nothing in this state
        if interrupted:
            self.finish_installation([name for name in interrupted if "reinstreq" in states[name]])
            states = self.states()
            unsure = unsure | (set(states) - set(before) if before is not None else set())
        # apt prints names without the architecture where it is the host's own.
        own = ":" + self.call(["dpkg", "--print-architecture"])[1].strip()
        printed = {name: name[: -len(own)] if name.endswith(own) else name for name in states}
        scratch = tempfile.mkdtemp()
        try:
            marks = os.path.join(scratch, "extended_states")
            if os.path.exists(EXTENDED_STATES):
                shutil.copy(EXTENDED_STATES, marks)
            options = ["--option=Dir::State::extended_states=" + marks]
            # To finish the installation has marked packages as requested.
            unneeded = sorted(ours | {name for name in interrupted if printed.get(name) in automatic})
            if unneeded:
                self.call(["apt-mark"] + options + ["auto"] + unneeded)
            # Our own installations take no recommended packages, those of others may.
            important = "true" if unsure - ours else "false"
            options += ["--option=APT::AutoRemove::RecommendsImportant=" + important, "--option=APT::AutoRemove::SuggestsImportant=false"]
            said = self.call(["apt-get"] + options + ["--simulate", "--ignore-hold", "--purge", "autoremove"])[1]
        finally:
            shutil.rmtree(scratch)
        planned = set(re.findall(r"^Purg (\S+) ", said, re.M))
        return {name for name in ours | unsure if printed.get(name) in planned}

    def finish_installation(self, half_unpacked):
        """Finish an interrupted installation: apt plans nothing before, and dpkg does not know all files of a half-unpacked package."""
        archives = [path for path in (self.archive(name) for name in half_unpacked) if path]
        if archives:  # apt needs an index, which a closed network does not have
            self.call(["dpkg", "--unpack"] + archives, check=False)
        code, said = self.call(["dpkg", "--configure", "--pending"], check=False)
        states = self.states()
        half_unpacked = [name for name in half_unpacked if "reinstreq" in states.get(name, "")]
        if half_unpacked or code != 0:
            words = ["--yes", "--option=DPkg::Lock::Timeout=300", "--no-remove", "--no-install-recommends", "--fix-broken", "--reinstall"]
            code, said = self.call(["apt-get"] + words + ["install"] + half_unpacked, check=False)
        if code != 0:
            raise RuntimeError(
                "an installation was interrupted here and cannot be finished, which must come first: run `provision up` again (in a closed "
                "network with --bundle FILE), then `provision remove`: " + " ".join(said.split())[-500:]
            )

    def archive(self, package):
        """The newest archive of a package on this host, or None: from the bundle, or from apt's downloads."""
        folders = ([os.path.join(self.prefix, "bundle", "debs")] if self.prefix else []) + [APT_ARCHIVES]
        for folder in folders:
            found = glob.glob(os.path.join(glob.escape(folder), package.split(":")[0] + "_*.deb"))
            if found:
                return max(found, key=os.path.getmtime)
        return None

    def plan_with_rpm(self, ours):
        """The packages to remove, and why the others stay: all of ours, or none where a package of others needs one of them."""
        if not ours:
            return ours, ""
        code, said = self.call(["rpm", "--test", "--erase"] + sorted(ours), check=False)
        if code == 0:
            return ours, ""
        needed = [line.strip() for line in said.splitlines() if " is needed by " in line]
        if not needed:
            raise RuntimeError("rpm: " + " ".join(said.split())[-500:])
        return set(), "one of these is needed by others: " + needed[0]

    def run(self):
        self.remove_packages()
        self.remove_files()
        for pushed in self.pushed.values():
            self.remove_pushed(pushed)
        self.remove_prefix_contents()
        for path in [self.record_path] + list(self.pushed) if not self.dry_run else ():
            os.unlink(path)
        self.remove_claimed()
        programs = os.path.join(self.home, "provision-run")
        if not self.prefix and os.path.isdir(programs) and programs not in self.gone:
            self.leave("~/provision-run", "it has the programs of provision run, and what they wrote")


def read(path):
    with open(path, "rb") as file:
        return file.read()


def digest_of(path, piece):
    """Of the digests of its pieces in a row, as `provision push` records it; None where it is not a file, or cannot be read."""
    if os.path.islink(path) or not os.path.isfile(path):
        return None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        digests = [hashlib.sha256(part).hexdigest() for part in iter(lambda: file.read(piece), b"")]
        return hashlib.sha256("".join(digests).encode()).hexdigest()


def block_of(text, marker):
    """(text before our block, the block without its markers or None, text after it)"""
    lines = text.splitlines(True)
    plain = [line.rstrip("\n") for line in lines]
    begin, end = marker.replace("{mark}", "BEGIN"), marker.replace("{mark}", "END")
    if begin not in plain or end not in plain:
        return text, None, ""
    first, last = plain.index(begin), plain.index(end)
    return "".join(lines[:first]), "".join(lines[first + 1 : last]), "".join(lines[last + 1 :])


def rewrite(path, text):
    """Replace a file in one step; mode, owner and a link to it stay."""
    path = os.path.realpath(path)
    before = os.stat(path)
    descriptor, draft = tempfile.mkstemp(prefix=".provision-", dir=os.path.dirname(path))
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    os.chmod(draft, before.st_mode & 0o7777)
    os.chown(draft, before.st_uid, before.st_gid)
    os.replace(draft, path)


def remove_tree(path, kept):
    """Remove ``path`` but for the files in ``kept`` and the folders that lead to them."""
    if os.path.islink(path) or not os.path.isdir(path):
        if os.path.realpath(path) not in kept:
            os.unlink(path)
        return
    inside = os.path.realpath(path) + os.sep
    if not any(one.startswith(inside) for one in kept):
        shutil.rmtree(path)
        return
    for name in os.listdir(path):
        remove_tree(os.path.join(path, name), kept)


def remove_cache(dry_run):
    """Remove what `gpu_code.py` has noted of libraries in the user's cache folder, and the folders that are empty then."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    found = glob.glob(os.path.join(glob.escape(caches), "provision", "gpu-code*"))
    with contextlib.suppress(OSError):
        for path in found if not dry_run else ():
            os.unlink(path)
        for folder in (os.path.join(caches, "provision"), caches) if found and not dry_run else ():
            os.rmdir(folder)
    return found


def remove(record, prefix, dry_run):
    """Remove what a record names, and what is abandoned."""
    path = os.path.expanduser(record)
    answer = {"nothing": True, "removed": [], "left": [], "error": None}
    if os.path.exists(path):
        removal = None
        try:
            removal = Removal(path, prefix, dry_run)
            removal.run()
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            answer["error"] = "%s: %s" % (path, error) if removal is None else str(error)
        if removal is not None:
            answer.update(nothing=False, removed=removal.removed, left=removal.left)
    abandoned = remove_abandoned(dry_run) + remove_cache(dry_run)
    answer.update(nothing=answer["nothing"] and not abandoned, removed=answer["removed"] + abandoned)
    sys.stdout.write("\n%s\n%s\n%s\n" % (BEGIN, json.dumps(answer, sort_keys=True), END))
    sys.stdout.flush()


def remove_as(login, *arguments):
    """The same as the user who logged in, before sudo made us root: in that home nothing is done as root. ``login``: "UID HOME"."""
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit("the removal in the home of user %s failed" % login)
        return
    code = 1
    try:
        uid, _, os.environ["HOME"] = login.partition(" ")
        user = pwd.getpwuid(int(uid))
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        remove(*arguments)
        code = 0
    finally:
        os._exit(code)


def main():
    order, login = json.load(sys.stdin), os.environ.get("PROVISION_LOGIN")
    lock = dict(order["lock"], path=os.path.expanduser(order["lock"]["path"]))
    try:
        acquire(**lock)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    try:
        for record, prefix in order["parts"]:
            if login and not prefix:
                remove_as(login, record, prefix, order["dry_run"])
            else:
                remove(record, prefix, order["dry_run"])
    finally:
        release(lock["path"], lock["run"])


if __name__ == "__main__":
    main()

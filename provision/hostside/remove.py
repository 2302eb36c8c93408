"""Takes off one host what provision has put there, by the record that was kept of it, and nothing else.

It is sent over SSH as it stands (``python3 -c``): one file, standard library only, Python 3.6 and later. It prints ONE JSON document
between two marker lines:

    {"nothing": true or false, "removed": [...], "left": [{"what": ..., "why": ...}], "error": null or a sentence}

Options come as JSON in the environment variable PROVISION_REMOVE_OPTIONS:
    record     the record to go by (see playbooks/module_utils/host_record.py); ~ is the user's home
    prefix     the folder that the record is in; what it says provision makes there goes as a whole. Empty: there is none
    dry_run    change nothing; "removed" is then what would go
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

BEGIN = "===PROVISION-REMOVED-BEGIN==="
END = "===END==="

ARCHIVES = "/var/cache/apt/archives"  # packages that apt has fetched
EXTENDED_STATES = "/var/lib/apt/extended_states"  # where apt notes what it has installed automatically
# What was cut off in the middle of being unpacked goes, too: it came with us.
DPKG = ["dpkg", "--force-remove-reinstreq"]


class Removal:
    """One host's removal and what it comes to."""

    def __init__(self, record_path, prefix, dry_run):
        self.record_path, self.prefix, self.dry_run = record_path, prefix, dry_run
        self.removed, self.left, self.kept_files = [], [], set()
        with open(record_path) as file:
            self.record = json.load(file)

    def gone(self, what):
        self.removed.append(what)

    def leave(self, what, why):
        self.left.append({"what": what, "why": why})

    def run(self, argv, check=True, **environment):
        done = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, LC_ALL="C", DEBIAN_FRONTEND="noninteractive", **environment),
            universal_newlines=True,
        )
        said = done.communicate()[0]
        if check and done.returncode != 0:
            raise RuntimeError("%s: %s" % (" ".join(argv[:3]), " ".join(said.split())[-500:]))
        return done.returncode, said

    # ------------------------------------------------------------------------------------------------------------ files

    def files(self):
        linker = False
        for entry in self.record["files"].values():
            path, marker = entry["path"], entry["marker"]
            try:
                with open(path, "rb") as file:
                    content = file.read()
            except OSError:
                continue  # gone already
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
            self.gone(path if marker is None else "our lines in %s" % path)
            linker = linker or path.startswith("/etc/ld.so.conf.d/")
            if self.dry_run:
                continue
            if entry["made"] and not rest.strip():
                os.unlink(path)
            else:
                rewrite(path, rest)
        if linker and not self.dry_run:
            self.run(["ldconfig"])

    def owner(self, path):
        """The package that has brought a file, or an empty string."""
        if shutil.which("dpkg-query"):
            code, said = self.run(["dpkg-query", "--search", path], check=False)
            return said.split(":")[0] if code == 0 else ""
        code, said = self.run(["rpm", "--query", "--file", "--queryformat=%{NAME}\n", path], check=False)
        return said.split()[0] if code == 0 else ""

    def prefix_contents(self):
        if not self.prefix:
            return
        kept = {os.path.realpath(path) for path in self.kept_files}
        ours = self.record.get("contents", [])
        for name in ours:
            path = os.path.join(self.prefix, name)
            if os.path.lexists(path):
                self.gone(path)
                if not self.dry_run:
                    remove_tree(path, kept)
        record = os.path.basename(self.record_path)
        for name in sorted(os.listdir(self.prefix)):
            path = os.path.join(self.prefix, name)
            if name not in ours and name != record and os.path.realpath(path) not in kept:
                self.leave(path, "provision did not put it there")

    def claimed(self):
        """Single things that were not there before us. They were noted from the inside out."""
        for path in sorted(self.record["claimed"], key=lambda path: -path.count("/")):
            if not os.path.lexists(path):
                continue
            if self.dry_run:
                if not os.path.isdir(path):
                    self.gone(path)
                continue
            if not os.path.isdir(path) and self.owner(path):
                self.leave(path, "it belongs to package %s now" % self.owner(path))
                continue
            try:
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
                self.gone(path)
            except OSError:
                if not any(entry["what"].startswith(path) for entry in self.left):
                    self.leave(path, "there is something in it that provision did not put there")

    # --------------------------------------------------------------------------------------------------------- packages

    def packages(self):
        noted = self.record["packages"]
        installed = self.installed()
        ours = set(noted["added"])
        unsure = set(noted.get("unsure", []))
        if noted["before"] is not None:  # an installation that was cut off
            unsure |= set(installed) - set(noted["before"])
        ours |= self.ours_among(unsure & set(installed), set(noted.get("asked", [])))
        ours &= set(installed)
        for name, version in sorted(self.record.get("replaced", {}).items()):
            if any(one.split(":")[0] == name for one in set(installed) - ours):
                self.leave("package " + name, "it was there before, in version %s, which is not brought back" % version)
        for name in self.record["taken_off"]:
            self.leave(name, "provision took it off because it breaks Open MPI; it is not brought back")
        self.let_go(sorted(set(installed) & set(self.record["held"])))
        if not ours:
            return
        going = self.without_dependants(ours)
        for name in sorted(ours - going):
            self.leave("package " + name, "other packages depend on it")
        if not going:
            return
        self.gone("%d packages: %s" % (len(going), " ".join(sorted(going))))
        if self.dry_run:
            return
        names = sorted(going)
        if shutil.which("dpkg"):
            states = self.states()
            torn = [name for name in names if states[name] == "half-installed" and not self.unpack(name)]
            self.run(DPKG + ["--purge"] + names)
            self.run(["dpkg", "--configure", "--pending"])
            if torn:
                self.orphans(os.stat(self.record_path).st_mtime)
        else:
            self.run(["rpm", "--erase"] + names)

    def let_go(self, held):
        """Lift our holds, also of packages that were there before us and stay."""
        if held and not self.dry_run:
            self.run(["apt-mark", "unhold"] + held if shutil.which("dpkg") else ["dnf", "-q", "versionlock", "delete"] + held)

    def installed(self):
        if shutil.which("dpkg-query"):
            return sorted(self.states())
        return sorted(set(self.run(["rpm", "--query", "--all", "--queryformat=%{NAME}\n"])[1].split()))

    def states(self):
        """{package: dpkg's word for how far it is installed}"""
        said = self.run(["dpkg-query", "--show", "--showformat=${db:Status-Status} ${binary:Package}\n"])[1]
        pairs = (line.partition(" ") for line in said.splitlines())
        return {name: state for state, _, name in pairs if state not in ("not-installed", "config-files")}

    def unpack(self, name):
        """Let dpkg finish what was cut off: until a package is unpacked, dpkg does not know its files, and would leave them behind.

        It needs the archive that apt has fetched, of several versions the one that came last; ``orphans`` is for packages whose archive
        is gone.
        """
        plain, _, architecture = name.partition(":")
        archives = [
            os.path.join(ARCHIVES, file)
            for file in (os.listdir(ARCHIVES) if os.path.isdir(ARCHIVES) else [])
            if file.startswith(plain + "_") and file.endswith("_%s.deb" % architecture if architecture else ".deb")
        ]
        # The time of its change: apt sets the other to that of the server's file.
        latest = sorted(archives, key=lambda path: os.stat(path).st_ctime, reverse=True)
        return any(self.run(["dpkg", "--force-depends", "--unpack", path], check=False)[0] == 0 for path in latest)

    def orphans(self, since):
        """Take off what a package that was cut off while it was unpacked has laid down since and not yet given its name."""
        root = os.stat("/").st_dev
        for folder, folders, names in os.walk("/"):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            folders[:] = [name for name in folders if name not in links and os.lstat(os.path.join(folder, name)).st_dev == root]
            for path in (os.path.join(folder, name) for name in names + links if name.endswith(".dpkg-new")):
                # The time of its change: dpkg sets the other to that of the package.
                if os.lstat(path).st_ctime >= since and not self.owner(path[: -len(".dpkg-new")]):
                    os.unlink(path)

    def ours_among(self, unsure, asked):
        """Of what is new since an installation that was cut off: what it asked for, and what apt brought along for that and nothing else."""
        ours = {name for name in unsure if name.split(":")[0] in asked}
        if not shutil.which("dpkg-query"):
            return ours
        relations, marked = self.relations(), automatic()
        brought = {name for name in unsure if name.split(":")[0] in marked}
        # Dependencies come first: what asked for them may not be there yet.
        missing = asked - {name.split(":")[0] for name in relations}
        reached = self.reachable(missing) if missing and brought else set()
        found = ours | {name for name in brought if name.split(":")[0] in reached}
        edge = list(found)
        while edge:
            wanted = set().union(*relations[edge.pop()]["depends"])
            new = {name for name in brought - found if relations[name]["provides"] & wanted}
            found |= new
            edge += new
        while True:
            others = set(relations) - found
            offered = set().union(*(relations[name]["provides"] for name in others))
            needed = set()
            for name in others:  # what was there before us did well without what it merely recommends
                groups = relations[name]["depends"] + (relations[name]["recommends"] if name in unsure else [])
                needed = needed.union(*(group for group in groups if not group & offered))
            lost = {name for name in found - ours if relations[name]["provides"] & needed}
            if not lost:
                return found
            found -= lost

    def reachable(self, names):
        """Names of all packages that apt may bring for these, by its lists; nothing where it has none."""
        kinds = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"]
        command = ["apt-cache", "depends", "--recurse"] + ["--no-" + kind for kind in kinds] + sorted(names)
        code, said = self.run(command, check=False)
        return {line.split(":")[0] for line in said.splitlines() if code == 0 and re.match(r"\w", line)}

    def relations(self):
        """{installed package: {"provides": names, "depends" and "recommends": [names of which one is enough]}}"""
        fields = "${db:Status-Status}\t${binary:Package}\t${Package}, ${Provides}\t${Depends}, ${Pre-Depends}\t${Recommends}\x1e"
        found = {}
        for row in self.run(["dpkg-query", "--show", "--showformat=" + fields])[1].split("\x1e")[:-1]:
            state, name, provides, depends, recommends = row.split("\t")
            if state not in ("not-installed", "config-files"):
                found[name] = {"depends": alternatives(depends), "recommends": alternatives(recommends)}
                found[name]["provides"] = set().union(*alternatives(provides))
        return found

    def without_dependants(self, ours):
        """Those of our packages that no package of somebody else's needs: the trial run says whom it would have to leave."""
        if not shutil.which("dpkg"):
            return self.without_dependants_rpm(ours)
        going = set(ours)
        while going:
            # dpkg and not apt: apt refuses to work while an installation that was cut off stands half done, and would take others along.
            code, said = self.run(DPKG + ["--simulate", "--purge"] + sorted(going), check=False)
            if code == 0:
                return going
            refused = set(re.findall(r"^dpkg: error processing package (\S+) ", said, re.M)) & going
            if not refused:
                raise RuntimeError("dpkg: " + " ".join(said.split())[-500:])
            going -= refused
        return going

    def without_dependants_rpm(self, ours):
        going = set(ours)
        while going:
            code, said = self.run(["rpm", "--test", "--erase"] + sorted(going), check=False)
            if code == 0:
                return going
            needed = set()
            for capability in re.findall(r"^\s*(.+?) is needed by ", said, re.M):
                needed |= set(self.run(["rpm", "--query", "--whatprovides", "--queryformat=%{NAME}\n", capability], check=False)[1].split())
            if not needed & going:
                raise RuntimeError("rpm: " + " ".join(said.split())[-500:])
            going -= needed
        return going

    def all(self):
        self.packages()
        self.files()
        self.prefix_contents()
        if not self.dry_run:
            os.unlink(self.record_path)
        self.claimed()


def automatic():
    """Names of packages that apt has installed for others and not because somebody asked."""
    try:
        with open(EXTENDED_STATES) as file:
            stanzas = file.read().split("\n\n")
    except OSError:
        return set()
    found = [dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line) for stanza in stanzas]
    return {one["Package"] for one in found if one.get("Auto-Installed") == "1"}


def alternatives(relation):
    """``a (>= 1) | b, c:any`` → [{a, b}, {c}]"""
    groups = [{word.split()[0].split(":")[0] for word in group.split("|") if word.strip()} for group in relation.split(",")]
    return [group for group in groups if group]


def block_of(text, marker):
    """(what stands before our block, the block without its markers or None, what follows)"""
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


def main():
    options = json.loads(os.environ["PROVISION_REMOVE_OPTIONS"])
    path = os.path.expanduser(options["record"])
    answer = {"nothing": True, "removed": [], "left": [], "error": None}
    if os.path.exists(path):
        removal = None
        try:
            removal = Removal(path, options.get("prefix"), options["dry_run"])
            removal.all()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            answer["error"] = "%s: %s" % (path, error) if removal is None else str(error)
        if removal is not None:
            answer.update(nothing=False, removed=removal.removed, left=removal.left)
    sys.stdout.write("\n%s\n%s\n%s\n" % (BEGIN, json.dumps(answer, sort_keys=True), END))


if __name__ == "__main__":
    main()

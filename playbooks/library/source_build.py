#!/usr/bin/python
"""Ansible module: builds a package from a tarball into an archive. Python 3.7+, standard library only.

Sources with a ``configure`` are configured, made and installed into a folder of their own. Those with a makefile alone, as NCCL's, put what
they make below ``BUILDDIR``; what is wanted of it is taken from there.

A build takes minutes, and a task that is silent for minutes looks dead: the first call starts the build in the background and each call
says how far it is, so that a task can repeat it `until: build.finished`. The build ends itself and tidies up when it is terminated, and
when nobody has asked for it for a while, because its controller is gone then.
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: source_build
short_description: Build a package from a tarball into an archive
description:
  - Starts the build, or tells how far it is. To be repeated until C(finished).
author: [the provision authors]
options:
  name: {description: What is built, for messages., type: str, required: true}
  tarball: {description: The sources., type: path, required: true}
  tarball_sha256: {description: Their checksum; verified before anything of them is used., type: str, required: true}
  prefix: {description: Where the result will lie., type: path, required: true}
  options: {description: Words for configure besides the prefix; for make where there is none., type: list, elements: str, default: []}
  make_words: {description: Words for every call of make., type: list, elements: str, default: []}
  taken: {description: 'Sources with a makefile alone: which folders of its BUILDDIR are wanted.', type: list, elements: str, default: []}
  job_mb: {description: Memory in MB that one compiler may want., type: int, default: 700}
  work: {description: A folder of this build's own; it is gone when the archive is complete., type: path, required: true}
  archive: {description: The tar.gz to make; its members are relative to the prefix., type: path, required: true}
"""

EXAMPLES = r"""
- name: Build
  source_build:
    name: Open MPI 4.1.8
    tarball: /opt/provision/src/openmpi-4.1.8.tar.gz
    tarball_sha256: "..."
    prefix: /opt/provision/openmpi
    work: /opt/provision/provision-build
    archive: /opt/provision/src/openmpi-4.1.8-built.tar.gz
  register: build
  until: build is failed or build.finished
  retries: 1200
  delay: 3
"""

RETURN = r"""
finished:
  description: Whether the archive is complete.
  returned: always
  type: bool
doing:
  description: What the build does at the moment.
  returned: while it is not finished
  type: str
sha256:
  description: The archive's checksum.
  returned: when it is finished
  type: str
archive:
  description: The archive that is made, as it was given.
  returned: always
  type: str
"""

import contextlib  # noqa: E402
import glob  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tarfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.checksums import digest  # noqa: E402

FORGOTTEN_S = 120  # without a question for this long there is no controller any more; it asks every few seconds
ERROR_LINES = 12
COUNTED = 100  # files between two remarks


class Trouble(Exception):
    """What the user is told."""


def write(path, text):
    """Whole or not at all."""
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


def complete(archive):
    """The checksum of an archive that an earlier call has completed, or None."""
    try:
        with open(archive + ".sha256") as note:
            expected = note.read().strip()
        return expected if digest(archive) == expected else None
    except OSError:
        return None


def excerpt(log):
    """The part of the log that tells the cause: from shortly before the first error, else its end."""
    with open(log, errors="replace") as file:
        lines = [line.rstrip() for line in file if line.strip()]
    first = next((at for at, line in enumerate(lines) if re.search(r"\berror:|No space left", line)), len(lines))
    begin = max(0, min(first - 2, len(lines) - ERROR_LINES))
    return lines[begin : begin + ERROR_LINES]


def jobs(job_mb):
    """Compilers to run at a time: one a core, as far as the memory goes."""
    with open("/proc/meminfo") as file:
        match = re.search(r"MemAvailable:\s+(\d+)", file.read())
    room = int(match.group(1)) // 1024 // job_mb if match else 1
    return max(1, min(len(os.sched_getaffinity(0)), room))


def started(pid):
    """When a process was started, in clock ticks since boot; None when there is none. Number and start together name a process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


class Build:
    """One build and its folder. ``state.json`` says who runs it and what it does; ``failed`` holds its last words."""

    def __init__(self, parameters):
        self.given = parameters
        self.work = parameters["work"]
        self.log = os.path.join(self.work, "log")
        self.state_file = os.path.join(self.work, "state.json")
        self.failed_file = os.path.join(self.work, "failed")
        self.asked_file = os.path.join(self.work, "asked")
        self.child = None
        self.starts_child = self.is_ending = False

    # --- seen from outside

    def state(self):
        """{"pid", "started", "run", "doing"} of the build that was begun last, or an empty dictionary."""
        try:
            with open(self.state_file) as file:
                return json.load(file)
        except OSError:
            return {}

    def runs(self):
        """Whether it is under way. Another run's is as good as ours: the folder is named after what is built and how."""
        state = self.state()
        return bool(state) and started(state["pid"]) == state["started"]

    def last_words(self, run):
        """Why the build that this run has begun failed, or None."""
        try:
            with open(self.failed_file) as file:
                return file.read() if self.state().get("run") == run else None
        except OSError:
            return None

    def progress(self):
        """What it does, in words; compiling is counted."""
        doing = self.state().get("doing", "packing")  # the last step: nothing is noted any more where it has just ended
        if doing != "compiling":
            return doing
        try:
            with open(self.log, errors="replace") as file:
                compiled = sum(1 for line in file if re.match(r"(\s+(CC|CXX)|Compiling)\s", line))
        except OSError:  # not begun, or just tidied away
            return doing
        return f"compiling, {compiled - compiled % COUNTED} files so far"

    def ask(self):
        """Tell the build that its controller lives."""
        with contextlib.suppress(FileNotFoundError), open(self.asked_file, "w"):  # the folder is gone where it has just ended
            os.utime(self.asked_file)

    def discard(self):
        shutil.rmtree(self.work, ignore_errors=True)
        self.discard_parts()

    def discard_parts(self):
        """What there is of an archive that was not completed."""
        for path in (self.given["archive"] + ".part", self.given["archive"] + ".sha256.part"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # --- the build itself, in a process of its own

    def start(self, run):
        """Fork the build off; returns in the caller only."""
        self.discard()
        os.makedirs(self.work)
        self.ask()
        self.run = run
        noted, note = os.pipe()
        pid = os.fork()
        if pid:
            os.close(noted)
            self.enter("unpacking", pid)  # before anybody asks again
            os.write(note, b".")
            os.close(note)
            return
        try:
            os.setsid()
            os.close(note)
            begins = os.read(noted, 1)  # nothing, where the caller was killed before it had noted who builds
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silence, stream)
            os.closerange(3, 256)  # whoever waits for the end of our output must not wait for the build
            if begins:
                self.build()
            else:
                self.discard()
        finally:
            os._exit(0)  # not the caller's way out: it has files and handlers of its own

    def enter(self, doing, pid=None):
        pid = pid or os.getpid()
        write(self.state_file, json.dumps({"pid": pid, "started": started(pid), "run": self.run, "doing": doing}))

    def build(self):
        signal.signal(signal.SIGTERM, self.abandon)
        threading.Thread(target=self.watch, daemon=True).start()
        try:
            self.steps()
        except Exception as error:  # noqa: BLE001  whatever it is, whoever asks next must hear of it
            self.discard_parts()
            write(self.failed_file, str(error) or type(error).__name__)

    def abandon(self, *_signal):
        """End what runs and leave nothing."""
        if self.starts_child:  # it is not known yet whom to end
            self.is_ending = True
            return
        if self.child is not None and self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended with us, and the kernel has told that to a wait() that we interrupted
                os.killpg(self.child.pid, signal.SIGKILL)
        for _attempt in range(20):  # a compiler that is just dying may still write
            self.discard()
            if not os.path.exists(self.work):
                break
            time.sleep(0.05)
        os._exit(1)

    def watch(self):
        while time.time() - os.stat(self.asked_file).st_mtime < FORGOTTEN_S:
            time.sleep(2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # there, where nothing else of the build can go on meanwhile

    def steps(self):
        objects = os.path.join(self.work, "objects")
        os.mkdir(objects)
        if self.given["taken"]:
            self.made(self.unpack("Makefile"), objects)
        else:
            self.installed(self.unpack("configure"), objects)
        self.discard()

    def installed(self, source, objects):
        given, stage = self.given, os.path.join(self.work, "stage")
        self.enter("configuring")
        self.call("configure", [os.path.join(source, "configure"), "--prefix=" + given["prefix"], *given["options"]], objects)
        make = ["make", f"-j{jobs(given['job_mb'])}", *given["make_words"]]
        self.enter("compiling")
        self.call("make", make, objects)
        self.enter("packing")
        self.call("make install", [*make, "install", "DESTDIR=" + stage], objects)
        tree = os.path.join(stage, given["prefix"].lstrip("/"))
        self.pack(tree, os.listdir(tree))

    def made(self, source, objects):
        given = self.given
        places = ["BUILDDIR=" + objects, "PREFIX=" + given["prefix"]]
        self.enter("compiling")
        self.call("make", ["make", f"-j{jobs(given['job_mb'])}", *given["make_words"], *given["options"], *places], source)
        self.enter("packing")
        lacking = [name for name in given["taken"] if not os.path.isdir(os.path.join(objects, name))]
        if lacking:
            raise Trouble(f"make of {given['name']} ended well and made no {' and no '.join(lacking)}")
        self.pack(objects, given["taken"])

    def unpack(self, begin):
        """Where the sources lie: next to ``begin``, the file that their building begins with."""
        with tarfile.open(self.given["tarball"]) as tar:
            if sys.version_info >= (3, 12):
                tar.extractall(os.path.join(self.work, "source"), filter="data")
            else:
                tar.extractall(os.path.join(self.work, "source"))  # noqa: S202  its checksum was verified
        found = glob.glob(os.path.join(self.work, "source", "*", begin))
        if len(found) != 1:
            raise Trouble(f"{self.given['tarball']} holds no sources that are ready to be built: it has no {begin}")
        return os.path.dirname(found[0])

    def call(self, name, command, folder):
        self.starts_child = True
        try:
            with open(self.log, "a") as log:
                self.child = subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=dict(os.environ, LC_ALL="C", TMPDIR=self.work),
                )
        finally:
            self.starts_child = False
        if self.is_ending:
            self.abandon()
        if self.child.wait() != 0:
            kept = self.given["archive"] + ".log"
            shutil.copyfile(self.log, kept)
            lines = [*excerpt(self.log), "the whole log: " + kept]
            raise Trouble("\n".join([f"{name} of {self.given['name']} failed:", *lines]))

    def pack(self, tree, names):
        archive = self.given["archive"]

        def by_root(member):
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            return member

        with tarfile.open(archive + ".part", "w:gz", compresslevel=6) as tar:
            for name in sorted(names):
                tar.add(os.path.join(tree, name), name, filter=by_root)
        checksum = digest(archive + ".part")
        os.replace(archive + ".part", archive)
        write(archive + ".sha256", checksum + "\n")


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "tarball": {"type": "path", "required": True},
            "tarball_sha256": {"type": "str", "required": True},
            "prefix": {"type": "path", "required": True},
            "options": {"type": "list", "elements": "str", "default": []},
            "make_words": {"type": "list", "elements": "str", "default": []},
            "taken": {"type": "list", "elements": "str", "default": []},
            "job_mb": {"type": "int", "default": 700},
            "work": {"type": "path", "required": True},
            "archive": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    run = os.environ.get("PROVISION_RUN_ID", "")
    build, archive = Build(module.params), module.params["archive"]
    if build.runs():
        build.ask()
        module.exit_json(changed=True, finished=False, archive=archive, doing=build.progress())
    words = build.last_words(run)
    if words is not None:
        build.discard()
        module.fail_json(msg=words, finished=False, archive=archive)
    found = complete(archive)
    if found is not None or module.check_mode:
        module.exit_json(changed=True, finished=True, archive=archive, sha256=found or "")
    tarball, expected = module.params["tarball"], module.params["tarball_sha256"]
    try:
        actual = digest(tarball)
    except OSError as error:
        module.fail_json(msg=f"cannot read {tarball}: {error}", finished=False, archive=archive)
    if actual != expected:
        words = f"{tarball} has checksum {actual}, not {expected}; nothing of it was used"
        module.fail_json(msg=words, finished=False, archive=archive)
    build.start(run)
    module.exit_json(changed=True, finished=False, archive=archive, doing="unpacking")


if __name__ == "__main__":
    main()

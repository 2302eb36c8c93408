"""Takes what `provision push` copies to this host, and gives it to the next one. Python 3.6+, standard library only.

``relay.py take`` is the controller's. The first line of standard input is JSON: ``digest`` and ``size`` of the manifest (pieces.py), ``dest``,
``run``. Then come lines ``{"from": host, "give": command}``, from whom to take pieces (host "": the controller), and what was requested of
the controller: a line ``NUMBER BYTES``, and so many bytes; number -1 is the manifest. All is compared with the digest, or the manifest, before
it counts. It prints lines of a mark and JSON: ``want``, a piece; ``have``, bytes that are here, and ``read``, which grows while files are
read; ``lost``, the host from which no more comes, and ``why``; ``done``, bytes that have come; ``error``. It ends with standard input.

``relay.py give DEST DIGEST RUN RATE`` is the next host's, over ssh: it reads lines of JSON, a piece's number and where it is, and prints
pieces in the same way as soon as they are here, RATE bytes a second at most unless that is 0. It ends where the first process has.

Until then a folder next to the data has ``manifest``; files by their numbers, while one is missing; and ``have``, which the first process has
locked: the run's name, and a byte for each piece that is here. What is made is in a record in ~/provision-data/.records, as in the host's.
"""

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from .pieces import Manifest, decoded, digest_of, digests_of, encoded

MARK = "===PROVISION-ANSWER==="
HOME = os.fsencode(os.path.expanduser("~"))
MANIFEST, FIRST = -1, 64  # the manifest's number as a piece; where in ``have`` the byte of piece 0 is
WINDOW, MANY = 8 << 20, 256  # bytes and pieces that are requested at a time
POLL_S, TELL_S = 0.05, 0.3
SLICE = 1 << 16  # bytes that are sent at a time
ROOM = 64 << 20  # bytes that stay free on the disk


class Refusal(Exception):
    """Why nothing is copied to this host."""


def place(dest, digest):
    """(the folder that the data is in, that of this push); ``dest`` is in the home unless it is absolute."""
    path = os.path.join(HOME, encoded(dest[2:] if dest.startswith("~/") else dest))
    root = os.path.realpath(os.path.dirname(os.path.normpath(path)))
    return root, os.path.join(root, b".provision-push-" + digest[:16].encode())


def tell(**message):
    sys.stdout.write("%s %s\n" % (MARK, json.dumps(message)))
    sys.stdout.flush()


def write(path, data):
    with open(path + b".new", "wb") as file:
        file.write(data)
    os.rename(path + b".new", path)


class Source:
    """From where pieces come: a host, or the controller at the other end of standard input."""

    def __init__(self, relay, host="", command=""):
        self.host, self.process, self.input = host, None, sys.stdin.buffer
        if host:
            self.errors = tempfile.TemporaryFile()
            mesh = os.path.join(HOME, b".ssh", b"provision_config")
            ssh = ["ssh", "-F", mesh, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "--", host, command]
            self.process = subprocess.Popen(ssh, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
            self.input = self.process.stdout
        threading.Thread(target=self.listen, args=(relay,), daemon=True).start()

    def listen(self, relay):
        why, lines = "", iter(lambda: self.input.readline(SLICE), b"")
        try:
            while self.process and next(lines, MARK.encode()).strip() != MARK.encode():
                pass  # of a login shell
            for line in lines:
                if not self.process and line[:1] == b"{":
                    relay.events.put((self, json.loads(line.decode()), b""))
                    continue
                number, count = map(int, line.split())
                if self.process and relay.asked.get(number) != count:
                    raise ValueError
                data = self.input.read(count)
                if len(data) == count:
                    relay.events.put((self, number, data))
        except ValueError:
            why = "it sent something else than was requested"
        if not self.process:
            relay.leave()
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        relay.events.put((self, None, why or self.errors.read().decode(errors="replace").strip()[-300:] or "the connection has ended"))

    def request(self, piece, *where):
        if not self.process:
            tell(want=piece)
            return
        with contextlib.suppress(OSError):  # it has ended, which its output shows
            self.process.stdin.write(json.dumps([piece, *where]).encode() + b"\n")
            self.process.stdin.flush()


class Relay:
    """What is taken, and from where. ``whole``, ``replaced``: numbers of files that are here, or are here with earlier content of ours."""

    def __init__(self, order):
        self.order, self.source, self.have, self.came, self.read, self.told = order, None, 0, 0, 0, 0.0
        self.root, self.state = place(order["dest"], order["digest"])
        name = hashlib.sha256(os.path.join(self.root, encoded(os.path.basename(order["dest"])))).hexdigest()
        self.record = os.path.join(HOME, b"provision-data", b".records", name.encode() + b".json")
        self.events, self.asked, self.todo = queue.Queue(16), {}, collections.deque()
        self.whole, self.replaced, self.is_done = set(), set(), False
        self.controller = Source(self)

    def leave(self):
        """The controller needs this no more, or is gone."""
        if self.is_done:
            shutil.rmtree(self.state, ignore_errors=True)
        os._exit(0 if self.is_done else 1)

    def beat(self, count=0):
        """A piece is here, or was looked at."""
        self.have, self.read = self.have + count, self.read + (not count)
        if time.monotonic() - self.told > TELL_S:
            self.told = time.monotonic()
            tell(have=self.have, read=self.read)

    def where(self, piece):
        """(name in the folder of the push, offset, bytes, path, SHA-256)"""
        if piece == MANIFEST:
            return "manifest", 0, self.order["size"], "", self.order["digest"]
        number, offset, count, digest = self.manifest.pieces[piece]
        return str(number), offset, count, decoded(self.manifest.files[number][0]), digest

    def get(self, pieces):
        """(number, bytes) of each, as they come and are what they should be."""
        self.todo.extend(pieces)
        while self.todo or self.asked:
            while self.source and self.todo and len(self.asked) < MANY and sum(self.asked.values()) < WINDOW:
                piece = self.todo.popleft()
                *where, _ = self.where(piece)
                self.asked[piece] = where[2]
                self.source.request(piece, *where)
            source, what, data = self.events.get()
            if isinstance(what, dict):
                self.drop()
                self.source = Source(self, what["from"], what["give"]) if what["from"] else self.controller
            elif source is not self.source or (what is not None and what not in self.asked):
                continue  # of an earlier one
            elif what is None or hashlib.sha256(data).hexdigest() != self.where(what)[-1]:
                tell(lost=self.source.host, why=data if what is None else "it sent a piece that is not what the manifest says")
                self.drop()
            else:
                del self.asked[what]
                self.came += len(data)
                yield what, data

    def drop(self):
        self.todo.extendleft(sorted(self.asked, reverse=True))
        self.asked.clear()
        if self.source and self.source.process:
            self.source.process.kill()
        self.source = None

    def draft(self, number):
        return os.path.join(self.state, b"%d" % number)

    def final(self, number):
        return os.path.join(self.root, self.manifest.files[number][0])

    def run(self):
        ((_, data),) = self.get([MANIFEST])
        self.manifest = Manifest(data)
        is_new = not os.path.exists(self.state)
        self.note({}, [self.state, os.path.dirname(self.record)])
        os.makedirs(self.state, 0o700, exist_ok=True)
        try:
            self.lock()
            write(os.path.join(self.state, b"manifest"), data)
            self.mark(MANIFEST)
            missing = self.look()
        except Refusal:
            if is_new:
                shutil.rmtree(self.state)
            raise
        for piece, data in self.get(missing):
            number, offset, _, _ = self.manifest.pieces[piece]
            descriptor = os.open(self.draft(number), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(offset)
                file.write(data)
            self.mark(piece)
        self.finish()
        self.is_done = True
        fcntl.flock(self.journal, fcntl.LOCK_UN)
        tell(have=self.have, done=self.came)
        threading.Event().wait()  # the next host may need what is here

    def known(self):
        """The record of what was pushed to this place."""
        try:
            with open(self.record) as file:
                return json.load(file)
        except FileNotFoundError:
            return {"files": {}, "claimed": [], "packages": {"added": [], "before": None}, "held": [], "removed": []}

    def note(self, files, folders):
        """Record what is about to be made. ``files``: path → digest of the whole file."""
        if not os.path.exists(os.path.join(HOME, b".provision-record.json")):
            raise Refusal("nothing is installed here yet")
        record = self.known()
        for path, digest in files.items():
            entry = record["files"].setdefault(path, {"path": path, "marker": None, "made": True, "sha256": []})
            entry.update(piece=self.manifest.piece, sha256=[*entry["sha256"][-1:], digest])
        for path in folders:
            while not os.path.lexists(path) and decoded(path) not in record["claimed"]:
                record["claimed"].append(decoded(path))
                path = os.path.dirname(path)
        os.makedirs(os.path.dirname(self.record), 0o700, exist_ok=True)
        write(self.record, json.dumps(record, indent=1, sort_keys=True).encode())

    def lock(self):
        """Wait for the end of another push of this to the same place: of another controller, or of a host that shares it."""
        self.journal = os.open(os.path.join(self.state, b"have"), os.O_RDWR | os.O_CREAT, 0o600)
        while True:
            try:
                fcntl.flock(self.journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell(read=os.fstat(self.journal).st_size)
                time.sleep(TELL_S)
        os.ftruncate(self.journal, 0)
        os.pwrite(self.journal, self.order["run"].encode(), 0)

    def mark(self, piece):
        """It is here, and can be given to the next host."""
        os.pwrite(self.journal, b"+", FIRST + piece)
        self.beat(self.where(piece)[2] if piece != MANIFEST else 0)

    def look(self):
        """The pieces that are missing. Refuses where a file is in the way, or the disk is too small."""
        known, new, missing, needed = self.known()["files"], {}, [], ROOM
        folders = [os.path.join(self.root, folder) for folder in sorted(self.manifest.folders)]
        for path in folders:
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                raise Refusal("%s is in the way: it is not a folder" % decoded(path))
        for number, (_, _, count, digests) in enumerate(self.manifest.files):
            path, found = self.final(number), set()
            entry = known.get(decoded(path), {"sha256": []})
            if os.path.lexists(path) and not os.path.islink(path):
                found = self.manifest.there(number, path, self.beat)
                if len(found) == self.manifest.first[number + 1] - self.manifest.first[number] and os.path.getsize(path) == count:
                    self.whole.add(number)
            if os.path.lexists(path) and number not in self.whole:
                if os.path.islink(path) or not entry["sha256"] or digest_of(digests_of(path, entry["piece"], self.beat)) not in entry["sha256"]:
                    raise Refusal("%s is in the way: it is not of an earlier push, or was changed since" % decoded(path))
                self.replaced.add(number)
            if number not in self.whole:
                new[decoded(path)] = digest_of(digests)
                needed += count
                found = set()
                with contextlib.suppress(FileNotFoundError):
                    needed -= os.lstat(self.draft(number)).st_blocks * 512
                    found = self.manifest.there(number, self.draft(number), self.beat)
            for piece in range(self.manifest.first[number], self.manifest.first[number + 1]):
                if piece in found:
                    self.mark(piece)
                else:
                    missing.append(piece)
        disk = os.statvfs(self.state)
        if missing and needed > disk.f_bavail * disk.f_frsize:
            raise Refusal("%d MB are needed in %s, %d are free" % (needed >> 20, decoded(self.root), disk.f_bavail * disk.f_frsize >> 20))
        self.note(new, folders)
        return missing

    def finish(self):
        """All pieces are here: give the files their names."""
        mask = os.umask(0o077)
        os.umask(mask)
        for number, (_, is_program, _, _) in enumerate(self.manifest.files):
            self.beat()
            if number not in self.whole:
                open(self.draft(number), "ab").close()  # an empty file has no piece
                os.chmod(self.draft(number), (0o777 if is_program else 0o666) & ~mask)
                os.makedirs(os.path.dirname(self.final(number)), exist_ok=True)
                if os.path.lexists(self.final(number)) and number not in self.replaced:
                    raise Refusal("%s is in the way: it was not there at first" % decoded(self.final(number)))
                os.rename(self.draft(number), self.final(number))


def has(state, run, piece):
    """Whether the first process has it; exits where it never will."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(state, b"have"), "rb") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_over = True
        except BlockingIOError:
            is_over = False
        if os.pread(journal.fileno(), len(run), 0) == run:
            if os.pread(journal.fileno(), 1, FIRST + piece) == b"+":
                return True
            if is_over:
                sys.exit("it has ended before it had all")
    return False


def give(dest, digest, run, rate):
    (root, state), asked, rest, ready = place(dest, digest), collections.deque(), b"", 0.0
    sys.stdout.buffer.write(b"\n%s\n" % MARK.encode())
    sys.stdout.buffer.flush()
    while True:
        waits = not asked or not has(state, run.encode(), asked[0][0])
        if select.select([0], [], [], POLL_S if waits else 0)[0]:
            data = os.read(0, SLICE)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            asked.extend(json.loads(line.decode()) for line in lines)
        if waits:
            continue
        piece, name, offset, count, path = asked.popleft()
        try:
            file = open(os.path.join(state, encoded(name)), "rb")
        except FileNotFoundError:
            file = open(os.path.join(root, encoded(path)), "rb")
        with file:
            file.seek(offset)
            data = file.read(count)
        sys.stdout.buffer.write(b"%d %d\n" % (piece, len(data)))
        for at in range(0, len(data), SLICE):
            sys.stdout.buffer.write(data[at : at + SLICE])
            sys.stdout.buffer.flush()
            if float(rate):
                ready = max(ready, time.monotonic()) + len(data[at : at + SLICE]) / float(rate)
                time.sleep(max(0.0, ready - time.monotonic()))


def main(what, *words):
    try:
        give(*words) if what == "give" else Relay(json.loads(sys.stdin.buffer.readline().decode())).run()
    except Exception as error:
        path = getattr(error, "filename", None)
        text = "%s: %s" % (decoded(path) if isinstance(path, bytes) else path, error.strerror) if path else str(error) or repr(error)
        if what == "give":
            sys.exit(text)
        tell(error=text.encode("utf-8", "replace").decode())
        os._exit(1)  # a thread may still read standard input


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Takes what `provision push` copies to this host, and gives it to the next one. Python 3.6+, standard library only.

``relay.py take`` is the controller's. Its standard input is lines of JSON: ``digest`` and ``size`` of the manifest (pieces.py), ``dest``, ``run``;
then ``from``, the host to take pieces from, and ``give``, the command for that, again and again; once that is "", pieces of the controller. What
comes is compared with digest or manifest before it counts. It prints lines of a mark and JSON: ``want``, pieces of the controller; ``have``,
bytes that are here, and ``read``, which grows while files are read; ``lost``, the host from which no more comes, and ``why``; ``done``, bytes
that have come; ``error``. Until standard input ends, there is a folder next to the data: ``manifest``; files by their numbers, while one is
missing; and ``have``, which it has locked: the run's name, and a byte for each piece. A record like the host's is in ~/provision-data/.records.

``relay.py give DEST DIGEST RUN RATE`` is the next host's, over ssh: it reads lines of JSON, the numbers of pieces (-1: the manifest), and
prints these one after another, as soon as they are here, RATE bytes a second at most unless that is 0. It ends with its standard input.
"""

import collections
import contextlib
import fcntl
import hashlib
import itertools
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
FIRST = 64  # where in ``have`` the byte of piece 0 is
POLL_S, TELL_S = 0.02, 0.3
SLICE = 1 << 16  # bytes that are sent at a time
MANY = 1 << 16  # pieces that are requested at a time
ROOM = 64 << 20  # bytes that stay free on the disk


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


class Relay:
    """What is taken. ``whole``, ``replaced``: numbers of files that are here, or are here with earlier content of ours."""

    def __init__(self, order):
        self.order, self.process, self.pipe, self.orders = order, None, None, queue.Queue()
        self.root, self.state = place(order["dest"], order["digest"])
        name = hashlib.sha256(os.path.join(self.root, encoded(os.path.basename(order["dest"])))).hexdigest()
        self.record_path = os.path.join(HOME, b"provision-data", b".records", name.encode() + b".json")
        self.have, self.came, self.read, self.told, self.is_done = 0, 0, 0, 0.0, False
        self.whole, self.replaced = set(), set()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """Take orders, until pieces follow. An order ends the connection to the host before."""
        for line in iter(sys.stdin.buffer.readline, b""):
            self.orders.put(json.loads(line.decode()))
            if self.process:
                self.process.kill()
            if b'"from": ""' in line:
                return
        self.leave()

    def leave(self):
        """The controller needs this no more, or is gone."""
        if self.is_done:
            shutil.rmtree(self.state, ignore_errors=True)
        os._exit(0 if self.is_done else 1)  # another thread may read standard input

    def connect(self, order):
        self.host, self.process, self.pipe = order["from"], None, sys.stdin.buffer
        if self.host:
            self.errors, mesh = tempfile.TemporaryFile(), os.path.join(HOME, b".ssh", b"provision_config")
            ssh = ["ssh", "-F", mesh, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "--", self.host, order["give"]]
            self.process = subprocess.Popen(ssh, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
            self.pipe = self.process.stdout
            if not self.orders.empty():
                self.process.kill()
            next((line for line in iter(lambda: self.pipe.readline(SLICE), b"") if line.strip() == MARK.encode()), None)

    def get(self, pieces, expected):
        """(number, bytes) of each, once they are what they should be. ``expected``: number → (bytes, SHA-256)."""
        left = collections.deque(pieces)
        while left:
            if not self.pipe or not self.orders.empty():
                self.connect(self.orders.get())
            wanted = list(itertools.islice(left, MANY))
            if not self.process:
                tell(want=wanted)
            else:
                with contextlib.suppress(OSError):  # it has ended
                    self.process.stdin.write(json.dumps(wanted).encode() + b"\n")
                    self.process.stdin.flush()
            for piece in wanted:
                count, digest = expected(piece)
                data = self.pipe.read(count)
                if hashlib.sha256(data).hexdigest() != digest:
                    self.lose("it sent a piece that is not what the manifest says" if len(data) == count else "")
                    break
                self.came += count
                yield left.popleft(), data

    def lose(self, why):
        if not self.process:
            self.leave()
        if self.orders.empty():
            self.process.kill()
            self.process.wait()
            self.errors.seek(0)
            tell(lost=self.host, why=why or self.errors.read().decode(errors="replace").strip()[-300:] or "the connection has ended")
            self.pipe = None

    def beat(self, count=0):
        """A piece is here, or was looked at."""
        self.have, self.read = self.have + count, self.read + (not count)
        if time.monotonic() - self.told > TELL_S:
            self.told = time.monotonic()
            tell(have=self.have, read=self.read)

    def run(self):
        ((_, data),) = self.get([-1], lambda _: (self.order["size"], self.order["digest"]))
        self.manifest = Manifest(data)
        self.drafts = [os.path.join(self.state, b"%d" % number) for number in range(len(self.manifest.files))]
        self.finals = [os.path.join(self.root, path) for path, _, _, _ in self.manifest.files]
        is_new = not os.path.exists(self.state)
        self.note({}, [self.state, os.path.dirname(self.record_path)])
        os.makedirs(self.state, 0o700, exist_ok=True)
        try:
            self.lock()
            write(os.path.join(self.state, b"manifest"), data)
            self.mark(-1)
            missing = self.look()
        except ValueError:
            if is_new:
                shutil.rmtree(self.state)
            raise
        for piece, data in self.get(missing, lambda piece: self.manifest.pieces[piece][2:]):
            number, offset, _, _ = self.manifest.pieces[piece]
            with os.fdopen(os.open(self.drafts[number], os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.seek(offset)
                file.write(data)
            self.mark(piece)
        self.finish()
        self.is_done = True
        fcntl.flock(self.journal, fcntl.LOCK_UN)
        tell(have=self.have, done=self.came)
        if not self.process:
            self.pipe.read()  # the next host may need what is here
            self.leave()
        self.process.kill()
        threading.Event().wait()

    def note(self, files, folders):
        """Record what is about to be made. ``files``: path → digest of the whole file."""
        if not os.path.exists(os.path.join(HOME, b".provision-record.json")):
            raise ValueError("nothing is installed here yet")
        self.record = {"files": {}, "claimed": []}
        with contextlib.suppress(FileNotFoundError), open(self.record_path) as file:
            self.record = json.load(file)
        for path, digest in files.items():
            before = self.record["files"].get(path, {"sha256": []})["sha256"][-1:]
            self.record["files"][path] = {"path": path, "piece": self.manifest.piece, "sha256": [*before, digest]}
        for path in folders:
            while not os.path.lexists(path) and decoded(path) not in self.record["claimed"]:
                self.record["claimed"].append(decoded(path))
                path = os.path.dirname(path)
        os.makedirs(os.path.dirname(self.record_path), 0o700, exist_ok=True)
        write(self.record_path, json.dumps(self.record, indent=1, sort_keys=True).encode())

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
        self.beat(self.manifest.pieces[piece][2] if piece >= 0 else 0)

    def look(self):
        """The pieces that are missing. Refuses where a file is in the way, or the disk is too small."""
        new, missing, needed = {}, [], ROOM
        folders = [os.path.join(self.root, folder) for folder in sorted(self.manifest.folders)]
        for path in folders:
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                raise ValueError("%s is in the way: it is not a folder" % decoded(path))
        for number, (_, _, count, digests) in enumerate(self.manifest.files):
            path, found = self.finals[number], []
            if os.path.lexists(path):
                is_file = os.path.isfile(path) and not os.path.islink(path)
                found = list(digests_of(path, self.manifest.piece, self.beat)) if is_file else [""]
                if is_file and "".join(found) == digests:
                    self.whole.add(number)
                elif digest_of(found) in self.record["files"].get(decoded(path), {"sha256": []})["sha256"]:
                    self.replaced.add(number)
                else:
                    raise ValueError("%s is in the way: it is not of an earlier push, or was changed since" % decoded(path))
            if number not in self.whole:
                new[decoded(path)], found = digest_of(digests), []
                needed += count
                with contextlib.suppress(FileNotFoundError):
                    needed -= os.lstat(self.drafts[number]).st_blocks * 512
                    found = list(digests_of(self.drafts[number], self.manifest.piece, self.beat))
            for piece in range(-(-count // self.manifest.piece)):
                if found[piece : piece + 1] == [digests[64 * piece :][:64]]:
                    self.mark(self.manifest.first[number] + piece)
                else:
                    missing.append(self.manifest.first[number] + piece)
        free = os.statvfs(self.state).f_bavail * os.statvfs(self.state).f_frsize
        if missing and needed > free:
            raise ValueError("%d MB are needed in %s, %d are free" % (needed >> 20, decoded(self.root), free >> 20))
        self.note(new, folders)
        return missing

    def finish(self):
        """All pieces are here: give the files their names."""
        mask = os.umask(0o077)
        os.umask(mask)
        for number, (_, is_program, _, _) in enumerate(self.manifest.files):
            self.beat()
            if number not in self.whole:
                open(self.drafts[number], "ab").close()  # an empty file has no piece
                os.chmod(self.drafts[number], (0o777 if is_program else 0o666) & ~mask)
                os.makedirs(os.path.dirname(self.finals[number]), exist_ok=True)
                if os.path.lexists(self.finals[number]) and number not in self.replaced:
                    raise ValueError("%s is in the way: it was not there at first" % decoded(self.finals[number]))
                os.rename(self.drafts[number], self.finals[number])


def has(state, run, piece):
    """Whether the process that takes for this run has it."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(state, b"have"), "rb") as journal:
        return journal.read(len(run)) == run and os.pread(journal.fileno(), 1, FIRST + piece) == b"+"


def content(path, offset=0, count=-1):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(count)


def give(dest, digest, run, rate):
    (root, state), manifest, ready, out = place(dest, digest), None, 0.0, sys.stdout.buffer
    out.write(b"\n%s\n" % MARK.encode())
    out.flush()
    for piece in itertools.chain.from_iterable(json.loads(line.decode()) for line in iter(sys.stdin.buffer.readline, b"")):
        while not has(state, run.encode(), piece):
            if select.select([0], [], [], POLL_S)[0]:
                return  # it is not wanted any more
        data = content(os.path.join(state, b"manifest")) if piece < 0 or not manifest else b""
        manifest = manifest or Manifest(data)
        if piece >= 0:
            number, offset, count, _ = manifest.pieces[piece]
            try:
                data = content(os.path.join(state, b"%d" % number), offset, count)
            except FileNotFoundError:
                data = content(os.path.join(root, manifest.files[number][0]), offset, count)
        for part in (data[at : at + SLICE] for at in range(0, len(data), SLICE)):
            out.write(part)
            out.flush()
            ready = max(ready, time.monotonic()) + (len(part) / float(rate) if float(rate) else 0.0)
            time.sleep(max(0.0, ready - time.monotonic()))


def main(what, *words):
    try:
        give(*words) if what == "give" else Relay(json.loads(sys.stdin.buffer.readline().decode())).run()
    except Exception as error:
        path, text = getattr(error, "filename", None), getattr(error, "strerror", None) or str(error) or repr(error)
        text = "%s: %s" % (os.fsencode(path).decode(errors="replace"), text) if path else text
        if what == "give":
            sys.exit(text)
        tell(error=text.encode("utf-8", "replace").decode())
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

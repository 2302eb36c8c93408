"""Takes what `provision push` copies to this host, and gives it to the next one. It runs on the installation's Python, standard library only.

``take`` is the controller's: the first line of standard input is the order, JSON: what, and from whom: hosts, the nearest first, at last the
controller, whose pieces follow there as requested. All is compared with the order's digest, or the manifest, before it counts. It prints lines
of a mark and JSON: ``want``, pieces of the controller; ``have``, bytes that are here, and ``read``, which grows while files are read;
``lost``, from whom no more comes; ``done``, bytes that have come; ``error``. Until its input ends, a folder next to the data has ``manifest``;
files by their numbers, while one is missing; and ``have``, locked: the run, and a byte for each piece, and for all. What was pushed is in
~/provision-data/.records.

``give WORD`` is the next host's, over ssh: WORD is the part of the order that says what, in base64 for any shell. It reads numbers of pieces
as JSON (-1: the manifest), and prints these pieces as soon as they are here, ``rate`` bytes a second at most unless that is 0. It ends where
no more come.
"""

import base64
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import threading
import time
import zlib

MARK, HOME = "===PROVISION-ANSWER===", os.path.realpath(os.path.expanduser("~"))
FIRST = 64  # where in ``have`` the byte of piece 0 is
POLL_S, TELL_S, MAX_DIGESTS = 0.02, 0.3, 8
SLICE, ROOM = 1 << 16, 64 << 20  # bytes that are sent at a time; that stay free on the disk
CIPHERS = ["-c", "aes128-gcm@openssh.com,aes256-gcm@openssh.com,aes128-ctr,aes256-ctr,chacha20-poly1305@openssh.com"]  # a third less work for processors that know AES
MANY = 1 << 12  # pieces that are requested at a time: their numbers fit in a pipe


def tell(**message):
    print(MARK, json.dumps(message), flush=True)


def write(path, data):
    """Replace a file in one step, also where the power fails."""
    with open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


def content(path, offset=0, count=-1):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(count)


def place(order):
    """(the folder that the data is in, that of this push); ``dest`` is in the home unless it is absolute."""
    root = os.path.realpath(os.path.dirname(os.path.join(HOME, order["dest"])))
    return root, os.path.join(root, ".provision-push-" + order["digest"][:16])


class Manifest:
    """JSON, compressed: ``piece``, bytes; ``files``, [[path, can be executed, bytes, digests of its pieces in a row], …], below one name.

    ``pieces``: (number of the file, offset, bytes, SHA-256) of each; ``folders``: their paths. Raises ValueError where it leads elsewhere.
    """

    def __init__(self, data):
        found = json.loads(zlib.decompress(data))
        self.piece, self.files, self.pieces, self.folders = found["piece"], found["files"], [], set()
        paths = {path for path, _, _, _ in self.files}
        for number, (path, _, count, digests) in enumerate(self.files):
            parts = path.split("/")
            above = {"/".join(parts[:at]) for at in range(1, len(parts))}
            has_detour = parts[0] != self.files[0][0].split("/")[0] or {"", ".", ".."} & {*parts} or above & paths or "\0" in path
            if has_detour or len(digests) != 64 * -(-count // self.piece) or len(paths) < len(self.files):
                raise ValueError(f"invalid manifest, at {path!r}")
            self.folders |= above
            for at in range(len(digests) // 64):
                size = min(self.piece, count - at * self.piece)
                self.pieces.append((number, at * self.piece, size, digests[64 * at : 64 * at + 64]))


class Relay:
    def __init__(self, order):
        self.order, self.source, self.sources, self.is_waste = order, None, order["sources"], False
        self.have, self.came, self.read, self.told = 0, 0, 0, 0.0
        self.root, self.state = place(order)
        self.path = os.path.join(self.root, os.path.basename(order["dest"]))
        records = os.path.join(HOME, "provision-data", ".records")
        self.record_path = os.path.join(records, hashlib.sha256(os.fsencode(self.path)).hexdigest() + ".json")
        if f"{records}/".startswith(f"{self.path}/") or self.path.startswith(f"{records}/"):
            raise ValueError(f"invalid path: {self.path}")
        self.connect()

    def connect(self):
        """Take pieces from the next one in the order."""
        self.host, give = self.sources.pop(0) if self.sources else ("", "")
        self.source, self.input = None, 0
        if self.host:
            ssh = ["ssh", "-F", os.path.join(HOME, ".ssh", "provision_config"), "-o", "ServerAliveInterval=5", "--", self.host, give]
            ssh[1:1] = CIPHERS if b"aes" in content("/proc/cpuinfo").split() else []
            self.source = subprocess.Popen(ssh, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.input, said, until = self.source.stdout.fileno(), bytearray(b"\n"), time.monotonic() + self.order["patience"]
            while not said.endswith(f"\n{MARK}\n".encode()) and len(said) < SLICE and time.monotonic() < until:
                if not (byte := self.receive(1)):  # before the mark, what a login shell prints
                    break
                said += byte

    def receive(self, count):
        """So many bytes; fewer where no more come, or from a host too slowly: the controller sends to many."""
        data, patience, until = bytearray(), self.order["patience"], time.monotonic() + 3 * self.order["patience"] * (1 + (count >> 20))
        while len(data) < count and (not self.source or time.monotonic() < until):
            ready = select.select([0, self.input], [], [], patience)[0]
            if self.source and 0 in ready:
                self.leave()
            part, self.is_silent = os.read(self.input, min(count - len(data), SLICE)) if ready else b"", not ready
            if count == self.order["size"] and (len(data) + len(part)) // SLICE > len(data) // SLICE:
                self.beat()
            data += part
            if not part:
                break
        return data

    def leave(self):
        """The controller needs this no more, or is gone."""
        if self.source:
            self.source.kill()
        run = self.order["run"].encode()
        if self.is_waste and is_free(self.journal, fcntl.LOCK_EX) and os.pread(self.journal, len(run), 0) == run:  # else another push uses it
            shutil.rmtree(self.state, ignore_errors=True)
        sys.exit()

    def get(self, pieces, expected):
        """(number, bytes) of each, once they are what they should be. ``expected``: number → (bytes, SHA-256)."""
        at = 0
        while at < len(pieces):
            if not self.source:
                tell(want=pieces[at : at + MANY])
            with contextlib.suppress(BrokenPipeError):
                if self.source:
                    self.source.stdin.write(json.dumps(pieces[at : at + MANY]).encode() + b"\n")
                    self.source.stdin.flush()
            for piece in pieces[at : at + MANY]:
                count, digest = expected(piece)
                data = self.receive(count)
                if hashlib.sha256(data).hexdigest() != digest:
                    self.lose(len(data) == count)
                    break
                self.came, at = self.came + count, at + 1
                yield piece, data

    def lose(self, is_whole):
        """Go on with the next source. ``is_whole``: the piece was."""
        silence = f"nothing has come for {self.order['patience']:g} s"
        if not self.source and self.is_silent:
            raise ValueError(silence)
        if not self.source:
            self.leave()
        self.source.kill()
        said = self.source.stderr.read()[-300:].decode(errors="replace").strip() or "the connection has ended"
        said = "it sent a piece that is not what the manifest says" if is_whole else silence if self.is_silent else said
        tell(lost=f"{self.host}: {said}; goes on with {self.sources[0][0] if self.sources else 'this machine'}")
        self.connect()

    def beat(self, count=0):
        """A piece is here, or was looked at."""
        self.have, self.read = self.have + count, self.read + (not count)
        if time.monotonic() - self.told > TELL_S:
            self.told = time.monotonic()
            tell(have=self.have, read=self.read)

    def digests_of(self, path):
        """Those of a file's pieces in a row; None where there is no file, or where another user owns a program's."""
        is_program = self.order["is_program"]
        if os.path.islink(path) or not os.path.isfile(path) or (is_program and os.stat(path).st_uid != os.geteuid()):
            return None
        with open(path, "rb") as file:
            parts = iter(lambda: file.read(self.manifest.piece), b"")
            return "".join(self.beat() or hashlib.sha256(part).hexdigest() for part in parts)

    def known(self, path, found):
        """What a record says of the digests of a file's pieces, where an earlier push has put it there."""
        digest = hashlib.sha256((found or "").encode()).hexdigest()
        return [digest] if found is not None and digest in self.record["files"].get(path, "").split() else []

    def check(self, path, found):
        """Refuse to replace what is at a path, with these digests, unless it is of an earlier push, or a program's."""
        if os.path.lexists(path) and not self.order["is_program"] and not self.known(path, found):
            raise ValueError(f"{path} is in the way: it is not of an earlier push, or was changed since")

    def run(self):
        ((_, data),) = self.get([-1], lambda _: (self.order["size"], self.order["digest"]))
        self.manifest = Manifest(data)
        self.note({}, [self.state, os.path.dirname(self.record_path)])
        self.lock()
        write(os.path.join(self.state, "manifest"), data)
        self.mark(-1)
        missing, self.is_waste = self.look(), False
        for piece, data in self.get(missing, lambda piece: self.manifest.pieces[piece][2:]):
            number, offset, _, _ = self.manifest.pieces[piece]
            with open(os.open(self.draft(number), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.seek(offset)
                file.write(data)
            self.mark(piece)
        self.finish()
        os.pwrite(self.journal, b"+", FIRST - 2)
        self.is_waste = True
        fcntl.flock(self.journal, fcntl.LOCK_UN)
        tell(have=self.have, done=self.came)

    def draft(self, number):
        return os.path.join(self.state, str(number))

    def note(self, files, folders):
        """Record what is about to be made. ``files``: path → `known` of what is there, and of what will be."""
        try:
            lock = open(os.path.join(HOME, ".provision-record.json"), "r+")
        except FileNotFoundError:
            raise ValueError(f"nothing is installed here yet: provision up {self.order['hosts']}") from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another controller may push to the same place
            self.record = {"path": self.path, "piece": self.manifest.piece, "files": {}, "claimed": []}
            with contextlib.suppress(FileNotFoundError):
                self.record = json.loads(content(self.record_path))
            for path, newest in files.items():
                # That of what is there stays, also where many pushes are cut off.
                known = dict.fromkeys([*newest, *self.record["files"].get(path, "").split()])
                self.record["files"][path] = " ".join([*known][:MAX_DIGESTS])
            claimed = dict.fromkeys(self.record["claimed"])
            for path in folders:
                while not os.path.lexists(path) and path not in claimed:
                    claimed[path] = None
                    path = os.path.dirname(path)
                self.beat()
            self.record["claimed"] = [*claimed]
            os.makedirs(os.path.dirname(self.record_path), 0o700, exist_ok=True)
            write(self.record_path, json.dumps(self.record).encode())

    def lock(self):
        """Wait for the end of another push of this to the same place: of another controller, or of a host that shares it."""
        is_new, is_gone = not os.path.exists(self.state), True
        while is_gone:  # the push before this one may remove it
            os.makedirs(self.state, 0o700, exist_ok=True)
            made = os.lstat(self.state)
            if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid() or made.st_mode & 0o022:
                raise ValueError(f"{self.state} is in the way: another user could write it")
            with contextlib.suppress(FileNotFoundError):
                self.journal = os.open(os.path.join(self.state, "have"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                while not is_free(self.journal, fcntl.LOCK_EX):
                    self.read = max(self.read, os.fstat(self.journal).st_size)
                    tell(read=self.read)
                    time.sleep(TELL_S)
                is_gone = not os.fstat(self.journal).st_nlink
        self.is_waste = is_new  # where it is refused
        os.ftruncate(self.journal, 0)
        os.pwrite(self.journal, self.order["run"].encode(), 0)

    def mark(self, piece):
        """It is here, and can be given to the next host."""
        os.pwrite(self.journal, b"+", FIRST + piece)
        self.beat(self.manifest.pieces[piece][2] if piece >= 0 else 0)

    def look(self):
        """The pieces that are missing. Refuses where a file is in the way, or the disk is too small."""
        self.new, missing, piece = {}, [], 0
        folders = [os.path.join(self.root, folder) for folder in self.manifest.folders]
        for path in folders:
            if os.path.islink(path) and self.order["is_program"] and path != self.path:
                os.unlink(path)  # of an earlier run
            elif os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                raise ValueError(f"{path} is in the way: it is not a folder")
        for number, (name, _, _, digests) in enumerate(self.manifest.files):
            path = os.path.join(self.root, name)
            found = self.digests_of(path)
            if found != digests:
                self.check(path, found)
                self.new[path] = [*self.known(path, found), hashlib.sha256(digests.encode()).hexdigest()]
                found = self.digests_of(self.draft(number)) or ""
            for at in range(0, len(digests), 64):
                self.mark(piece) if found[at : at + 64] == digests[at : at + 64] else missing.append(piece)
                piece += 1
            self.beat()
        disk, needed = os.statvfs(self.state), ROOM + sum(self.manifest.pieces[each][2] for each in missing)
        if missing and needed > disk.f_bavail * disk.f_frsize:
            raise ValueError(f"{needed >> 20} MiB are needed in {self.root}: {disk.f_bavail * disk.f_frsize >> 20} are free")
        self.note(self.new, folders)
        return missing

    def finish(self):
        """All pieces are here: give the files their names."""
        # What has its name is whole, also where the power fails.
        flush = threading.Thread(target=ctypes.CDLL(None).syncfs, args=(self.journal,), daemon=True)
        flush.start()
        while flush.is_alive():
            self.beat()
            flush.join(TELL_S)
        mask = os.umask(0o077)
        os.umask(mask)
        for number, (name, is_program, count, digests) in enumerate(self.manifest.files):
            path, draft = os.path.join(self.root, name), self.draft(number)
            if path in self.new and (found := self.digests_of(path)) != digests:  # else a host with the same folder has put it there
                self.check(path, found)
                with open(draft, "ab") as file:  # an empty file has no piece
                    if file.tell() < count:
                        raise ValueError(f"{draft} was changed meanwhile: push it again")
                    file.truncate(count)
                os.chmod(draft, (0o777 if is_program else 0o666) & ~mask)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(draft, path)
            self.beat()
        if self.order["is_program"]:  # nothing of an earlier run is left
            for path in {*self.record["files"]} - {os.path.join(self.root, file[0]) for file in self.manifest.files}:
                if self.known(path, self.digests_of(path)):
                    os.unlink(path)


def is_free(file, kind):
    """Whether another process has not locked a file; now this one has."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def has(state, run, piece):
    """Whether a process that takes it has it; exits where that of this run never will."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(state, "have"), "rb") as journal:
        is_over, marks, is_of_run = is_free(journal, fcntl.LOCK_SH), journal.fileno(), journal.read(len(run)) == run
        is_verified = is_of_run or not is_over or os.pread(marks, 1, FIRST - 2) == b"+"
        if is_verified and os.pread(marks, 1, FIRST + piece) == b"+":
            return True
        if is_of_run and is_over:
            sys.exit("it has ended before it had all")


def give(order):
    (root, state), manifest, ready, out = place(order), None, 0.0, sys.stdout.buffer
    print(f"\n{MARK}", flush=True)
    for piece in (piece for line in iter(sys.stdin.buffer.readline, b"") for piece in json.loads(line)):
        while not has(state, order["run"].encode(), piece):
            if select.select([0], [], [], POLL_S)[0]:
                return  # it is not wanted any more
        data = content(os.path.join(state, "manifest")) if piece < 0 or not manifest else b""
        manifest = manifest or Manifest(data)
        if piece >= 0:
            number, offset, count, _ = manifest.pieces[piece]
            try:
                data = content(os.path.join(state, str(number)), offset, count)
            except FileNotFoundError:
                data = content(os.path.join(root, manifest.files[number][0]), offset, count)
        for part in (data[at : at + SLICE] for at in range(0, len(data), SLICE)):
            out.write(part)
            out.flush()
            ready = max(ready, time.monotonic()) + (len(part) / order["rate"] if order["rate"] else 0.0)
            time.sleep(max(0.0, ready - time.monotonic()))


def main(what, word=""):
    order = json.loads(base64.b64decode(word) if word else sys.stdin.buffer.readline())
    if what == "give":
        give(order)
        return
    if order["is_program"]:
        os.umask(0o077)  # other users of the host cannot read it
    relay = None
    try:
        relay = Relay(order)
        relay.run()
    except Exception as error:
        tell(error=str(error).encode(errors="replace").decode())
        with contextlib.suppress(AttributeError):
            fcntl.flock(relay.journal, fcntl.LOCK_UN)  # the next host learns that no more come
    while sys.stdin.buffer.read(SLICE):  # the next host may need what is here
        pass
    if relay:
        relay.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Who listens on the way, changes something, or says again what was said before."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

#: Seconds in which whoever is to listen must do so, and must have hung up on who says the old again.
PATIENCE = 20.0


class Eavesdropper:
    """Stands between whoever calls and who listens at ``port``; keeps what it hears, and may change the n-th byte of the callers'.

    ``drops``: for each of the first callers after how many bytes of theirs it hangs up.
    """

    def __init__(self, port, change=None, drops=()):
        self.heard = b""  # of both sides
        self.said: list[bytes] = []  # by each caller
        self._change = change
        self._drops = drops
        self._sent = 0
        self._between: list[threading.Thread] = []
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                caller, _ = self._listener.accept()
                host = socket.create_connection(("127.0.0.1", self._port), timeout=20)
            except OSError:
                continue  # nobody listens yet: the caller tries again
            self.said.append(b"")
            self._between.append(threading.Thread(target=self._stand_between, args=(caller, host, len(self.said) - 1), daemon=True))
            self._between[-1].start()

    def finish(self):
        """Waits until both sides have hung up and all that they said is passed on: the end of this process would keep it back."""
        for thread in self._between:
            thread.join(PATIENCE)

    def _stand_between(self, caller, host, number):
        back = threading.Thread(target=self._pass_on, args=(host, caller), daemon=True)
        back.start()
        self._pass_on(caller, host, number)
        back.join()  # closing earlier would drop what the other direction has not passed on yet
        caller.close()
        host.close()

    def _pass_on(self, source, target, number=None):
        with contextlib.suppress(OSError):  # when one of them goes, the other is told by the end of its connection
            while data := source.recv(65536):
                self.heard += data
                if number is not None:
                    self.said[number] += data
                    if number < len(self._drops) and len(self.said[number]) > self._drops[number]:
                        source.shutdown(socket.SHUT_RDWR)
                        break
                    place = None if self._change is None else self._change - self._sent
                    self._sent += len(data)
                    if place is not None and 0 <= place < len(data):
                        data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def play(port, said):
    """Says it to who listens there, or will in a moment; what is answered until the other side hangs up."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            caller = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            break
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    answered = b""
    with caller, contextlib.suppress(ConnectionError):
        caller.sendall(said)
        while data := caller.recv(65536):
            answered += data
    return answered

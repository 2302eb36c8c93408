"""How a build, a pull or a push is shown: live on a terminal, one plain line per step elsewhere. Everything goes into the log, too."""

from __future__ import annotations

import os
import threading
import time
from typing import IO

from provision.base.terminal import Console, Live, Table, Text, err, live, styled
from provision.image.stream import Cached, Event, Failed, Layer, Line, Made, Step

_PATIENCE_S = 30.0  # without a terminal: how often a step that takes long says what it does
_TAIL = 12
_BAR_WIDTH = 24


class View:
    """Shows events and remembers where it is; ``with`` it.

    Attributes:
        step: the last step that began, ``Step 3/20: RUN …``.
        tail: the last lines that it printed.
    """

    def __init__(self, log: IO[str] | None = None, console: Console | None = None) -> None:
        self._log = log
        self._console = console or err()
        self._live: Live | None = None
        self._guard = threading.Lock()
        self._layers: dict[str, Layer] = {}
        self._began = self._told = time.monotonic()
        self.step = ""
        self.tail: list[str] = []
        self._cached = False

    def __enter__(self) -> View:
        if self._console.is_terminal and os.environ.get("TERM", "") != "dumb":
            self._live = live(self._console, self._table)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._end_step())
        if self._live is not None:
            self._live.stop()

    def note(self, event: Event) -> None:
        """Show one event."""
        shown: list[Text] = []
        with self._guard:
            if isinstance(event, Step):
                shown += self._end_step()
            self._write(event)
            if isinstance(event, Step):
                self.step, self.tail, self._cached = f"Step {event.number}/{event.total}: {event.instruction}", [], False
                self._began = self._told = time.monotonic()
                if self._live is None:
                    shown.append(styled(short(self.step)))
            elif isinstance(event, Cached):
                self._cached = True
            elif isinstance(event, Line):
                self.tail = [*self.tail[-(_TAIL - 1) :], event.text]
                if self._live is None and time.monotonic() - self._told > _PATIENCE_S:
                    self._told = time.monotonic()
                    shown.append(styled(f"  … {event.text.strip()[:160]}"))
            elif isinstance(event, Layer):
                known = self._layers.get(event.name)
                self._layers[event.name] = event
                if self._live is None and (known is None or known.status != event.status) and not event.total:
                    shown.append(styled(f"{event.name}: {event.status}"))
        # Not under the guard: the thread that draws holds the console's own lock while it waits for ours.
        self._print(shown)

    def line(self, text: str) -> None:
        """A remark of ours."""
        self._print([styled(text)])

    def _print(self, lines: list[Text]) -> None:
        for line in lines:
            (self._live.console if self._live else self._console).print(line, soft_wrap=True)

    def _end_step(self) -> list[Text]:
        """Closes the step in the log; what is to be shown of it."""
        if not self.step:
            return []
        seconds = time.monotonic() - self._began
        if self._log is not None and not self._cached:
            self._log.write(f"({seconds:.0f} s)\n")
        shown = []
        if self._live is not None:
            how = "cached" if self._cached else f"{seconds:.0f} s"
            text = short(self.step, self._console.width - len(how) - 3)
            shown.append(styled(f"{text} ({how})", "dim" if self._cached else ""))
        elif not self._cached and seconds >= 1:
            shown.append(styled(f"  {seconds:.0f} s"))
        self.step = self.step if not self._live else ""
        return shown

    def _write(self, event: Event) -> None:
        if self._log is None:
            return
        if isinstance(event, Step):
            self._log.write(f"\nStep {event.number}/{event.total}: {event.instruction}\n")
        elif isinstance(event, Cached):
            self._log.write("(from the cache)\n")
        elif isinstance(event, Line):
            self._log.write(f"{event.text}\n")
        elif isinstance(event, Failed):
            self._log.write(f"FAILED: {event.why}\n")
        elif isinstance(event, Made):
            self._log.write(f"\nimage {event.image}\n")
        self._log.flush()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        with self._guard:
            step, tail, layers, began = self.step, list(self.tail), list(self._layers.values()), self._began
        if step:
            table.add_row(styled(f"{short(step, self._console.width - 8)}  {time.monotonic() - began:.0f} s", "bold"))
            for line in tail[-4:]:
                table.add_row(styled(f"  {line[: max(20, self._console.width - 4)]}", "dim"))
        moving = [layer for layer in layers if layer.total and layer.done < layer.total]
        for layer in moving[: max(3, self._console.height - 8)]:
            table.add_row(styled(f"  {layer.name}  {layer.status} {_bar(layer)} {layer.done / 1e6:.0f} of {layer.total / 1e6:.0f} MB"))
        return table


def _bar(layer: Layer) -> str:
    done = int(_BAR_WIDTH * layer.done / layer.total)
    return "█" * done + "░" * (_BAR_WIDTH - done)


def short(text: str, limit: int = 110) -> str:
    """A step in one line."""
    return text if len(text) <= limit else text[: limit - 1] + "…"

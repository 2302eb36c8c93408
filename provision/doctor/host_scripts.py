"""Scripts of ours on all hosts at once, with an order for each: one round trip, nothing to copy and nothing to clean up."""

from __future__ import annotations

from collections.abc import Mapping

from provision.base import resources
from provision.remote.ansible import ANSWER_S, Event, Play
from provision.remote.session import Session


def run(session: Session, script: str, title: str, orders: Mapping[str, object], task_s: int = ANSWER_S) -> dict[str, str]:
    """Host → what the script printed, or why it did not run.

    Args:
        script: a script of `hostside/`.
        orders: host → its ``order`` (the script's standard input), and the ``python`` to run it with.
    """
    outputs: dict[str, str] = {}

    def note(event: Event) -> None:
        if event.kind in ("ok", "changed"):
            outputs[event.host] = str(event.result.get("stdout", ""))
        elif event.kind in ("failed", "unreachable"):
            outputs[event.host] = event.text

    extra = {"provision_orders": dict(orders), "provision_program": resources.inline_command(script, interpreter="").strip()}
    play = Play(resources.folder("playbooks") / "host_script.yml", list(orders), extra, task_s=task_s)
    session.play(play, title, on_event=note, quiet=True)
    return outputs

"""The site's pages of known errors, one for each layer, made from the doctor's data."""

from __future__ import annotations

from collections.abc import Iterator

from markdown_text import plain

from provision.catalog import OURS
from provision.diagnosis import xids
from provision.diagnosis.signatures import LAYERS, Signature, Symptom, all_signatures

HEAD = """# Known errors

What `provision doctor` knows: errors in logs (`provision doctor --log FILE`) and on hosts (`provision doctor HOSTS`). These pages are made
from the data in `provision/diagnosis/` by `scripts/known_errors.py`; `provision doctor explain ID` prints the same about one of them.
Words in capitals (HOST, PREFIX, GPU) stand for your own. A step that changes something says what, what it needs, and how to undo it.
"""


def pages() -> dict[str, str]:
    """Path of each page below the site's reference → its text: the list of all errors, and a page for each layer."""
    entries = [error for error in all_signatures().values() if not isinstance(error, Symptom)]
    index, made = [HEAD], {}
    for layer in LAYERS:
        of_layer = [error for error in entries if error.layer == layer]
        if of_layer:
            index.append(f"## {layer}\n")
            index += [f"- [{error.id}](known-errors/{layer}.md#{error.id}): {plain(error.title)}" for error in of_layer]
            index.append("")
            made[f"known-errors/{layer}.md"] = "\n".join(
                [f"# Known errors: {layer}\n", *("\n".join(_entry(each)) + "\n" for each in of_layer)]
            )
    index.append("## Xids\n\nFrom `provision/catalog/gpu_health.yaml`.\n\n| Xid | meaning | what NVIDIA recommends |\n|---|---|---|")
    index.append("\n".join(f"| {number} | {each.meaning} | {each.remedy} |" for number, each in xids.known(OURS)) + "\n")
    return {"known-errors.md": "\n".join(index), **made}


def _entry(error: Signature) -> Iterator[str]:
    yield f"## {error.id}\n"
    yield f"**{plain(error.title)}** ({error.severity})\n"
    yield f"{plain(error.summary)} {plain(error.cause)}\n"
    if error.probe:
        yield f"To confirm it: {plain(error.probe.strip())}\n"
    for step in error.steps:
        if isinstance(step, str):
            yield f"- {_step(step)}"
        else:
            needs = f"; needs {', '.join(step.needs)}" if step.needs else ""
            yield f"- {_code(step.run)}: {plain(step.changes)}{needs}. Undo: {plain(step.undo)}"
    if error.sources:
        yield "\nSources: " + ", ".join(f"<{address}>" for address in error.sources)


def _step(text: str) -> str:
    """A command with its comment, or a sentence."""
    command, separator, comment = text.partition("   # ")
    if separator:
        return f"{_code(command)}: {plain(comment)}"
    return plain(text) if text[0].isupper() else _code(text)


def _code(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    return f"{ticks}{text}{ticks}"

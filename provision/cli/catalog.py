"""`provision catalog …` on the command line: parse, call one function, print."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from provision import catalog
from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import overlay, update
from provision.catalog.models import FILES, Sourced
from provision.cli.help import App
from provision.cli.options import Json, url

app = App(no_args_is_help=True, help="What provision knows about NCCL, CUDA, PyTorch and drivers: show it, and bring it up to date.")

_NVIDIA = "https://developer.download.nvidia.com/compute/cuda/redist"
_INDEX = "https://pypi.org/simple"


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One file of the catalogue, e.g. `nccl`; all by default.")] = None,
    json_: Json = False,
) -> None:
    """Show every group of facts with its source, the date on which it was read, and whether your own files change it."""
    if name is not None and name not in FILES:
        raise UsageError(f"the catalogue has no file {name}", hint=f"one of {', '.join(FILES)}")
    mine = catalog.overlay_in_use()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    rows = []
    for file in (name,) if name else FILES:
        over = mine.files.get(file) if mine else None
        for group, facts in _groups(catalog.load(file), file):
            key = group.partition(".")[2].partition(".")[0]
            changed = over if over is not None and key in over.rows else None
            date = changed.head.date if changed else facts.date
            rows.append(
                {
                    "facts": group,
                    "date": date.isoformat(),
                    "age": f"{max(0, (today - date).days)} days",
                    "from": changed.path if changed else "provision",
                    "source": (changed.head if changed else facts).source,
                    "weak": (changed.head if changed else facts).weak or "",
                }
            )
    reach = catalog.reach()
    if json_:
        terminal.print_json({"schema": 1, "reach": reach.model_dump(mode="json"), "groups": rows})
        return
    console = terminal.out()
    console.print(terminal.table([{key: row[key] for key in ("facts", "date", "age", "from")} for row in rows]))
    console.say(f"knows {reach}")


def _groups(facts: BaseModel, at: str) -> list[tuple[str, Sourced]]:
    """The groups of a file that have a source, with their names; known problems are one group each list."""
    found = [(at, facts)] if isinstance(facts, Sourced) else []
    for name in type(facts).model_fields:
        value = getattr(facts, name)
        if isinstance(value, BaseModel):
            found += _groups(value, f"{at}.{name}")
        elif isinstance(value, tuple) and value and isinstance(value[0], Sourced):
            found.append((f"{at}.{name}", max(value, key=lambda each: each.date)))
    return found


@app.command(name="update")
def update_(
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="DIR|URL", help="A folder with wheels and NVIDIA's redistrib_*.json, or another package index."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write to, instead of your own.", file_okay=False)
    ] = None,
) -> None:
    """Write what is newer than the catalogue, from a package index and NVIDIA's lists, into files that later runs merge over it."""
    index: str | Path = _INDEX
    nvidia: str | Path = _NVIDIA
    if from_ is not None and "://" in from_:
        index = str(url("--from", from_))
    elif from_ is not None:
        index = nvidia = Path(from_)
        if not index.is_dir():
            raise UsageError(f"--from {from_}: no such folder", hint="name a folder, or the address of a package index")
    folder = out or overlay.folder_of_user()
    if out is not None:
        catalog.use(overlay.read([overlay.folder_of_user(), out]))
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    made = update.update(index, nvidia, folder, today, terminal.say)
    console = terminal.out()
    for line in made.found or ["nothing newer than the catalogue was found"]:
        console.say(line)
    for path in made.written:
        console.say(f"written: {path}")
    for line in made.unreached:
        terminal.err().say(f"not read: {line}", "yellow")
    if made.unreached and not made.found:
        raise ProvisionError("nothing could be updated", hint="name a folder with wheels and redistrib_*.json, or a package index: --from")

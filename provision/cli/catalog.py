"""`provision catalog …` on the command line: parse, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from provision import catalog
from provision.base import downloads, terminal
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS, Catalog, feed, overlay, update
from provision.catalog.models import FILES, Sourced
from provision.catalog.update.sources import Sources
from provision.cli.help import App
from provision.cli.options import CatalogFolder, Json, existing, url

app = App(no_args_is_help=True, help="What provision knows about NCCL, CUDA, PyTorch and drivers: show it, and update it.")


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One file of the catalogue, e.g. `nccl`; all by default.")] = None,
    catalog_folder: CatalogFolder = None,
    json_: Json = False,
) -> None:
    """Show every group of facts with its source, the date on which it was read, and whether your own files change it."""
    folders = [overlay.folder_of_user(), *([existing("--catalog", catalog_folder)] if catalog_folder else [])]
    mine, invalid = overlay.usable(folders)  # the commands here must work where others refuse
    used = Catalog(mine)
    if name is not None and name not in FILES:
        raise UsageError(f"invalid catalogue file {name}: expected one of {', '.join(FILES)}")
    taken, today = mine.feed if mine else None, catalog.now().date()
    rows = []
    for file in (name,) if name else FILES:
        over = mine.files.get(file) if mine else None
        for group, facts in _groups(used.load(file), file):
            key = group.partition(".")[2].partition(".")[0]
            changed = over if over is not None and key in over.rows else None
            date = changed.head.date if changed else facts.date
            rows.append(
                {
                    "facts": group,
                    "date": date.isoformat(),
                    "age": f"{max(0, (today - date).days)} days",
                    "from": changed.path if changed else taken.path if taken and file in taken.files else "provision",
                    "source": (changed.head if changed else facts).source,
                    "weak": (changed.head if changed else facts).weak or "",
                }
            )
    reach = used.reach()
    if json_:
        unused = [{"file": str(path), "what": str(error.what), "where": error.where} for path, error in invalid.items()]
        newer = {"file": taken.path, "created": taken.created.isoformat(), "key": taken.key} if taken else None
        terminal.print_json({"schema": 1, "reach": vars(reach), "feed": newer, "groups": rows, "invalid": unused})
    else:
        console = terminal.out()
        console.print(terminal.table([{key: row[key] for key in ("facts", "date", "age", "from")} for row in rows]))
        console.say(f"knows {reach}")
        console.say(f"in use: {taken}" if taken else "no feed is in use")
    if invalid:
        hint = next(iter(invalid.values())).hint
        raise UsageError("\n".join(text for error in invalid.values() for text, _hint in error.parts()), hint=hint)


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


_From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="DIR|URL",
        help="A folder with wheels and NVIDIA's redistrib_*.json, releases.json, supported-tags.md, or a package index instead of pip's.",
    ),
]


def _sources(from_: str | None, used: Catalog) -> Sources:
    if from_ is None or "://" in from_:
        return Sources.of_pip(used, url("--from", from_))
    return Sources.of_folder(existing("--from", Path(from_), "name a folder, or the address of a package index"), used)


@app.command(name="update")
def update_(
    from_: _From = None,
    feed_: Annotated[
        str | None,
        typer.Option("--feed", metavar="URL|FILE", help="Take this signed feed instead, which has all of the catalogue, of its day."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write to, instead of your own.", file_okay=False)
    ] = None,
) -> None:
    """Write what the catalogue lacks, from pip's package index and NVIDIA's lists, into files that later runs merge over it, or a feed."""
    folder = out or overlay.folder_of_user()
    valid, invalid = overlay.usable([overlay.folder_of_user(), *([out] if out else [])])
    used = Catalog(valid)
    console = terminal.out()
    if from_ is not None and feed_ is not None:
        raise UsageError("--from and --feed exclude each other", hint="leave one of them out")
    if place := feed_ or (used.cuda().lists.feed if from_ is None else None):
        console.say(f"written: {feed.take(downloads.local_path(place) or str(url('--feed', place)), folder)}")
        return
    made = update.update(_sources(from_, used), folder, catalog.now().date(), terminal.say)
    for line in made.found or ["nothing newer than the catalogue was found"]:
        console.say(line)
    for path in made.written:
        console.say(f"written: {path}")
    unused = [text for path, error in invalid.items() if path.parent != folder for text, _hint in error.parts()]
    for line in (*unused, *made.set_aside):
        terminal.err().say(f"not used: {line}", "yellow")
    for line in made.unreached:
        terminal.err().say(f"not read: {line}", "yellow")
    if not made.index_read:
        raise ProvisionError("no package index could be read", hint="name another one, or a folder with wheels: --from URL|DIR")


@app.command()
def build(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The feed's file, which is to be signed.", dir_okay=False)],
    from_: _From = None,
) -> None:
    """Make a feed: provision's own catalogue with what it lacks, from the places that `update` reads, in one file."""
    made, content = update.build(_sources(from_, OURS), catalog.now(), terminal.say)
    try:
        Path(f"{out}{feed.SIGNATURE}").unlink(missing_ok=True)  # an earlier one would be of another feed
        downloads.store(out, content)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(out), hint="name another file: --out FILE") from error
    for line in made.found:
        terminal.out().say(line)
    terminal.out().say(f"written: {out}; sign it: minisign -S -s KEY -m {out}")
    for line in made.unreached:
        terminal.err().say(f"not read: {line}", "yellow")

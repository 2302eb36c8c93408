"""`provision export` on the command line: parse, call one function, print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.options import Limit, inventory_of, ssh_password, with_options
from provision.export import pools, render
from provision.image.render import write
from provision.remote import progress
from provision.remote.session import Session


@with_options(password=ssh_password)
def export(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="slurm, kubernetes or ray.")],
    source: Annotated[str, typer.Argument(metavar="HOSTS|IMAGE", help="Hosts that `up` made ready, or an image: NAME@sha256:DIGEST.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Write the files into this folder.", file_okay=True)],
    limit: Limit = None,
    *,
    password: str | None,
) -> None:
    """Write the files with which Slurm, Kubernetes or Ray trains on these hosts, or with this image, in the installed versions."""
    image = "@sha256:" in source or (target == "kubernetes" and not os.path.exists(source) and "," not in source)
    render.check_kind(target, source, image=image)
    if image:
        if limit is not None:
            raise UsageError("--limit chooses hosts: an image has none", hint="leave it out")
        found = [pools.of_image(source)]
    else:
        inventory = inventory_of(source, limit)
        with (
            progress.make() as shown,
            Session(inventory, shown, {"connection": password} if password else {}, command="provision export") as session,
        ):
            found = pools.of_hosts(inventory, session)
    files = render.files(target, found)
    write(out, files, f".provision-export-{target}.json")
    if len(found) > 1:
        for reason in render.reasons(found):
            terminal.say(reason)
        terminal.err().say("a job stays in its pool", hint=f"one job over all hosts: provision run {source} COMMAND")
    terminal.out().say(f"{out}: {', '.join(files)}")

"""`provision image …` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from provision import main_job, progress, report
from provision.errors import UsageError
from provision.image import asking, folder, render
from provision.options import Limit, also, inventory_of, passwords, wishes

app = typer.Typer(
    no_args_is_help=True,
    help="Ready-to-run images from the same plan as the hosts.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Hosts = Annotated[
    str | None, typer.Argument(metavar="[HOSTS]", show_default=False, help="Make it for these hosts; or say --os, --cuda, --cpu.")
]
System = Annotated[str | None, typer.Option("--os", help="Make it of this system, e.g. ubuntu22.04.", metavar="SYSTEM")]
Cuda = Annotated[str | None, typer.Option("--cuda", help="For this CUDA, e.g. 12.4.", metavar="VERSION")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Without CUDA.")]
Facts = Annotated[Path | None, typer.Option("--facts", help="As for `plan`: from this file of facts, touching no host.")]
Base = Annotated[str | None, typer.Option("--base", help="Begin with this image instead of the catalogue's.", metavar="IMAGE")]


def subject(
    hosts: Hosts = None,
    limit: Limit = None,
    facts_file: Facts = None,
    system: System = None,
    cuda: Cuda = None,
    cpu: Cpu = False,
    base: Base = None,
) -> asking.Subject:
    """What the image is to be of. Raises UsageError for what contradicts itself."""
    of_hosts = hosts is not None or facts_file is not None
    if of_hosts and (system or cuda or cpu):
        raise UsageError("HOSTS and --os, --cuda or --cpu exclude each other", todo="give one of them")
    if cuda and cpu:
        raise UsageError("--cuda and --cpu exclude each other", todo="leave one of them out")
    inventory = inventory_of(hosts, limit) if hosts is not None else None
    return asking.Subject(inventory, facts_file, limit, system, cuda, cpu, base)


@app.command("render")
@also(subject=subject, options=wishes, passwords=passwords)
def render_(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write it and all that a build needs here; without, print it.", file_okay=True),
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Every system and CUDA that there are images of, a folder each.")] = False,
    buildx: Annotated[bool, typer.Option("--buildx", help="With cache mounts, for BuildKit.")] = False,
    kind: Annotated[str, typer.Option("--format", help=f"One of {', '.join(get_args(render.Format))}.")] = "dockerfile",
    *,
    subject: asking.Subject,
    options: main_job.Options,
    passwords: Mapping[str, str],
) -> None:
    """Write a Dockerfile and its context, from the same plan and lock as the hosts."""
    wanted = asking.format_of(kind, buildx=buildx)
    if matrix and (subject.named or out is None):
        raise UsageError(
            "--matrix renders everything into folders", todo="give -o DIR, and nothing else of HOSTS, --os, --cuda, --cpu, --base"
        )
    if matrix:
        made = asking.everything(options)
    else:
        with progress.make() as shown:
            made, problems = asking.targets_of(subject, options, shown, passwords)
        report.show_problems(problems, Console(stderr=True))
    contexts = {each.target.name: render.context(each.target, each.engine, kind=wanted, buildx=buildx, locked=each.locked) for each in made}
    if out is None:
        for files in contexts.values():
            typer.echo(files["provision.def" if wanted == "apptainer" else "Dockerfile"].content.decode(), nl=False)
        return
    for name, files in contexts.items():
        folder.write(out / name if matrix or len(contexts) > 1 else out, files)
    typer.echo(f"{out}: {', '.join(contexts) if len(contexts) < 5 else f'{len(contexts)} images'}", err=True)

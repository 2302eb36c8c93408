"""`provision image …` on the command line: parse, call one function, print."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.text import duration
from provision.base.validation import max_here
from provision.cli.help import App
from provision.cli.options import Json, Limit, inventory_of, passwords, plan_options, url, with_options
from provision.image import build, image_request, render, verification
from provision.image.image_request import ImageRequest
from provision.image.targets import Target
from provision.plan.options import DATA, Options, SmokeOptions
from provision.remote import progress
from provision.report import model
from provision.sandbox.containers import image_names

app = App(
    no_args_is_help=True,
    help="Ready-to-run images from the same plan as the hosts.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ForHosts = Annotated[
    str | None, typer.Argument(metavar="HOSTS", show_default=False, help="Build for these hosts; or give --os, --cuda, --cpu.")
]
System = Annotated[str | None, typer.Option("--os", help="Operating system of the image, e.g. ubuntu22.04.", metavar="SYSTEM")]
Cuda = Annotated[str | None, typer.Option("--cuda", help="CUDA version of the image, e.g. 12.4.", metavar="VERSION")]
Cpu = Annotated[bool | None, typer.Option("--cpu/--no-cpu", show_default=False, help="Image of CPU builds without CUDA.")]
Facts = Annotated[Path | None, typer.Option("--facts", help="Read facts from this file instead of surveying hosts.")]
Base = Annotated[str | None, typer.Option("--base", help="Base image to use instead of the catalogue's.", metavar="IMAGE")]
Image = Annotated[str, typer.Argument(metavar="IMAGE", help="Its name.")]


def _request(
    hosts: ForHosts = None,
    limit: Limit = None,
    facts_file: Facts = None,
    system: System = None,
    cuda: Cuda = None,
    cpu: Cpu = None,
    base: Base = None,
) -> ImageRequest:
    """What the image is for. Raises UsageError for options that exclude each other."""
    for_hosts = hosts is not None or facts_file is not None
    if for_hosts and (system or cuda):
        raise UsageError("HOSTS and --os or --cuda exclude each other", hint="give one of them")
    if cuda and cpu:
        raise UsageError("--cuda and --cpu exclude each other", hint="leave one of them out")
    if base is not None:
        image_names.checked(base)
    inventory = inventory_of(hosts, limit) if hosts is not None else None
    return ImageRequest(inventory, facts_file, limit, system, cuda, cpu, base)


@app.command("render")
@with_options(request=_request, options=plan_options(), passwords=passwords)
def render_(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Write the Dockerfile and its context into this folder; without, print it.", file_okay=True
        ),
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Render every supported system and CUDA, each into a folder.")] = False,
    *,
    request: ImageRequest,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Write a Dockerfile and its context, from the same plan and lock as the hosts."""
    if matrix and (not request.is_empty or out is None):
        raise UsageError(
            "--matrix renders everything into folders", hint="give -o DIR, and nothing else of HOSTS, --os, --cuda, --cpu, --base"
        )
    made = image_request.plan_all(options) if matrix else _plan(request, options, passwords)
    contexts = {each.name: render.context(each) for each in made}
    if out is None:
        for files in contexts.values():
            terminal.out().content(files["Dockerfile"].content.decode())
        return
    for name, files in contexts.items():
        render.write(out / name if matrix or len(contexts) > 1 else out, files)
    terminal.say(f"{out}: {', '.join(contexts) if len(contexts) < 5 else f'{len(contexts)} images'}")


@app.command("build")
@with_options(request=_request, options=plan_options(), passwords=passwords)
def build_(
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", metavar="NAME:TAG", help="Name of the image; provision:SYSTEM by default.")
    ] = None,
    mirror: Annotated[str | None, typer.Option("--mirror", metavar="URL", help="Mirror for the distribution's packages.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build without the cache of earlier builds.")] = False,
    *,
    request: ImageRequest,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Build the image with this machine's container engine. The machine's certificates and proxies are used and stay out of the image."""
    began = time.monotonic()
    wanted = build.checked_tag(tag) if tag else None
    made = _plan(request, options, passwords)
    if wanted and len(made) > 1:
        raise UsageError(f"these hosts need {len(made)} images: --tag names one", hint="leave --tag out, or choose hosts: --limit")
    tags = [wanted or build.checked_tag(f"provision:{each.name}") for each in made]  # all, before the first is built
    build.check_mirror(url("--mirror", mirror), made)
    for each, called in zip(made, tags, strict=True):
        done = build.build(each, called, options, progress.make(), mirror=mirror, cache=not no_cache)
        ended = time.monotonic()  # the first image's time includes the survey and the plan, so that all add up to the command's
        terminal.out().say(f"{done.tag}: {done.image[7:19]}, {done.size / 1e6:.0f} MB, {duration(ended - began)}, log {done.log}")
        began = ended
        terminal.say(f"not verified yet: provision image verify {done.tag}")


def _plan(request: ImageRequest, options: Options, passwords: Mapping[str, str]) -> list[Target]:
    with progress.make() as shown:
        made, problems = image_request.plan_targets(request, options, shown, passwords)
    model.show_problems(problems, terminal.err())
    return made


@app.command("verify")
def verify_(
    image: Image,
    hosts: Annotated[int, typer.Option("--hosts", min=2, max=max_here(), help="Number of containers to train in.")] = 2,
    data: Annotated[Path | None, DATA] = None,
    json_: Json = False,
) -> None:
    """Verify an image: doctor's checks in its containers, the engine's self-check, and the smoke job across them over ssh and mpirun."""
    image_names.checked(image)
    with progress.make() as shown:
        verdict = verification.verify(image, hosts, SmokeOptions(data=data), shown)
    if json_:
        terminal.print_json(verdict.as_dict())
    else:
        console = terminal.out()
        for line in verdict.summaries:
            console.say(line)
        for finding in verdict.findings:
            if finding.severity != "error":
                console.say(f"{finding.severity}: {finding.host or 'between hosts'}: {finding.what}: {finding.observed}")
        for fault in verdict.faults:
            console.say(f"fault: {fault}", style="red")
        console.say(f"{image} is {'ready' if verdict.ready else 'not ready'} ({duration(verdict.seconds)}, {verdict.folder})")
    if not verdict.ready:
        raise typer.Exit(1)

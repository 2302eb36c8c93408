"""`provision image …` on the command line: parse, call one function, print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.help import App
from provision.cli.options import Cpu, Data, Epochs, Hosts, Json, Limit, also, inventory_of, passwords, requirements, url
from provision.cli.run_options import run_options
from provision.containers import container_engine, image_names
from provision.image import build, folder, job, labels, render, request, store, verification
from provision.image.recipe import LABEL
from provision.launch.program import RunOptions
from provision.plan.options import Options, SmokeOptions
from provision.remote import progress
from provision.remote.session import Session
from provision.report import model
from provision.survey import collect, installed

app = App(
    no_args_is_help=True,
    help="Ready-to-run images from the same plan as the hosts.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ForHosts = Annotated[
    str | None, typer.Argument(metavar="HOSTS", show_default=False, help="Make it for these hosts; or say --os, --cuda, --cpu.")
]
System = Annotated[str | None, typer.Option("--os", help="Make it of this system, e.g. ubuntu22.04.", metavar="SYSTEM")]
Cuda = Annotated[str | None, typer.Option("--cuda", help="For this CUDA, e.g. 12.4.", metavar="VERSION")]
Facts = Annotated[Path | None, typer.Option("--facts", help="As for `plan`: from this file of facts, touching no host.")]
Base = Annotated[str | None, typer.Option("--base", help="Begin with this image instead of the catalogue's.", metavar="IMAGE")]
Image = Annotated[str, typer.Argument(metavar="IMAGE", help="Its name, as `provision image ls` shows it.")]


def subject(
    hosts: ForHosts = None,
    limit: Limit = None,
    facts_file: Facts = None,
    system: System = None,
    cuda: Cuda = None,
    cpu: Cpu = None,
    base: Base = None,
) -> request.Subject:
    """What the image is to be of. Raises UsageError for what contradicts itself."""
    of_hosts = hosts is not None or facts_file is not None
    if of_hosts and (system or cuda):
        raise UsageError("HOSTS and --os or --cuda exclude each other", hint="give one of them")
    if cuda and cpu:
        raise UsageError("--cuda and --cpu exclude each other", hint="leave one of them out")
    if base is not None:
        image_names.checked(base)
    inventory = inventory_of(hosts, limit) if hosts is not None else None
    return request.Subject(inventory, facts_file, limit, system, cuda, cpu, base)


def _check_format(kind: str | None) -> None:
    """The deprecated ``--format``, which has no choice any more. Raises UsageError for all but a Dockerfile."""
    instead = {
        "apptainer": "build the image and convert it: apptainer build IMAGE.sif docker-daemon://NAME:TAG",
        "devcontainer": 'build the image and name it in .devcontainer/devcontainer.json: {"image": "NAME:TAG"}',
    }
    if kind in instead:
        raise UsageError(f"--format {kind}: this format was removed", hint=instead[kind])
    if kind not in (None, "dockerfile"):
        raise UsageError(f"--format {kind}: there is no such format", hint="leave it out: a Dockerfile is rendered")
    if kind:
        terminal.say("--format is deprecated: a Dockerfile is always rendered; leave it out")


@app.command("render")
@also(subject=subject, options=requirements, passwords=passwords)
def render_(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write it and all that a build needs here; without, print it.", file_okay=True),
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Every system and CUDA that there are images of, a folder each.")] = False,
    buildx: Annotated[bool, typer.Option("--buildx", hidden=True)] = False,
    kind: Annotated[str | None, typer.Option("--format", hidden=True)] = None,
    *,
    subject: request.Subject,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Write a Dockerfile and its context, from the same plan and lock as the hosts."""
    _check_format(kind)
    if buildx:
        terminal.say("--buildx is deprecated: every Dockerfile is for BuildKit; leave it out")
    if matrix and (subject.named or out is None):
        raise UsageError(
            "--matrix renders everything into folders", hint="give -o DIR, and nothing else of HOSTS, --os, --cuda, --cpu, --base"
        )
    if matrix:
        made = request.everything(options)
    else:
        with progress.make() as shown:
            made, problems = request.targets_of(subject, options, shown, passwords)
        model.show_problems(problems, terminal.err())
    contexts = {each.target.name: render.context(each.target, each.engine, locked=each.locked) for each in made}
    if out is None:
        for files in contexts.values():
            terminal.out().content(files["Dockerfile"].content.decode())
        return
    for name, files in contexts.items():
        folder.write(out / name if matrix or len(contexts) > 1 else out, files)
    terminal.say(f"{out}: {', '.join(contexts) if len(contexts) < 5 else f'{len(contexts)} images'}")


@app.command("build")
@also(subject=subject, options=requirements, passwords=passwords)
def build_(
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", metavar="NAME:TAG", help="What to call it; provision:SYSTEM by default.")
    ] = None,
    mirror: Annotated[str | None, typer.Option("--mirror", metavar="URL", help="Take the distribution's packages from here.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Use nothing that earlier builds left.")] = False,
    *,
    subject: request.Subject,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Build the image on this machine's container engine. Certificates, proxies and indexes of this machine are used and stay out of it."""
    wanted = build.checked_tag(tag) if tag else None
    with progress.make() as shown:
        made, problems = request.targets_of(subject, options, shown, passwords)
    model.show_problems(problems, terminal.err())
    if wanted and len(made) > 1:
        raise UsageError(f"these hosts need {len(made)} images: --tag names one", hint="leave --tag out, or choose hosts: --limit")
    tags = [wanted or build.checked_tag(f"provision:{each.target.name}") for each in made]  # all, before the first is built
    build.check_mirror(url("--mirror", mirror), made)
    for each, called in zip(made, tags, strict=True):
        done = build.build(each, called, options, mirror=mirror, cache=not no_cache)
        terminal.out().say(f"{done.tag}: {done.image[7:19]}, {done.size / 1e6:.0f} MB, {done.seconds:.0f} s, log {done.log}")
        terminal.say(f"not proven yet: provision image verify {done.tag}")


@app.command("verify")
def verify_(
    image: Image,
    hosts: Annotated[int, typer.Option("--hosts", help="Containers that train together.")] = 2,
    data: Data = None,
    json_: Json = False,
) -> None:
    """Prove an image: doctor's checks in its containers, the engine's self-check, and the training job across them over SSH and mpirun."""
    with progress.make() as shown:
        verdict = verification.verify(image, hosts, SmokeOptions(data=data), shown)
    if json_:
        terminal.document(verdict.as_dict())
    else:
        console = terminal.out()
        for line in verdict.summaries:
            console.say(line)
        for finding in verdict.findings:
            if finding.severity != "error":
                console.say(f"{finding.severity}: {finding.host or 'between them'}: {finding.title}: {finding.seen}")
        for fault in verdict.faults:
            console.say(f"fault: {fault}", style="red")
        console.say(f"{image} is {'ready' if verdict.ready else 'not ready'} ({verdict.seconds:.0f} s, {verdict.folder})")
    if not verdict.ready:
        raise typer.Exit(1)


@app.command("run")
@also(options=run_options, passwords=passwords)
def run_(
    hosts: Hosts,
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="A name that this machine or a registry knows, or a file that `docker save` wrote.")
    ],
    limit: Limit = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Train MNIST, as `provision smoke` does.")] = False,
    epochs: Epochs = None,
    data: Data = None,
    volumes: Annotated[
        list[str] | None,
        typer.Option("--volume", "-v", metavar="FOLDER:FOLDER[:ro]", help="A folder of the hosts in the containers, for data and results."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the image on hosts where it was not before; without, it is taken off at the end.")
    ] = False,
    *,
    options: RunOptions,
    passwords: Mapping[str, str],
) -> None:
    """Run a job in containers of an image, one on every host, e.g. `provision image run hosts.ini mine:1 -- python train.py`.

    The hosts need a container engine and nothing else. Containers, keys and what was copied are gone at the end, however it ends.
    """
    if smoke and options.command:
        raise UsageError("--smoke and a program exclude each other", hint="leave one of them out")
    if not smoke and not options.command:
        raise UsageError("nothing to run", hint="say --smoke, or name a program: provision image run HOSTS IMAGE -- python train.py")
    if not smoke and (epochs or data):
        raise UsageError("--epochs and --data are about --smoke", hint="leave them out")
    if options.python is not None:
        raise UsageError("--python: the image has its own", hint="leave it out")
    for volume in volumes or ():
        if not re.fullmatch(r"/[^:]*:/[^:]*(:ro|:rw)?", volume):
            raise UsageError(f"--volume {volume}: this is no folder of hosts and one of containers", hint="write it like /data:/data:ro")
    inventory = inventory_of(hosts, limit)
    training = SmokeOptions(np=options.np, epochs=epochs, data=data, oversubscribe=options.oversubscribe)
    with progress.make() as shown:
        wanted = job.Wanted(None if smoke else options, training, tuple(volumes or ()), keep)
        ended = job.run(inventory, image, wanted, shown, passwords)
    console = terminal.out()
    if ended.summary:
        console.say(ended.summary)
    for fault in ended.faults:
        console.say(f"fault: {fault}", style="red")
    raise typer.Exit(ended.code)


@app.command("manifest", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def manifest() -> None:
    """Removed. A job of Kubernetes' MPI operator is now written by hand, from examples/mpijob.yaml in provision's sources."""
    what = "provision image manifest: this command was removed"
    raise UsageError(what, hint="copy examples/mpijob.yaml of provision's sources and edit image, replicas, slots and program")


@app.command("ls")
def ls(json_: Json = False) -> None:
    """The images that were made here: what they hold, and whether they are proven."""
    client = container_engine.connect()
    try:
        found = store.listed(client)
    finally:
        client.close()
    rows = [
        {
            "image": told.name,
            "state": "ready" if told.ready else "not proven",
            "of": told.labels[LABEL],
            "Open MPI": told.of("openmpi"),
            "NCCL": told.of("nccl") or "-",
            "PyTorch": told.of("torch") or "-",
            "engine": told.of("engine"),
            "MB": f"{told.size / 1e6:.0f}",
        }
        for told in found
    ]
    if json_:
        listed = [
            {"image": told.name, "id": told.image, "ready": told.ready, "bytes": told.size, "labels": dict(told.labels)} for told in found
        ]
        terminal.document({"schema": 1, "images": listed})
    elif rows:
        terminal.out().print(terminal.table(rows))
    else:
        terminal.out().say("no image was made here yet: provision image build")


@app.command("rm")
def rm(images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Names, as `provision image ls` shows them.")]) -> None:
    """Take images off this machine; only those that provision made."""
    client = container_engine.connect()
    try:
        for name in images:
            store.remove(client, name)
            terminal.out().say(f"removed {name}")
    finally:
        client.close()


@app.command("push")
def push(
    image: Image,
    unproven: Annotated[bool, typer.Option("--unproven", help="Push it although it was not verified.")] = False,
) -> None:
    """Send an image to the registry that its name says, e.g. registry.example/mine:1. Prints the digest by which others pin it."""
    client = container_engine.connect()
    try:
        digest = store.push(client, image, unproven=unproven)
    finally:
        client.close()
    terminal.out().say(f"{labels.parted(image)[0]}@{digest}")


@app.command("diff")
@also(passwords=passwords)
def diff(
    hosts: Hosts,
    image: Image,
    limit: Limit = None,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Where hosts, by what is installed there, and an image differ."""
    inventory = inventory_of(hosts, limit)
    client = container_engine.connect()
    try:
        told = store.get(client, image)
    finally:
        client.close()
    with progress.make() as shown:
        session = Session(inventory, shown, passwords)
        try:
            found = collect.survey_hosts(session)
        finally:
            session.close()
    model.show_problems([problem for problem in found.problems if problem.host not in found.hosts], terminal.err())
    held = installed.plan(inventory, {name: each for name, each in found.hosts.items() if each.installed.manifest}).hosts
    lines = store.differences({name: held.get(name) for name in found.hosts}, told)
    for line in lines:
        terminal.out().say(line)
    absent = len(found.hosts) < len(inventory.hosts)
    if not lines and not absent:
        terminal.out().say(f"{len(held)} hosts hold what {image} holds")
    if lines or absent:
        raise typer.Exit(1)

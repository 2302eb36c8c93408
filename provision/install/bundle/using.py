"""What a run that installs from a bundle takes out of it, besides what the playbook hands to the hosts."""

from __future__ import annotations

from dataclasses import replace

from provision.base import tarball
from provision.base.errors import ProvisionError
from provision.install.artifacts import UserFiles
from provision.install.bundle.archive import Bundle
from provision.plan.model import Plan
from provision.plan.options import Options, SmokeOptions
from provision.remote import shell
from provision.remote.session import Session

_PACKAGES = "dpkg-query -W -f '${db:Status-Status} ${Package}\\n'"


def refuse_incomplete(session: Session, bundle: Bundle, plan: Plan) -> None:
    """Raise UsageError when the bundle lacks what the plan needs on a host as it is now; nothing has been touched then."""
    bundle.must_hold(plan)
    wanting = [name for name, host in plan.hosts.items() if host.root]  # without root there are no packages
    there: dict[str, list[str]] = {name: [] for name in plan.hosts}
    for name, answer in shell.ask(session, dict.fromkeys(wanting, _PACKAGES)).items():
        if answer.code != 0:
            raise ProvisionError(f"it does not say which packages it has: {answer.complaint}", where=name)
        there[name] = [line.partition(" ")[2] for line in answer.out.splitlines() if line.startswith("installed ")]
    bundle.must_complete(plan, there)


def with_files_of(bundle: Bundle, options: Options) -> Options:
    """The options with the files that were given when the bundle was made, where none are given now."""
    nccl_sources = bundle.supply("nccl_tarball")
    return replace(
        options,
        nccl_local=options.nccl_local or bundle.supply("nccl_local"),
        nccl_tarball=options.nccl_tarball or (tarball.nccl(nccl_sources) if nccl_sources else None),
        openmpi_tarball=options.openmpi_tarball or bundle.supply("openmpi_tarball"),
    )


def with_sources_of(bundle: Bundle, given: UserFiles) -> UserFiles:
    """What was fetched for the bundle takes the place of fetching it."""
    return replace(
        given,
        nccl_tarball=given.nccl_tarball or bundle.supply("nccl_sources"),
        openmpi_tarball=given.openmpi_tarball or bundle.supply("openmpi_sources"),
    )


def with_data_of(bundle: Bundle | None, options: SmokeOptions) -> SmokeOptions:
    """The training job's data come from the bundle where it has them and none were named."""
    if bundle is None or bundle.data is None or options.data is not None:
        return options
    return replace(options, cache=bundle.cache, source=bundle.data)

"""What a run that installs from a bundle takes out of it, besides what the playbook hands to the hosts."""

from __future__ import annotations

from dataclasses import replace

from provision import launch, tarball
from provision.bundle.archive import Bundle
from provision.install_options import Options
from provision.supplies import Given


def with_files_of(bundle: Bundle, options: Options) -> Options:
    """The options with the files that were given when the bundle was made, where none are given now."""
    nccl_sources = bundle.supply("nccl_tarball")
    return replace(
        options,
        nccl_local=options.nccl_local or bundle.supply("nccl_local"),
        nccl_tarball=options.nccl_tarball or (tarball.nccl(nccl_sources) if nccl_sources else None),
        openmpi_tarball=options.openmpi_tarball or bundle.supply("openmpi_tarball"),
    )


def with_sources_of(bundle: Bundle, given: Given) -> Given:
    """What was fetched for the bundle takes the place of fetching it."""
    return replace(
        given,
        nccl_tarball=given.nccl_tarball or bundle.supply("nccl_sources"),
        openmpi_tarball=given.openmpi_tarball or bundle.supply("openmpi_sources"),
    )


def with_data_of(bundle: Bundle | None, options: launch.SmokeOptions) -> launch.SmokeOptions:
    """The training job's data come from the bundle where it has them and none were named."""
    if bundle is None or bundle.data is None or options.data is not None:
        return options
    return replace(options, cache=bundle.cache, source=bundle.data)

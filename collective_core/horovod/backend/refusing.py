"""Builds the package as scikit-build-core does, but not in an environment that has the real Horovod, whose files it would overwrite."""

from __future__ import annotations

import sys
import sysconfig
from importlib import metadata
from typing import Any

from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from scikit_build_core.build import build_wheel as _build_wheel
from scikit_build_core.build import prepare_metadata_for_build_wheel as _prepare_metadata

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]


def _refuse_beside_horovod() -> None:
    # pip builds with the environment's own interpreter, and hides its packages from the search path alone.
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for found in metadata.distributions(path=folders):
        if (found.metadata["Name"] or "").lower() == "horovod":
            sys.exit(
                f"Horovod {found.version} is installed in {sys.prefix}, and this package has the same name: "
                "they would overwrite each other. To run on collective_core instead: pip uninstall horovod"
            )


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """The first that pip asks for."""
    _refuse_beside_horovod()
    return str(_prepare_metadata(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """The wheel's name."""
    _refuse_beside_horovod()
    return str(_build_wheel(wheel_directory, config_settings, metadata_directory))

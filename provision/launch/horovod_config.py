"""Reads the YAML file of ``horovodrun --config-file``; its sections and keys are those of the table of options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from provision.base.errors import UsageError
from provision.launch.option_table import JOB_OPTIONS, Option

_KEYS = {option.key: option for option in JOB_OPTIONS if option.key}
_SECTIONS = list(dict.fromkeys(key.partition(".")[0] for key in _KEYS))
_LAUNCHERS = {"gloo": "own", "mpi": "mpi"}


@dataclass(frozen=True)
class Config:
    """``launcher``: one of `LAUNCHERS`, or None. ``variables``: for every rank. ``unknown``: a warning for each unknown section and key."""

    launcher: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def read(path: Path) -> Config:
    """Raises UsageError naming the file and the invalid value."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=f"--config-file {path}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date or number
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=f"{path}{line}") from error
    if not isinstance(document, dict):
        raise UsageError("a mapping of sections is expected, e.g. `params:`", where=str(path))
    launcher = document.pop("controller", None)
    if launcher is not None and str(launcher).lower() not in _LAUNCHERS:
        raise UsageError(f"controller: {launcher}: must be gloo or mpi", where=str(path))
    if not isinstance(document.get("autotune", {}), dict):
        document["autotune"] = {"enabled": document["autotune"]}
    variables: dict[str, str] = {}
    unknown: list[str] = []
    for section, keys in document.items():
        if section not in _SECTIONS:
            unknown.append(f"{path}: {section}: no such section, it has no effect; there are {', '.join(['controller', *_SECTIONS])}")
            continue
        if not isinstance(keys, dict):
            raise UsageError(f"{section}: keys and values are expected", where=str(path))
        for key, value in keys.items():
            option = _KEYS.get(f"{section}.{key}")
            if option is None:
                known = ", ".join(name.partition(".")[2] for name in _KEYS if name.startswith(f"{section}."))
                unknown.append(f"{path}: {section}: {key}: no such key, it has no effect; there are {known}")
            elif option.horovod and value is not None:
                variables[option.horovod] = as_text(option, value, f"{path}: {section}: {key}")
            elif value is not None and as_text(option, value, f"{path}: {section}: {key}") == "1":
                variables[option.engine] = "1"  # false leaves it to the shell's variables
    return Config(_LAUNCHERS[str(launcher).lower()] if launcher is not None else None, variables, tuple(unknown))


def unset(settings: Mapping[str, str], shell: Mapping[str, str]) -> dict[str, str]:
    """Empty values, which count as none, for the engine's variables of the shell that would win over Horovod's in ``settings``."""
    return {each.engine: "" for each in JOB_OPTIONS if each.horovod in settings and each.engine in shell}


def as_text(option: Option, value: object, where: str) -> str:
    """A value of the file as Horovod's variable has it. Raises UsageError, with ``where``, for an invalid one."""
    if option.kind is str:
        if not str(value).isprintable():
            raise UsageError(f"{value!r} cannot be a variable's value", where=where)
        return str(value)
    if option.kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{value!r} is neither true nor false", where=where)
        return str(int(value is option.on))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value * option.scale < 1 << 63:
        raise UsageError(f"{value!r} is not a number from 0 to {((1 << 63) - 1) // option.scale}", where=where)
    return str(value if option.scale == 1 else int(value * option.scale))

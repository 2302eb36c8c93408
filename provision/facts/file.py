"""A facts file, as `provision survey --json` writes it or as a person does, who leaves most out. All its mistakes are said at once."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provision import catalog
from provision.base.errors import ProvisionError, UsageError
from provision.facts.defaults import BESIDES, DEFAULTS, OFFERS
from provision.facts.document import Facts, defused, normalise, parse
from provision.facts.kinds import is_version, wrong_kinds
from provision.inventory.values import HOST_NAME

SCHEMA = 1
_DOTTED = re.compile(r"\d+(\.\d+)*")
_CUDA = re.compile(r"\d+\.\d+")  # `12` alone would be read as 12.0
_CAPABILITY = re.compile(r"\d+\.\d+")
# They become parts of the names of files, here and on hosts, and of other hosts' settings: os-release and uname have nothing else.
_WORD = re.compile(r"\w[\w.+~:-]*")
_CHECKED_APART = ("os", "arch", "driver", "gpus")

_SMALLEST = (
    'the least a host needs: {"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", '
    '"driver": {"version": "535.104.05", "cuda": "12.2"}, "gpus": [{"name": "…", "compute_capability": "8.0"}]}'
)


def load_file(path: str | Path) -> dict[str, Facts]:
    """Host → normalised facts, from a file as `provision survey --json` writes it or as a person does.

    Raises:
        UsageError: the file cannot be read or used; all that is wrong with it at once.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the facts cannot be read: {error.strerror or error}", where=name) from error
    except UnicodeDecodeError as error:
        raise UsageError("the facts are no UTF-8 text", where=name) from error
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except UsageError as error:
        raise UsageError(error.what, where=name, hint=error.hint) from error
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise UsageError(f"the facts are no JSON: {getattr(error, 'msg', error)}", where=f"{name}:{line}" if line else name) from error
    wrong = list(_wrong_in_file(document))
    if len(wrong) == 1:
        raise UsageError(wrong[0], where=name, hint=_SMALLEST)
    if wrong:
        raise UsageError("\n".join(f"{name}: {each}" for each in wrong), hint=_SMALLEST)
    return {host: normalise(defused(facts)) for host, facts in document["hosts"].items()}


def answer(stdout: str) -> Facts:
    """What the survey printed on a host, as `parse` reads it: it must be facts as a file of them must.

    Raises:
        ProvisionError: it is something else.
    """
    found = parse(stdout)
    seen = {name: section for name, section in found.items() if section is not None}  # what could not be looked at is told apart
    if wrong := list(_wrong_facts("facts", {"os": {"id": "linux", "version": ""}, "arch": "", **seen})):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = f"the survey's answer cannot be true: {wrong[0]}{more}"
        raise ProvisionError(what, hint="look at this host: its own Python answers so")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that stands in it twice would silently be the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise UsageError(f"`{twice}` stands twice in one object", hint="name each host, and each of its facts, once")
    return found


def _wrong_in_file(document: Any) -> Iterator[str]:
    if not isinstance(document, dict):
        yield "the facts must be a JSON object with the key `hosts`"
        return
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        yield f"`schema` is {schema!r}; this version reads {SCHEMA}"
    hosts = document.get("hosts")
    if not isinstance(hosts, dict):
        yield "the key `hosts` is missing" if "hosts" not in document else "`hosts` must be an object: host name → facts"
        return
    if not hosts:
        yield "`hosts` is empty"
    for name, facts in hosts.items():
        if not HOST_NAME.fullmatch(name):
            yield f"`hosts`: {name!r} is not a host name: letters, digits, `_`, `-`, `.` and `:`"
        yield from _wrong_in_host(f"hosts.{name}", facts)


def _wrong_in_host(at: str, facts: Any) -> Iterator[str]:
    if not isinstance(facts, dict):
        yield f"`{at}` must be an object"
        return
    if not (facts.get("missing_python") or facts.get("unreachable")):
        yield from _unknown_keys(at, facts)
        for offers in OFFERS:
            yield from _wrong_candidates(f"{at}.{offers}", facts.get(offers))
    yield from _wrong_facts(at, facts)


def _wrong_facts(at: str, facts: dict[str, Any]) -> Iterator[str]:
    """What would surprise those who read the facts of a host, whoever states them."""
    if not (facts.get("missing_python") or facts.get("unreachable")):
        yield from _wrong_system(at, facts)
        yield from _wrong_driver(f"{at}.driver", facts.get("driver"))
        yield from _wrong_gpus(f"{at}.gpus", facts.get("gpus"))
        yield from wrong_kinds(at, facts, _CHECKED_APART)


def _unknown_keys(at: str, facts: dict[str, Any]) -> Iterator[str]:
    """Only what looks like a misspelling: later versions may know more keys than this one."""
    for key in facts:
        if key not in DEFAULTS and key not in BESIDES:
            close = difflib.get_close_matches(key, DEFAULTS, n=1, cutoff=0.75)
            if close and close[0] not in facts:
                yield f"`{at}.{key}` is unknown; did you mean `{close[0]}`?"


def _wrong_system(at: str, facts: dict[str, Any]) -> Iterator[str]:
    system = facts.get("os")
    if system is None:
        yield f"`{at}.os` is missing"
    elif not isinstance(system, dict):
        yield f"`{at}.os` must be an object with `id` and `version`"
    else:
        for key in ("id", "version"):
            if not isinstance(system.get(key), str) or (key == "id" and not system[key]):
                yield f"`{at}.os.{key}` " + ("is missing" if key not in system else "must be a text in quotes")
        known = system.get("id") in catalog.load("os")["distributions"]  # of others nothing is compared
        if known and isinstance(version := system.get("version"), str) and version and not is_version(version):
            yield f'`{at}.os.version` must be a version, such as "22.04"'
        for key in ("id", "version", "family", "codename"):
            if isinstance(system.get(key), str) and system[key] and not _WORD.fullmatch(system[key]):
                yield f"`{at}.os.{key}` must be a word of letters, digits and . _ + ~ : -"
    if not isinstance(facts.get("arch"), str):
        yield f"`{at}.arch` " + ("is missing" if facts.get("arch") is None else "must be a text in quotes")
    elif facts["arch"] and not _WORD.fullmatch(facts["arch"]):
        yield f"`{at}.arch` must be a word of letters, digits and . _ + ~ : -"


def _wrong_driver(at: str, driver: Any) -> Iterator[str]:
    if driver is None:
        return
    if not isinstance(driver, dict):
        yield f"`{at}` must be an object with `version` and `cuda`, or null"
        return
    for key, form, example in (("version", _DOTTED, "535.104.05"), ("cuda", _CUDA, "12.2")):
        value = driver.get(key)
        if value is None and key == "cuda":
            continue  # normalise reports it
        if isinstance(value, (int, float)):
            yield f'`{at}.{key}` must be in quotes, "{value}": as numbers 12.10 and 12.1 are the same'
        elif not isinstance(value, str) or not form.fullmatch(value):
            yield f'`{at}.{key}` must be a version, such as "{example}"'


def _wrong_gpus(at: str, gpus: Any) -> Iterator[str]:
    if gpus is not None and not isinstance(gpus, list):
        yield f"`{at}` must be a list"
        return
    for index, gpu in enumerate(gpus or ()):
        if not isinstance(gpu, dict):
            yield f"`{at}[{index}]` must be an object with `name` and `compute_capability`"
        elif gpu.get("compute_capability") is not None and not _CAPABILITY.fullmatch(str(gpu["compute_capability"])):
            yield f'`{at}[{index}].compute_capability` must look like "8.0"'


def _wrong_candidates(at: str, candidates: Any) -> Iterator[str]:
    for package, versions in candidates.items() if isinstance(candidates, dict) else ():
        if not isinstance(versions, list) or not all(isinstance(version, str) and re.search(r"\d", version) for version in versions):
            yield f"`{at}.{package}` must be a list of versions in quotes"

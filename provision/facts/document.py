"""One host's facts: out of the survey's output, and completed so that readers need not ask what is there. Pure."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from provision import catalog
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import architectures
from provision.facts import defaults
from provision.facts.kinds import is_version

Facts = dict[str, Any]

BEGIN = "===PROVISION-FACTS-BEGIN==="
END = "===END==="


def parse(stdout: str, mark: str = BEGIN, what: str = "the survey") -> Facts:
    """The document out of what one of our scripts printed on a host, whatever banners stand around it.

    Args:
        mark: the line before the document.
        what: the script, for messages.

    Raises:
        ProvisionError: the output is something else, or breaks off.
    """
    _, begin, rest = stdout.rpartition(mark)
    if not begin:
        said = _last_line(stdout)
        raise ProvisionError(f"{what} did not run" + (f"; the host said: {said}" if said else "; the host said nothing"))
    body, end, _ = rest.partition(END)
    if not end:
        raise ProvisionError(f"{what}'s answer breaks off before its end", hint="run it again; if it stays so, look at the connection")
    try:
        document = json.loads(body)
    except ValueError as error:
        raise ProvisionError(f"{what}'s answer is damaged: {error}", hint="run it again; if it stays so, look at the connection") from error
    if not isinstance(document, dict):
        raise ProvisionError(f"{what}'s answer is no JSON object")
    harmless: Facts = defused(document)
    return harmless


def defused(value: Any) -> Any:
    """The document with every text made harmless: it comes from another machine and travels on in Ansible's variables.

    Ansible would run what stands in ``{{ … }}`` on the controller; a control character could break out of a line of a rendered file; a lone
    surrogate can be written nowhere.
    """
    if isinstance(value, str):
        if "{" not in value and value.isprintable():  # nearly all of them
            return value
        for opening in ("{{", "{%", "{#"):
            value = value.replace(opening, f"{{ {opening[1]}")
        harmless = "".join(letter if letter >= " " or letter in "\n\t" else " " for letter in value)
        return harmless.encode(errors="replace").decode()  # half a pair of surrogates, which JSON can hold and no UTF-8
    if isinstance(value, list):
        return [defused(entry) for entry in value]
    if isinstance(value, dict):
        return {defused(key): defused(entry) for key, entry in value.items()}
    return value


def normalise(host_facts: Mapping[str, Any]) -> Facts:
    """Facts with every section in place; what had to be assumed is named under ``missing``.

    Normalised facts stay as they are. The result is for reading: hosts share the defaults below its sections.
    """
    facts: Facts = {**host_facts}
    missing: list[str] = list(host_facts.get("missing") or ())
    if facts.get("missing_python") or facts.get("unreachable"):
        return facts
    for key, default in defaults.DEFAULTS.items():
        if key not in facts:
            facts[key] = copy.copy(default)  # shallow: ten thousand hosts share what is below
            if key not in missing and key not in ("driver", "gpus"):  # no driver and no GPUs is what most hosts have
                missing.append(key)
        elif facts[key] is None and default is not None:
            facts[key] = copy.copy(default)
        elif isinstance(default, dict) and default:
            stated = facts[key]
            facts[key] = default | {name: value for name, value in stated.items() if value is not None or default.get(name) is None}
    if host_facts.get("driver") and "gpus" not in host_facts:  # a driver is there for a GPU; which one, nobody said
        missing.append("gpus")
    facts["arch"] = architectures.kernel_name(facts["arch"])
    facts["os"] = _system(facts["os"])
    if facts["driver"] is not None:
        facts["driver"] = defaults.DRIVER | facts["driver"]
        if facts["driver"]["cuda"] is None and "driver.cuda" not in missing:
            missing.append("driver.cuda")
    facts["gpus"] = [defaults.GPU | gpu for gpu in facts["gpus"] or ()]
    for index, gpu in enumerate(facts["gpus"]):
        key = f"gpus[{index}].compute_capability"
        if gpu["compute_capability"] is None and key not in missing:
            missing.append(key)
        elif gpu["compute_capability"] is not None:
            gpu["compute_capability"] = str(gpu["compute_capability"])
    if facts["package_manager"]["name"] is None:
        facts["package_manager"]["name"] = defaults.PACKAGE_MANAGERS.get(facts["os"]["family"], "none")
    if facts["user"]["can_become"] is None:
        facts["user"] = facts["user"] | {"can_become": facts["user"]["sudo"] != "none"}
    facts.setdefault("errors", {})
    for offers in defaults.OFFERS:
        facts[offers], odd = _plain(facts[offers])
        if odd:
            facts["errors"] = {**facts["errors"], offers: f"no versions of packages: {', '.join(odd)}"}
    facts["missing"] = missing
    return facts


def with_python(facts: Facts, path: str | None, where: str) -> Facts:
    """The facts of a host for which the inventory names a Python (``provision_python``), as a survey of it would have found them.

    Raises:
        UsageError: nothing says which version that is; ``where`` is the place in the inventory.
    """
    if path is None or facts.get("missing_python") or facts.get("unreachable"):
        return facts
    python = facts["python"]
    full = path if path.startswith("/") else f"/usr/bin/{path}"
    known = {each.get("path"): each.get("version") for each in (*python["others"], python["asked_for"] or {})}
    known[python["executable"] or "/usr/bin/python3"] = python["version"]
    named = re.search(r"/python(3\.\d+)$", full)
    version = known.get(full) or (named[1] if named else None)
    if version is None:
        hint = "make the facts again with this inventory: provision survey HOSTS --json"
        raise UsageError(f"provision_python={path}: the facts do not say which Python that is", where=where, hint=hint)
    return {**facts, "python": {**python, "asked_for": {"path": full, "version": version}}}


def _plain(candidates: Mapping[str, list[Any]] | None) -> tuple[dict[str, list[str]], list[str]]:
    """(what a host's package index offers, what is no version): versions end up in the playbook and in commands."""
    kept = {package: [version for version in versions if is_version(version)] for package, versions in (candidates or {}).items()}
    odd = [f"{package} {version!r}" for package, versions in (candidates or {}).items() for version in versions if not is_version(version)]
    return kept, odd


def _system(system: dict[str, Any]) -> dict[str, Any]:
    entry = catalog.load("os")["distributions"].get(system["id"])
    alike = set(system["id_like"])
    family = system["family"] or (entry or {}).get("family")
    if family is None:
        family = "debian" if alike & {"debian", "ubuntu"} else "rhel" if alike & {"rhel", "fedora", "centos"} else "other"
    codename = system["codename"] or ((entry or {}).get("codenames") or {}).get(system["version"])
    return system | {"family": family, "codename": codename}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""

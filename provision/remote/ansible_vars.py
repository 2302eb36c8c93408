"""The one way in which values reach Ansible: a file of variables in which every text is marked as data.

Ansible renders what stands in ``{{ … }}`` of a variable, on the controller and as its user. What a plan, a lock, a bundle, an inventory
or a host says must not be rendered, so nothing is, whoever said it: templates of ours stand in the playbooks alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provision.base.errors import UsageError

# How Ansible's JSON names a text that is no template, in all versions that we work with.
_MARK = "__ansible_unsafe"
# A name cannot be marked. These mean something to Ansible's reader, or would be a template where a name is used as a value.
_NO_NAME = re.compile(r"__ansible_|#jinja2:|.*\{[{%#]", re.DOTALL)
# Far more than we need, far less than what Ansible's reader of JSON can do: what that cannot read, Ansible would read as YAML, where
# the mark means nothing.
_DEEPEST = 50


def write(path: Path, variables: Mapping[str, Any]) -> None:
    """Write ``variables`` for ``ansible-playbook -e @PATH``, into a file that only the user reads: an index may carry a password.

    Raises:
        UsageError: something cannot be handed to Ansible as data.
    """
    marked: dict[str, Any] = _marked(variables, {}, 0)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in marked.items())
    path.unlink(missing_ok=True)  # an earlier one keeps its mode
    path.touch(mode=0o600)
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _marked(value: Any, made: dict[int, Any], depth: int) -> Any:
    """``made``: what was made for an object, so that what ten thousand hosts share is made once."""
    if isinstance(value, str):
        return {_MARK: value}
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if id(value) in made:
        return made[id(value)]
    if depth == _DEEPEST:
        raise UsageError(f"there is something of more than {_DEEPEST} levels in what Ansible is to be told")
    if isinstance(value, Mapping):
        if odd := next((key for key in value if _NO_NAME.match(str(key))), None):
            raise UsageError(f"something is called {odd!r}, which Ansible would not take for a name", hint="look who wrote that, and why")
        found: Any = {key: _marked(each, made, depth + 1) for key, each in value.items()}
    else:
        found = [_marked(each, made, depth + 1) for each in value]
    made[id(value)] = found
    return found

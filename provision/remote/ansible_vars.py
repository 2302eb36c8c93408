"""The one way to pass values to Ansible: a file of variables in which every text is marked as data.

Ansible renders ``{{ … }}`` in a variable, on the controller and as its user. What a plan, a lock, a bundle, an inventory or a host says
must not be rendered, so no variable is: templates of ours are in the playbooks only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provision.base.errors import UsageError

# How Ansible's JSON marks a text that is not a template, in all supported versions.
_MARK = "__ansible_unsafe"
# A name cannot be marked. These are special to Ansible's reader, or templates where a name is used as a value.
_INVALID_NAME = re.compile(r"__ansible_|#jinja2:|.*\{[{%#]", re.DOTALL)
# Far less than Ansible's JSON reader can do: what that cannot read, Ansible would read as YAML, where the mark means nothing.
_DEEPEST = 50


def write(path: Path, variables: Mapping[str, object]) -> None:
    """Write ``variables`` for ``ansible-playbook -e @PATH``, into a file that only the user reads: an index may carry a password.

    Raises:
        UsageError: a name is a template, or the values are nested too deeply.
    """
    content = text(variables)
    path.unlink(missing_ok=True)  # an earlier one keeps its mode
    path.touch(mode=0o600)
    path.write_text(content, encoding="utf-8")


def text(variables: Mapping[str, object]) -> str:
    """What `write` writes."""
    marked: dict[str, Any] = _marked(variables, {}, 0)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in marked.items())
    return f"{{\n{lines}\n}}\n"


def _marked(value: Any, made: dict[int, Any], depth: int) -> Any:
    """``made``: the result for an object, so that what ten thousand hosts share is made once."""
    if isinstance(value, str):
        return {_MARK: value}
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if id(value) in made:
        return made[id(value)]
    if depth == _DEEPEST:
        raise UsageError(f"variables for Ansible are nested in more than {_DEEPEST} levels")
    if isinstance(value, Mapping):
        if invalid := next((key for key in value if _INVALID_NAME.match(str(key))), None):
            raise UsageError(f"{invalid!r} is not a name that Ansible can be given", hint="find out who wrote that, and why")
        found: Any = {key: _marked(each, made, depth + 1) for key, each in value.items()}
    else:
        found = [_marked(each, made, depth + 1) for each in value]
    made[id(value)] = found
    return found

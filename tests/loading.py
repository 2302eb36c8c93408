"""Loader of programs and Ansible modules that run on hosts: none of them is in a package."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


def load(name: str, path: Path) -> ModuleType:
    """Runs the file as a module of that name, which is not put into ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_script(name: str) -> ModuleType:
    """A script for hosts with all that it imports of ours, as it is sent to them."""
    from provision.base import resources

    module = ModuleType(name)
    exec(compile(resources.script(name), name, "exec"), module.__dict__)  # noqa: S102 - our own text
    return module


def load_ansible_module(name: str) -> ModuleType:
    """A module in playbooks/library, with our module_utils where Ansible puts them on the host."""
    import ansible.module_utils

    root = Path(__file__).parents[1]
    playbooks = root / "playbooks"
    shared = ("base/uv_support.py", "hostside/trust.py", "hostside/host_lock.py")
    for helper in (*(playbooks / "module_utils").glob("*.py"), *(root / "provision" / name for name in shared)):
        made = load(f"ansible.module_utils.{helper.stem}", helper)
        sys.modules[f"ansible.module_utils.{helper.stem}"] = made
        setattr(ansible.module_utils, helper.stem, made)
    return load(name, playbooks / "library" / f"{name}.py")


def run_ansible_module(name: str, arguments: dict[str, Any], *, check: bool = False) -> dict[str, Any]:
    """The answer of a module in playbooks/library, run within this process: Ansible itself takes two seconds to start."""
    from ansible.module_utils import basic

    module = load_ansible_module(name)
    text = json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check}}).encode()
    umask = os.umask(0o022)
    try:
        with (
            mock.patch.object(basic, "_ANSIBLE_ARGS", text),
            mock.patch.object(basic, "_ANSIBLE_PROFILE", "legacy", create=True),  # from ansible-core 2.19 on
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.suppress(SystemExit),
        ):
            module.main()
    finally:
        os.umask(umask)
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer

"""Loader of programs and Ansible modules that run on hosts: none of them is in a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(name: str, path: Path) -> ModuleType:
    """Runs the file as a module of that name, which is not put into ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_ansible_module(name: str) -> ModuleType:
    """A module in playbooks/library, with our module_utils where Ansible puts them on the host."""
    import ansible.module_utils

    root = Path(__file__).parents[1]
    playbooks = root / "playbooks"
    for helper in (*(playbooks / "module_utils").glob("*.py"), root / "provision/base/uv_support.py"):
        made = load(f"ansible.module_utils.{helper.stem}", helper)
        sys.modules[f"ansible.module_utils.{helper.stem}"] = made
        setattr(ansible.module_utils, helper.stem, made)
    return load(name, playbooks / "library" / f"{name}.py")

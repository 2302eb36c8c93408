"""Griffe's extension for the site's Python API: docstrings are reStructuredText in a few places, and pages are Markdown.

Every name of a module's ``__all__`` gets a description: its own, or that of what it is another name of.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe


def _assigned(module: ast.Module) -> Iterator[tuple[str, Any]]:
    for each in module.body:
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                yield getattr(target, "id", ""), each.value


_REDUCTIONS = Path(__file__).parent.parent / "collective_core/src/collective_core/runtime/reductions.py"
_OPTIONS = ast.literal_eval(dict(_assigned(ast.parse(_REDUCTIONS.read_text(encoding="utf-8"))))["OPTIONS"])


class Docstrings(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Roles become code, ``::`` before an example a colon, and ``#:`` above an attribute its docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)

    def on_attribute_instance(self, *, attr: griffe.Attribute, agent: griffe.Visitor, **_: Any) -> None:
        if attr.docstring is None and attr.lineno:
            above = agent.code.splitlines()[: attr.lineno - 1]
            comment: list[str] = []
            while above and (line := above.pop().strip()).startswith("#:"):
                comment.insert(0, line[2:].strip())
            if comment:
                attr.docstring = griffe.Docstring("\n".join(comment), parent=attr)
                self.on_instance(obj=attr)

    def on_function_instance(self, *, node: Any, func: griffe.Function, agent: griffe.Visitor, **_: Any) -> None:
        """The parameters of the allreduce family, which runtime/reductions.py makes of its table and of what the decorator says."""
        for made in getattr(node, "decorator_list", ()):
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "takes":
                known = dict(_assigned(ast.parse(agent.code)))
                form = known[made.args[0].id] if isinstance(made.args[0], ast.Name) else made.args[0]
                defaults = {each.arg: each.value for each in made.keywords if each.arg is not None}
                for shared in (known[each.value.id] for each in made.keywords if each.arg is None):
                    defaults |= {key.value: value for key, value in zip(shared.keys, shared.values, strict=True)}
                options = form.value.split()
                if "average" in options:
                    defaults["op"] = ast.Constant(None)
                parameters = [func.parameters[0]]
                for name in options:
                    default = ast.unparse(defaults[name]) if name in defaults else repr(_OPTIONS[name][1])
                    kind = "str | None" if name == "op" and default == "None" else _OPTIONS[name][0]
                    parameters.append(griffe.Parameter(name, annotation=kind, kind=parameters[0].kind, default=default))
                func.parameters = griffe.Parameters(*parameters)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        loader.resolve_aliases(implicit=True)
        defined: dict[str, griffe.Object] = {}
        for module in _modules(pkg):
            for name, member in module.members.items():
                if not member.is_alias and member.docstring is not None and not member.is_module:
                    defined.setdefault(name, member)
        # The package's own names come first: frameworks have functions of the same names.
        defined |= {name: member.final_target for name, member in pkg.members.items() if member.is_alias and _described(member)}
        for module in _modules(pkg):
            for export in module.exports or ():
                name = str(export)
                if not _described(module.members.get(name)):
                    member = module.members.get(name)
                    same = _function_of(member.final_target if member is not None and member.is_alias else member) or defined.get(name)
                    if same is not None:
                        module.set_member(name, griffe.Alias(name, same))


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for below in module.modules.values():
        if not below.is_alias:
            yield from _modules(below)


def _described(member: griffe.Object | griffe.Alias | None) -> bool:
    try:
        return member is not None and (member.is_module or member.docstring is not None)
    except griffe.AliasResolutionError:
        return False


def _function_of(attribute: griffe.Object | None) -> griffe.Object | None:
    """What ``name = function`` names, where the function is of the same module."""
    if attribute is None or not attribute.is_attribute or attribute.parent is None:
        return None
    found = attribute.parent.members.get(str(attribute.value))
    return found if found is not None and found.is_function else None

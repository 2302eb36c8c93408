"""Signatures of the allreduce family in all frameworks, made of one table of options; they differ in which they take and in what order."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, TypeVar

from collective_core.errors import CollectiveError

if TYPE_CHECKING:
    from collective_core.runtime.process_sets import ProcessSet

R = TypeVar("R")

#: Of each option its type, what it is unless the framework or the caller says it, and its meaning.
OPTIONS: dict[str, tuple[str, Any, str]] = {
    "average": ("bool | None", None, "Horovod's older form of ``op``: Average, or with False Sum. Only one of the two may be given."),
    "name": ("str | None", None, "The operation's, the same on all ranks; without it operations are numbered."),
    "compression": ("Any", None, "What travels instead, of the framework's ``Compression``."),
    "op": ("str", "Average", "How to combine; Average unless given."),
    "prescale_factor": ("float", 1.0, "Multiplies each input."),
    "postscale_factor": ("float", 1.0, "Multiplies the result."),
    "process_set": ("ProcessSet | None", None, "The ranks that take part; all of the job unless given."),
    "out": ("np.ndarray[Any, Any] | None", None, "Where the result is written: a contiguous array of the same type and shape."),
    "device_dense": ("str", "", "Horovod's; tensors travel from the host's memory."),
    "device_sparse": ("str", "", "Horovod's, as ``device_dense``."),
    "ignore_name_scope": ("bool", False, "The operation's name is ``name`` alone, whatever name scope it is in."),
}


class Reduction(NamedTuple):
    """A reduction but for its tensors: the way to combine, the factors before and after it, and the ranks."""

    op: str
    prescale: float
    postscale: float
    process_set: ProcessSet | None

    def require_gradient(self, what: str) -> None:
        """Raises :class:`CollectiveError` (kind ``invalid``) for one that cannot be differentiated; ``what`` it is, in the message."""
        if self.op not in ("Sum", "Average"):
            raise CollectiveError(f"{what} with op={self.op} has no gradient; use Sum or Average", "invalid")


def chosen_op(average: bool | None, op: str | None) -> str:
    """The way to combine that Horovod's two parameters ask for. Raises ValueError where both do."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    return op if op is not None else "Average" if average in (None, True) else "Sum"


def takes(parameters: str, **defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator: the function with its first parameter and then these, options of the table, in this order.

    The function itself has those that it needs, and ``how``, a :class:`Reduction` made of the others; one that has just the options becomes
    its own result, which costs a call nothing. ``defaults``: those that differ from the table's.
    """
    options = parameters.split()
    values = {name: defaults.get(name, OPTIONS[name][1]) for name in options}
    if "average" in options:
        values["op"] = None

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        needs, made = list(inspect.signature(function).parameters), function
        given = needs[0]
        if needs != [given, *options]:
            op = "chosen_op(average, op)" if "average" in options else "op"
            how = f"Reduction({op}, prescale_factor, postscale_factor, process_set)"
            arguments = ", ".join(how if name == "how" else name for name in needs)
            scope: dict[str, Any] = {"function": function, "Reduction": Reduction, "chosen_op": chosen_op}
            exec(f"def {function.__name__}({', '.join([given, *options])}): return function({arguments})", scope)  # noqa: S102 - as namedtuple
            made = scope[function.__name__]
        types = {name: "str | None" if name == "op" and values[name] is None else OPTIONS[name][0] for name in options}
        annotations = function.__annotations__
        made.__defaults__ = tuple(values.values())
        made.__annotations__ = {given: annotations[given], **types, "return": annotations["return"]}
        meanings = "".join(f"\n    {name}: {OPTIONS[name][2]}" for name in options)
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        made.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:{meanings}\n"
        return made

    return decorate

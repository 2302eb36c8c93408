"""A function and its arguments as bytes; what cannot become bytes is named with the way to it."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from typing import Any, Callable, Iterator

from collective_core.errors import CollectiveError

#: Levels of containers, attributes and functions that are searched for what cannot be sent.
DEEPEST = 6
REMEDY = "make it inside the function (imports, open files, locks and sessions belong there), or pass what it is made from"


class NotSendableError(CollectiveError, TypeError):
    """Something that cannot travel to another process."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "invalid")


def pickler() -> Any:
    """cloudpickle, which can do functions of a notebook or script; Python's own pickle only knows where to import them from."""
    try:
        import cloudpickle
    except ImportError:
        raise CollectiveError("sending a function to ranks needs cloudpickle: pip install cloudpickle", "invalid") from None
    return cloudpickle


def pack(value: Any, name: str) -> bytes:
    """``value`` as bytes. Raises :class:`NotSendableError` that says which part of ``name`` is the reason."""
    dumps = pickler().dumps
    try:
        return bytes(dumps(value))
    except Exception as error:
        where, culprit = _find_culprit(value, name, 0)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        raise NotSendableError(f"{where} is of type {kind}, which cannot be sent to another process ({error}): {REMEDY}") from error


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call as bytes, for :func:`unpack`. Raises :class:`NotSendableError` naming the argument or variable that is the reason."""
    dumps = pickler().dumps
    try:
        return bytes(dumps((function, args, kwargs)))
    except Exception:
        # Part by part, for a message that names the one; if each can travel alone, the error itself is what is known.
        called = getattr(function, "__name__", "the function")
        pack(function, called)
        for number, value in enumerate(args, 1):
            pack(value, f"argument {number} of {called}")
        for name, value in kwargs.items():
            pack(value, f"argument {name} of {called}")
        raise


def unpack(packed: bytes) -> Any:
    """The reverse of :func:`pack`: only for what came through a pipe of our own, because unpickling can do anything."""
    return pickle.loads(packed)  # noqa: S301


def _is_sendable(value: Any) -> bool:
    try:
        pickler().dumps(value)
    except Exception:  # noqa: BLE001 - whatever a class's own way to be pickled raises
        return False
    return True


def _find_culprit(value: Any, name: str, depth: int) -> tuple[str, Any]:
    """The innermost part that cannot be sent, and the way to it."""
    if depth < DEEPEST:
        for label, part in _parts(value, name):
            if not _is_sendable(part):
                return _find_culprit(part, label, depth + 1)
    return name, value


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield f"the function of {name}", value.func
        yield from ((f"argument {i} of {name}", part) for i, part in enumerate(value.args, 1))
        yield from ((f"argument {key} of {name}", part) for key, part in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield f"the object of {name}", value.__self__
    elif isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        yield from ((f"the variable {key!r} that {name} uses", part) for key, part in {**used.globals, **used.nonlocals}.items())
        yield from ((f"a default of {name}", part) for part in (value.__defaults__ or ()))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        yield from ((f"{name}.{key}", part) for key, part in vars(value).items())

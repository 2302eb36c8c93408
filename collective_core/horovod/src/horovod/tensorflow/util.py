"""What scripts take from Horovod's internals."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def vars_to_refs(vars: Any) -> Any:
    """References that can be keys of dictionaries: of a list of variables a tuple."""
    return tuple(vars_to_refs(each) for each in vars) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The inverse of :func:`vars_to_refs`."""
    return [refs_to_vars(each) for each in refs] if isinstance(refs, tuple) else refs.deref()

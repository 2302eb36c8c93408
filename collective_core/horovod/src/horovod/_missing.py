"""What to use instead of names of Horovod's that are not here."""

from __future__ import annotations

import sys
from types import FrameType

INSTEAD = {
    "horovod.mxnet": "MXNet is not supported",
    "horovod.ray": "use horovod.ray.RayExecutor, or horovod.run(min_num_proc=...) for an elastic job",
    "horovod.runner": "use horovod.run, python -m horovod.runner.launch or provision run; Horovod's own launcher is not here",
    "horovod.spark": "use horovod.spark.run with a function that reads its data from files; estimators and stores are not here",
    "horovod.tensorflow.data": "use tf.data in every rank",
}


def _is_import(caller: FrameType | None) -> bool:
    """Whether an import statement asks, and not importlib.util, nor a tool or another finder, which would not expect an exception."""
    above = caller.f_back if caller is not None else None
    if caller is None or above is None or caller.f_code.co_name != "_find_spec":
        return False
    return all(frame.f_globals.get("__name__") in ("importlib._bootstrap", "_frozen_importlib") for frame in (caller, above))


class Missing:
    """The last in sys.meta_path, so asked only for modules that nobody else has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004
        """Raises ModuleNotFoundError for modules of Horovod's that are imported, not where somebody only asks whether there is one."""
        if name.startswith("horovod.") and _is_import(sys._getframe().f_back):
            use = next((text for prefix, text in INSTEAD.items() if f"{name}.".startswith(f"{prefix}.")), "docs/horovod.md names what is")
            # Without its argument `name`, by which `from package import name` would pass over it.
            raise ModuleNotFoundError(f"{name} is not part of collective-core-horovod: {use}")


sys.meta_path.append(Missing)

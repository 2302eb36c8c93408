"""What to use instead of names of Horovod's that are not here."""

from __future__ import annotations

import sys

INSTEAD = {
    "horovod.mxnet": "MXNet is not supported",
    "horovod.ray": "use horovod.ray.RayExecutor, or horovod.run(min_num_proc=...) for an elastic job",
    "horovod.runner": "use horovod.run, python -m horovod.runner.launch or provision run; Horovod's own launcher is not here",
    "horovod.spark": "use horovod.spark.run with a function that reads its data from files; estimators and stores are not here",
    "horovod.tensorflow.data": "use tf.data in every rank",
}


class Missing:
    """The last in sys.meta_path, so asked only for modules that nobody else has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004
        """Raises ModuleNotFoundError for modules of Horovod's, unless importlib.util only wants to know whether there is one."""
        if name.startswith("horovod.") and sys._getframe(2).f_globals["__name__"] != "importlib.util":
            use = next((text for prefix, text in INSTEAD.items() if f"{name}.".startswith(f"{prefix}.")), "docs/horovod.md names what is")
            # Without its argument `name`, by which `from package import name` would pass over it.
            raise ModuleNotFoundError(f"{name} is not part of collective-core-horovod: {use}")


sys.meta_path.append(Missing)

"""``horovod.spark.run``: a function on the tasks of a Spark job."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping, Sequence

from collective_core.launch import Runner


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,  # noqa: ARG001 - so it is
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,  # noqa: ARG001
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Calls ``fn`` on ``num_proc`` ranks (spark.default.parallelism) of the session that is active; returns what each returned, by rank."""
    import pyspark

    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("there is no active SparkContext: start a session first")
    given = {
        "use_mpi": use_mpi,
        "extra_mpi_args": extra_mpi_args,
        "stdout": stdout,
        "stderr": stderr,
        "prefix_output_with_timestamp": prefix_output_with_timestamp,
        "executable": executable,
    }
    for name, value in given.items():
        if value:
            warnings.warn(f"{name} has no effect: ranks are started by Spark's executors, and their output goes on here", stacklevel=2)
    environment = {**({"COLLECTIVE_NETWORK": ",".join(nics)} if nics else {}), **(env or {})}
    runner = Runner(num_proc or context.defaultParallelism, env=environment, spark=context, start_timeout=start_timeout)
    return runner.run(fn, *args, **dict(kwargs or {}))

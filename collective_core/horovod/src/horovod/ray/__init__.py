"""``horovod.ray.RayExecutor``: functions on the ranks of a Ray cluster.

Each call starts its ranks anew, in a placement group that Ray gives as a whole or not at all; nothing of them stays for the next call.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

from collective_core.errors import InvalidUseError
from collective_core.launch import Runner


class Settings(NamedTuple):
    """What :meth:`RayExecutor.create_settings` keeps."""

    timeout_s: float
    nics: tuple[str, ...]


class RayExecutor:
    """Horovod's arguments. Elastic jobs (``min_workers``) and workers with a state of their own (``executable_cls``) are refused."""

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,  # noqa: ARG003 - Ray starts the ranks, no ssh
        ssh_str: str | None = None,  # noqa: ARG003
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> Settings:
        return Settings(max(timeout_s, placement_group_timeout_s), tuple(nics or ()))

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,  # noqa: ARG002 - the ranks get a group of their own
        min_workers: int | None = None,
        max_workers: int | None = None,
        **elastic: Any,
    ) -> None:
        if min_workers or max_workers or elastic:
            raise InvalidUseError("elastic jobs on Ray are not part of collective_core: pass num_workers", "invalid")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is not")
        self._settings = settings or self.create_settings()
        self._workers = num_workers or (num_hosts or 1) * num_workers_per_host
        self._each = {"CPU": float(cpus_per_worker), **({"GPU": float(gpus_per_worker or 1)} if use_gpu else {})}
        self._environment: dict[str, str] | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,  # noqa: ARG002
        executable_kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        if executable_cls is not None:
            raise InvalidUseError("executable_cls is not supported: make what the ranks need in the function that they run", "invalid")
        nics = self._settings.nics
        self._environment = {**({"COLLECTIVE_NETWORK": ",".join(nics)} if nics else {}), **(extra_env_vars or {})}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """What ``fn`` returned on each rank, by rank."""
        if self._environment is None:
            raise InvalidUseError("call start() first", "invalid")
        if callbacks:
            raise InvalidUseError("callbacks are not supported: return what they would be given", "invalid")
        runner = Runner(self._workers, env=self._environment, ray=self._each, start_timeout=self._settings.timeout_s)
        return runner.run(fn, *(args or ()), **dict(kwargs or {}))

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """What :meth:`run` returns, as references for ``ray.get``. It waits for it."""
        import ray

        return [ray.put(result) for result in self.run(fn, args, kwargs)]

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """:meth:`run` of a function that takes the worker's executable, of which there is none."""
        return self.run(fn, [None], None, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Of such a function on rank 0 alone."""

        def on_the_first() -> Any:
            import collective_core as cc

            cc.init()
            return fn(None) if cc.rank() == 0 else None

        return self.run(on_the_first)[0]

    def shutdown(self) -> None:
        """Nothing is left of the ranks; :meth:`start` allows others."""
        self._environment = None

"""Starting ranks without MPI: a function of a notebook or a script runs on all of them and returns each one's result."""

from collective_core.launch.function import NotSendableError
from collective_core.launch.horovod_run import run
from collective_core.launch.outcomes import RankFailedError
from collective_core.launch.runner import Runner

__all__ = ["NotSendableError", "RankFailedError", "Runner", "run"]

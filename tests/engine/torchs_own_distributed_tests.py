"""PyTorch's own distributed tests, which its wheel contains, with the backend `collective` wherever they ask for Gloo.

    WORLD_SIZE=2 TEMP_DIR=/tmp/x python -m unittest -v torchs_own_distributed_tests[.OwnTests.test_all_reduce_sum] …

in this folder. They look at the backend's name to choose what to run, so they are told that it is Gloo; but not where they look for Gloo's
own events in a profile. Tests that need a GPU skip themselves. Ranks are forked from a process that has imported PyTorch: with an
interpreter for each, the tests take half an hour.
"""

import multiprocessing
import os
from pathlib import Path
from unittest import mock

os.environ["BACKEND"] = "gloo"
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("INIT_METHOD", f"file://{Path(os.environ['TEMP_DIR']) / 'meeting'}")

import torch.distributed as dist
from torch.distributed import distributed_c10d


def _instead_of_gloo(function):
    def call(backend=None, *arguments, **more):
        return function("collective" if backend == "gloo" else backend, *arguments, **more)

    return call


def _new_group(*arguments, **more):
    if more.get("backend") == "gloo":
        more["backend"] = "collective"
    return _usual_new_group(*arguments, **more)


def _get_backend(group=None):
    found = _usual_get_backend(group)
    return "gloo" if found == "collective" else found


# The ranks import this file, too.
_usual_new_group, _usual_get_backend = dist.new_group, dist.get_backend
dist.init_process_group = _instead_of_gloo(dist.init_process_group)
dist.new_group = _new_group
distributed_c10d.get_backend = _get_backend  # monitored_barrier's; dist.get_backend stays

from torch.testing._internal.distributed import distributed_test  # noqa: E402

multiprocessing.set_forkserver_preload([__name__])


class _Rank(multiprocessing.get_context("forkserver").Process):
    """With the variables of now, such as the test's own folder: the fork server has those of its start."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.environment = dict(os.environ)

    def run(self):
        os.environ.update(self.environment)
        distributed_test.INIT_METHOD = self.environment["INIT_METHOD"]
        super().run()


# PyTorch asks all_to_all of CPU tensors only of MPI.
for _name, _test in vars(distributed_test.DistributedTest._DistTestBase).items():
    if _name.startswith("test_all_to_all") and "cuda" not in _name:
        _test.__unittest_skip__ = False


class OwnTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(_Rank)

    def test_get_backend(self):
        with mock.patch.object(distributed_test, "BACKEND", "collective"):
            super().test_get_backend()

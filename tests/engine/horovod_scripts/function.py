"""A function on several ranks, as ``horovod.run`` starts it."""

import horovod
from horovod.runner import run


def train(scale):
    import horovod.torch as hvd
    import torch

    hvd.init()
    return scale * hvd.allreduce(torch.tensor(float(hvd.rank() + 1)), op=hvd.Sum).item(), hvd.size()


if __name__ == "__main__":
    assert horovod.run is run
    print(horovod.__version__, horovod.run(train, args=(2,), np=2, verbose=False), flush=True)

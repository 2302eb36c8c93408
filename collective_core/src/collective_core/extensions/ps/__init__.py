"""Parameter servers, ranks of the same job: ``hvd.ps``.

    hvd.init()
    if hvd.ps.is_server():
        hvd.ps.serve()
    else:
        optimizer = hvd.ps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, staleness=4)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

Started with ``--servers N``: the last N ranks are servers. docs/parameter-server.md says more.
"""

from __future__ import annotations

from collective_core.extensions.ps import client, group
from collective_core.extensions.ps.arrays import Array, Table
from collective_core.extensions.ps.embedding import Embedding, EmbeddingBag
from collective_core.extensions.ps.group import is_server
from collective_core.extensions.ps.optimizer import DistributedOptimizer
from collective_core.extensions.ps.serving import serve
from collective_core.runtime.process_sets import ProcessSet

__all__ = ["Array", "DistributedOptimizer", "Embedding", "EmbeddingBag", "Table", "close", "is_server", "serve", "workers"]


def workers() -> ProcessSet:
    """The process set of all workers, for operations among them; for workers. The first call waits for ``serve()``.

    It remains after :func:`close`.
    """
    known = None if is_server() else group.known_workers()
    return client.client().group.process_set if known is None else known


def close() -> None:
    """This worker needs the servers no more; when all have said so, ``serve()`` returns. So do ``shutdown()`` and the end of a process.

    Waits until all that it has pushed has arrived. From then on nobody waits for its updates, operations of all ranks are possible again,
    and its arrays, tables and optimizers raise :class:`CollectiveError` (kind ``invalid``).
    """
    group.leave()

"""One rank shuts down while the others go on."""

import os

import common

import collective_core as cc

cc.init()
cc.barrier()
if cc.rank() == cc.size() - 1:
    cc.shutdown()
    import time

    time.sleep(3)
else:
    try:
        cc.barrier("more")
    except cc.CollectiveError as error:
        common.report(error=str(error), kind=error.kind, ranks=list(error.ranks))
os._exit(0)

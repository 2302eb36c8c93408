"""A job whose ranks meet without MPI. Reports what they are; a second life after shutdown works, too."""

import json
import os
import sys

import numpy as np

import collective_core as cc


def report(**facts):
    sys.stdout.write("REPORT " + json.dumps(facts) + "\n")
    sys.stdout.flush()


try:
    cc.init()
except cc.CollectiveError as error:
    report(rank=int(os.environ.get("RANK", os.environ.get("COLLECTIVE_RANK", "0"))), error=str(error), kind=error.kind)
    sys.exit(3)
total = cc.allreduce(np.arange(100_000.0), op=cc.Sum)
assert (total == np.arange(100_000.0) * cc.size()).all()
first = (cc.rank(), cc.size())
cc.shutdown()
cc.init()
assert (cc.rank(), cc.size()) == first
assert "mpi4py.MPI" not in sys.modules
report(rank=cc.rank(), size=cc.size(), local_size=cc.local_size(), sum=float(cc.allreduce(np.ones(1), op=cc.Sum)[0]))
cc.shutdown()

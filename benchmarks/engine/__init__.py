"""``python -m benchmarks.engine``, from a checkout: the engine beside its peers and beside the machine's own limit, in one run.

``--np N`` starts N ranks on this host with mpirun; under an ``mpirun`` of your own (over several hosts, say) the ranks are those.
The rounds of all engines alternate, so that a change of the machine's mood meets all of them; the median of the rounds counts.
Bus bandwidth is S/t * 2(n-1)/n, as in nccl-tests.
"""

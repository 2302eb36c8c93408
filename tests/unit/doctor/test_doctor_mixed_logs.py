"""200 logs made of parts: a cause, its symptoms, and noise, in the prefixes of several ranks. The cause must be named first."""

import random

from provision.diagnosis.signatures import all_signatures

HEALTHY = [
    "NCCL INFO Channel {a:02}/24 : 0[1a000] -> 1[1b000] via P2P/IPC",
    "NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)",
    "epoch {a} step {b} loss 0.{b} lr 1e-3",
    "INFO: saved checkpoint-{a} in {b} ms, 0 errors",
    "mca_base_component_repository_open: unable to open mca_pml_ucx: libucp.so.0: cannot open shared object file (ignored)",
    "[node1:{b}] 15 more processes have sent help message help-mpi-btl-openib.txt / ib port not selected",
    "Get:{a} http://archive.example.org/ubuntu jammy InRelease [{b} kB]",
    "kernel: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
    "/usr/bin/ld: warning: creating DT_TEXTREL in a PIE",
]
SYMPTOMS = [
    "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been aborted.",
    "mpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated.",
    "ORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n\n* not finding the required libraries",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:51234",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "NET/IB : Got completion from peer 10.23.3.11<38536> with error 5, opcode 48, len 32710, vendor err 249",
]
PREFIXES = ["[1,{r}]<stderr>:", "[rank{r}]:", "[{r}]<stderr>:", "2025-01-02 10:11:12,345 "]


def mixed(dice: random.Random, cause: str, harmless: list[list[str]]) -> str:
    """Noise, the cause's log in one piece, then alarming noise and symptoms; sometimes a symptom is flushed before its cause."""
    prefix = dice.choice(PREFIXES)

    def healthy() -> list[list[str]]:
        return [[dice.choice(HEALTHY).format(a=dice.randrange(24), b=dice.randrange(100, 9999))] for _ in range(dice.randrange(5, 40))]

    after = [part.splitlines() for part in dice.sample(SYMPTOMS, dice.randrange(1, 4))]
    early = [after.pop()] if len(after) > 1 and dice.random() < 0.3 else []
    later = healthy() + after + dice.sample(harmless, 3)
    dice.shuffle(later)
    parts = [*healthy(), *early, cause.splitlines(), *later]
    ranks = [dice.randrange(8) for _ in parts]
    return "\n".join(prefix.format(r=rank) + line for rank, part in zip(ranks, parts, strict=True) for line in part)


def test_the_cause_is_named_first_in_95_of_100_mixed_logs(explain, load) -> None:
    """Causes are what can be one: errors that are not symptoms of just any other."""
    dice = random.Random(20)
    harmless = [log.splitlines() for log in load("fresh.yaml")["harmless"]]
    samples = [(name, log) for name, logs in load("samples.yaml").items() for log in logs]
    causes = [
        (name, log)
        for name, log in (*samples, *load("variants.yaml").items(), *load("fresh.yaml")["known"])
        if all_signatures()[name].severity == "error" and "any" not in all_signatures()[name].symptom_of
    ]
    wrong = []
    for _ in range(200):
        name, log = dice.choice(causes)
        found = explain(mixed(dice, log, harmless))
        if not found or found[0].id != name:
            wrong.append((name, [each.id for each in found]))
    assert len(wrong) <= 10, wrong

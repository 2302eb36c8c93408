"""What goes on now: load, memory, disk, the load of GPUs, and the ranks of jobs. `provision status` alone asks for it."""

import csv
import os
import re

from .installed import LOCKS
from .machine import number, section
from .nvidia import GPU_TIMEOUT_S, UNSUPPORTED

MAX_GPUS = 64
MAX_JOBS = 50
MAX_PROCESSES = 100000
LONGEST_NAME = 120
LOAD_FIELDS = ("index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")
INTERPRETER = re.compile(r"(python|pypy)[\d.]*$")
TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python


@section("activity", on_request=True)
def activity(machine):
    figures = dict(re.findall(r"^(\w+):\s+(\d+)", machine.read("/proc/meminfo") or "", re.M))
    place = machine.prefix
    while not machine.exists(place) and place != "/":
        place = os.path.dirname(place)
    room = os.statvfs(machine.path(place))
    lock = next((found for found in (machine.read_json(machine.in_home(path)) for path in LOCKS) if isinstance(found, dict)), None)
    return {
        "uptime": uptime(machine),
        "load": float((machine.read("/proc/loadavg") or "nan").split()[0]),
        "cores": len(os.sched_getaffinity(0)),
        "memory": {"total": int(figures["MemTotal"]) << 10, "available": int(figures.get("MemAvailable", figures["MemFree"])) << 10},
        "disk": {"path": place, "total": room.f_blocks * room.f_frsize, "available": room.f_bavail * room.f_frsize},
        "locked": {name: str(lock.get(name, ""))[:LONGEST_NAME] for name in ("owner", "since")} if lock else None,
        "jobs": jobs(machine),
    }


def uptime(machine):
    return float((machine.read("/proc/uptime") or "nan").split()[0])


def jobs(machine):
    """The jobs with ranks on this host, as far as the login user may look into processes: run, ranks, age in seconds, and the program.

    A rank's children inherit its environment, so the oldest process of a rank stands for it.
    """
    now, ticks = uptime(machine), os.sysconf("SC_CLK_TCK")
    runs = {}
    for pid in [name for name in machine.listdir("/proc") if name.isdigit()][:MAX_PROCESSES]:
        environment = machine.content("/proc/%s/environ" % pid) or b""
        if b"PROVISION_RUN_ID=" not in environment:
            continue
        variables = dict(entry.partition(b"=")[::2] for entry in environment.split(b"\0"))
        run, rank = variables.get(b"PROVISION_RUN_ID"), variables.get(b"PROVISION_RANK")
        fields = (machine.read("/proc/%s/stat" % pid) or "").rpartition(")")[2].split()
        if not run or not (rank or b"").isdigit() or len(fields) < 20 or fields[0] == "Z":
            continue
        ranks = runs.setdefault(run.decode("utf-8", "replace")[:LONGEST_NAME], {})
        ranks[rank] = min(ranks.get(rank, (float("inf"), "")), (int(fields[19]), pid))
    found = []
    for run in sorted(runs)[:MAX_JOBS]:
        started, pid = min(runs[run].values())
        words = [word.decode("utf-8", "replace") for word in (machine.content("/proc/%s/cmdline" % pid) or b"").split(b"\0")]
        age = round(max(0.0, now - started / float(ticks)), 1)
        found.append({"run": run, "ranks": len(runs[run]), "age": age, "program": program_name(words)[:LONGEST_NAME]})
    return found


def program_name(words):
    """The name of a program without its path and arguments, which may hold a secret: `train.py`, or `package.train` of `python -m`."""
    first = os.path.basename(words[0]) if words else ""
    if not INTERPRETER.match(first):
        return first
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return next(rest, first)
        if word == "-c":
            break
        if word in TAKE_A_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return os.path.basename(word) or first
    return first


@section("gpu_load", timeout=GPU_TIMEOUT_S, on_request=True)
def gpu_load(machine):
    """The load of NVIDIA's GPUs as nvidia-smi says it, and its error; neither on a host without it."""
    if machine.which("nvidia-smi") is None:
        return {"gpus": [], "error": None}
    command = ["nvidia-smi", "--query-gpu=" + ",".join(LOAD_FIELDS), "--format=csv,noheader,nounits"]
    status, output, complaint = machine.run(command, timeout=GPU_TIMEOUT_S * 0.8)
    gpus = read_gpu_load(output)
    said = " ".join((complaint or output).split())[-300:]
    return {"gpus": gpus, "error": None if status == 0 and gpus else said or "nvidia-smi ended with exit code %s" % status}


def read_gpu_load(text):
    found = []
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) != len(LOAD_FIELDS) or number(values[0]) is None:
            continue  # a warning, or the message about a GPU that is lost
        row = dict(zip(LOAD_FIELDS, (value.strip() for value in values)))
        found.append(
            {
                "index": number(row["index"]),
                "uuid": row["uuid"][:LONGEST_NAME],
                "name": row["name"][:LONGEST_NAME],
                "utilization": measured(row["utilization.gpu"]),
                "memory_used": megabytes(row["memory.used"]),
                "memory_total": megabytes(row["memory.total"]),
                "temperature": measured(row["temperature.gpu"]),
                "power": measured(row["power.draw"]),
            }
        )
    return found[:MAX_GPUS]


def measured(text):
    """The number; None where this GPU does not measure it: drivers write [N/A], N/A or [Not Supported]."""
    try:
        return None if text.strip("[]").lower() in UNSUPPORTED else float(text)
    except ValueError:
        return None


def megabytes(text):
    """Bytes of a figure in MiB."""
    value = measured(text)
    return None if value is None else int(value * (1 << 20))

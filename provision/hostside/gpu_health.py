"""Health of a host's GPUs: what its tools, its kernel's log and /sys say. It judges nothing.

Python 3.6+, standard library only. Options are JSON on standard input::

    {"tests": ["dcgm", "nvbandwidth", "allreduce"], "dcgm_level": 1}

The document that it prints::

    {"gpus": number of NVIDIA's devices on the PCI bus that nvidia-smi should show; 0 in a container,
     "outputs": {name: {"found": bool, "code": n or null, "timed_out": bool, "text": what it printed}},
     "kernel_log": {"readable": bool, "lines": [...]},
     "rdma": [{"device", "port", "state", "phys_state", "rate", "link_layer", "counters": {name: text}}]}

Every command has a time limit and a limit on what it may print. A command that even SIGKILL does not end (nvidia-smi on a lost GPU) is left
behind.
"""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BEGIN, END = "===PROVISION-GPU-HEALTH-BEGIN===", "===END==="
QUERY_S = 60  # nvidia-smi without persistence mode initialises every GPU first
DCGM_S = {1: 120, 2: 600, 3: 2700}
TEST_S = 600
LARGEST = 4 << 20  # bytes of one output: eight GPUs with all their clocks are one megabyte
LARGEST_ANSWER = 1 << 20  # of one output, after what is not read is dropped
LINES, LINE = 200, 400
PLACES = ("/usr/local/bin", "/usr/sbin", "/sbin", "/usr/local/cuda/bin", "/opt/nccl-tests/build", "~/nccl-tests/build", "~/nvbandwidth")
UNREAD = re.compile(r"<(supported_clocks|processes|accounted_processes|mig_devices)>.*?</\1>", re.S)
CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container", "run/secrets/kubernetes.io")
XID = re.compile(r"NVRM: .*\bXid\b|fallen off the bus|\bSXid\b")


def ended(process, deadline):
    """Whether it ended by itself in time, within the limit on its output."""
    while time.monotonic() < deadline and os.fstat(process.output.fileno()).st_size <= LARGEST:
        try:
            process.wait(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            return True
        except subprocess.TimeoutExpired:
            pass
    return False


def run(command, seconds):
    places = [os.environ.get("PATH", "")] + [os.path.expanduser(each) for each in PLACES]
    path = shutil.which(command[0], path=os.pathsep.join(places))
    if path is None:
        return {"found": False, "code": None, "timed_out": False, "text": ""}
    environment = dict(os.environ, LC_ALL="C")
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [path] + command[1:],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return {"found": True, "code": None, "timed_out": False, "text": str(error)}
        process.output = output
        code, in_time = None, ended(process, time.monotonic() + seconds)
        if in_time:
            code = process.returncode
        else:
            try:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                pass  # in the kernel, where no signal reaches it
        output.seek(0)
        text = output.read(LARGEST).decode("utf-8", "replace")
    return {"found": True, "code": code, "timed_out": not in_time, "text": UNREAD.sub("", text)[:LARGEST_ANSWER]}


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(200).decode("utf-8", "replace").strip()
    except OSError:  # some counters cannot be read on some devices
        return ""


def gpus(devices="/sys/bus/pci/devices", root="/"):
    """How many of NVIDIA's display and 3D controllers on the PCI bus nvidia-smi should show.

    Those that another driver has, such as vfio-pci for a virtual machine, are not this system's. nouveau's are: it takes them by mistake. A
    container sees the bus of the whole machine, and only nvidia-smi knows which of its GPUs it was given.
    """
    if any(os.path.exists(os.path.join(root, mark)) for mark in CONTAINER_MARKS):
        return 0
    found = 0
    for folder in glob.glob(devices + "/*"):
        if read(folder + "/vendor") == "0x10de" and read(folder + "/class")[:6] in ("0x0300", "0x0302"):
            link = folder + "/driver"
            found += not os.path.islink(link) or os.path.basename(os.readlink(link)) in ("nvidia", "nouveau")
    return found


def kernel_log():
    """Lines about Xids since the last start: by dmesg, by dmesg as root, or from the journal."""
    for command in (["dmesg"], ["sudo", "-n", "dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short"]):
        done = run(command, 20)
        if done["code"] == 0 and done["text"].strip():
            return {"readable": True, "lines": [line[:LINE] for line in done["text"].splitlines() if XID.search(line)][-LINES:]}
    return {"readable": False, "lines": []}


def rdma():
    ports = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*/ports/*"))[:256]:
        parts = folder.split("/")
        port = {name: read(folder + "/" + name) for name in ("state", "phys_state", "rate", "link_layer")}
        counters = {os.path.basename(path): read(path) for path in sorted(glob.glob(folder + "/counters/*"))[:100]}
        ports.append(dict(port, device=parts[4], port=parts[6], counters=counters))
    return ports


def collect(order):
    commands = {
        "nvidia-smi": (["nvidia-smi", "-q", "-x"], QUERY_S),
        "nvlink-status": (["nvidia-smi", "nvlink", "-s"], QUERY_S),
        "nvlink-errors": (["nvidia-smi", "nvlink", "-e"], QUERY_S),
        "topology": (["nvidia-smi", "topo", "-m"], QUERY_S),
    }
    level = order.get("dcgm_level") or 1
    outputs = {}
    for name, (command, seconds) in commands.items():
        outputs[name] = run(command, seconds)
        if not outputs[name]["found"] or outputs[name]["timed_out"]:
            break  # what nvidia-smi cannot say once, it cannot say at all
    else:
        usable = max(1, outputs["nvidia-smi"]["text"].count("<gpu id="))
        tests = {
            "dcgm": (["dcgmi", "diag", "-r", str(level), "-j"], DCGM_S[level]),
            "nvbandwidth": (["nvbandwidth", "-t", "host_to_device_memcpy_ce", "device_to_host_memcpy_ce"], TEST_S),
            "allreduce": (["all_reduce_perf", "-b", "256M", "-e", "2G", "-f", "2", "-g", str(usable)], TEST_S),
        }
        for name in order.get("tests", []):
            outputs[name] = run(*tests[name])
    return {"gpus": gpus(), "outputs": outputs, "kernel_log": kernel_log(), "rdma": rdma()}


if __name__ == "__main__":
    print("\n%s\n%s\n%s" % (BEGIN, json.dumps(collect(json.load(sys.stdin))), END))

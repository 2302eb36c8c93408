"""Runs one rank's program on a host and records how it ended, under any launcher. Python 3.6+, standard library only.

mpirun reports the end of a job in sentences; the record says it in numbers. It is in the job's folder, where this file is, and so is the
program (``program.json``): its words stand on no command line but its own. The rank's number is the launcher's.

mpirun's ranks also get the variables of torch.distributed here, as the engine's launcher sets them: ``place.json`` says which of how many
hosts this is, and how the host's ranks are tuned; MASTER_ADDR and MASTER_PORT are there already, and the interface is the first in COLLECTIVE_NETWORK.
"""

import ctypes
import fcntl
import ipaddress
import json
import os
import resource
import signal
import socket
import struct
import sys
import time

NUMBERS = ("COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK")
OF_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
NOT_FOUND = 127  # as a shell has it
#: A launcher sends them to the process group: the program takes them, and its end is ours.
OF_GROUP = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTSTP}
DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
EXITING = 0x4  # PF_EXITING of linux/sched.h; a process has it before its connections close, and children until it is gone


def record(folder, rank, **facts):
    path = os.path.join(folder, "provision-rank-%s" % rank)
    with open(path + ".new", "w") as file:
        json.dump(dict(facts, rank=int(rank)), file)
    os.rename(path + ".new", path)


def is_dead(starter):
    """Whether our parent, the launcher's process that started us, is dead or dying."""
    try:
        with open("/proc/%d/stat" % starter, errors="replace") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except (OSError, IndexError):  # it is gone
        flags = 0
    return bool(flags & EXITING) or os.getppid() != starter


def become(program, mask, parent):
    """In the child: the program, which is killed when this process is."""
    try:
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_FOUND)  # it was killed before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write("%s cannot be started: %s\n" % (program[0], error.strerror))
        sys.stderr.flush()
    os._exit(NOT_FOUND)


def interfaces():
    """(name, address) of this host's interfaces, each with one address of IPv4."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found.append((name, ipaddress.ip_address(answer[20:24])))
    return found


def interface_in(networks):
    """The name of the interface in the first of the networks (CIDR, or names) that this host has; None where it has none."""
    own = interfaces()
    for text in networks.split(","):
        try:
            network = ipaddress.ip_network(text.strip(), strict=False)
            names = [name for name, address in own if address in network]
        except ValueError:
            names = [name for name, _ in own if name == text.strip()]
        if names:
            return names[0]
    return None


def set_variables_of_torch(place, environment):
    if any(name not in environment for name in OF_MPI.values()):
        return  # the engine's launcher has set them
    environment.update({name: environment[of_mpi] for name, of_mpi in OF_MPI.items()})
    environment.update({"GROUP_RANK": str(place["host"]), "GROUP_WORLD_SIZE": str(place["hosts"])})
    interface = interface_in(environment.get("COLLECTIVE_NETWORK") or environment.get("HOROVOD_GLOO_IFACE") or "")
    if interface is not None:
        # NCCL takes a name without `=` for the beginning of one.
        named = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": "=" + interface}
        for name, value in named.items():
            environment.setdefault(name, value)


def main():
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "program.json")) as file:
        program = json.load(file)
    rank = next(os.environ[name] for name in NUMBERS if name in os.environ)
    os.environ["PROVISION_RANK"] = rank
    with open(os.path.join(folder, "place.json")) as file:
        place = json.load(file)
    set_variables_of_torch(place, os.environ)
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", os.path.join(folder, "torch-%s-" % rank))  # where stall.py asks what NCCL waits for
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the same, as older versions call it; the default is not that of every version
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    of_memory = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    is_chosen = any(name.startswith(of_memory) for name in os.environ)  # by the user, whose choice ours would only be mixed with
    for name, value in place["tuned"].items():
        if not (is_chosen and name.startswith(of_memory)):
            os.environ.setdefault(name, value)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_GROUP)
    parent, starter = os.getpid(), os.getppid()
    pid = os.fork()
    if pid == 0:
        become(program, mask, parent)
    known = {"pid": pid, "parent": parent, "starter": starter}
    record(folder, rank, **known)
    _, status = os.waitpid(pid, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    try:
        # Orphaned: the rank may have failed because the launcher's process that started this one had died.
        record(folder, rank, code=code, at=time.monotonic(), orphaned=code != 0 and is_dead(starter), **known)
    except OSError:
        pass  # the job's folder is being removed
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

"""Processors, memory and disks."""

import os
import re

from .machine import number, section

CPU_FLAGS = ("sse4_2", "f16c", "fma", "avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "asimdhp", "bf16", "sve")


def cgroup_folders(machine):
    """The process's cgroup and its parents, version 2 first: a limit on any of them counts."""
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        bases = {"": ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]}.get(fields[1], ["/sys/fs/cgroup/" + fields[1]])
        for base in bases:
            inside = fields[2]
            while True:
                yield base + inside.rstrip("/")
                if inside in ("", "/"):
                    break
                inside = os.path.dirname(inside)


def cpu_quota(machine):
    """CPUs that cgroups allow, or None when they set no limit."""
    quotas = []
    for folder in cgroup_folders(machine):
        fields = (machine.line(folder + "/cpu.max") or "").split()
        if len(fields) == 2 and fields[0] != "max":
            quotas.append(float(fields[0]) / float(fields[1]))
        quota, period = number(machine.line(folder + "/cpu.cfs_quota_us")), number(machine.line(folder + "/cpu.cfs_period_us"))
        if quota and period and quota > 0:
            quotas.append(float(quota) / period)
    return min(quotas) if quotas else None


@section("cpu")
def cpu(machine):
    text = machine.read("/proc/cpuinfo", limit=8 << 20) or ""
    model = re.search(r"^(?:model name|Model|cpu model|Hardware)\s*:\s*(.+)$", text, re.M)
    part = re.search(r"^CPU part\s*:\s*(\S+)", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    present = set(flags.group(1).split()) if flags else set()
    chosen = [flag for flag in CPU_FLAGS if flag in present]
    if "asimd" in present or "neon" in present:
        chosen.append("neon")
    processors = len(re.findall(r"^processor\s*:", text, re.M)) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if machine.root == "/" else processors
    quota = cpu_quota(machine)
    return {
        "model": model.group(1).strip() if model else ("ARM part " + part.group(1) if part else None),
        "cores": max(1, min(allowed, int(quota) if quota else allowed)),
        "flags": chosen,
    }


@section("memory")
def memory(machine):
    text = machine.read("/proc/meminfo") or ""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", text, re.M)}
    total = kib.get("MemTotal", 0) // 1024
    names = [folder + name for folder in cgroup_folders(machine) for name in ("/memory.max", "/memory.limit_in_bytes")]
    limits = [limit >> 20 for limit in map(number, map(machine.line, names)) if limit and limit < total << 20]
    return {"total_mb": min([total] + limits)}


def mount_of(machine, path):
    """(file system type, options) of the mount that holds a path."""
    best = ("", None, [])
    for line in (machine.read("/proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = fields[1].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, fields[2], fields[3].split(","))
    return best[1], best[2]


def disk_of(machine, path):
    nearest = os.path.realpath(machine.path(path))
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    room = os.statvfs(nearest)
    kind, options = mount_of(machine, nearest)
    return {
        "path": path,
        "free_mb": room.f_bavail * room.f_frsize >> 20,
        "total_mb": room.f_blocks * room.f_frsize >> 20,
        "free_inodes": room.f_favail if room.f_files else None,
        "filesystem": kind,
        "read_only": "ro" in options,
        "noexec": "noexec" in options,
        "writable": os.access(nearest, os.W_OK),
    }


@section("disk")
def disk(machine):
    places = {
        "prefix": machine.prefix,
        "home": machine.home,
        "tmp": machine.env.get("TMPDIR") or "/tmp",
        "shm": "/dev/shm",
    }
    return {name: disk_of(machine, path) for name, path in places.items()}

"""What makes training on a host's processors fast, chosen from what the host is. Pure, but for `PROBE`, which is run there.

A step allocates what the step before has freed. The C library gives large blocks back to the system in between, and each step pays for
new pages, one fault for every 4 KiB. Keeping them changes no result. The engine and bfloat16 do: the one sums in another order, the other
rounds. The engine's ``collective_core_autoload`` reads their variables when PyTorch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from provision.base.text import few, grouped
from provision.base.versions import key
from provision.remote import ssh

LEVELS = MEMORY, ENGINE, BF16, OFF = "memory", "engine", "bf16", "off"
#: Instructions that multiply bfloat16: of AMD and Intel, of Intel's tiles, of Arm.
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
#: Prints what `Processors.of` reads. Memory: of the system, and of the control groups (versions 1 and 2) that the login is in.
PROBE = rf"""echo {ssh.ANSWER}
echo "libc $(getconf GNU_LIBC_VERSION 2>/dev/null)"
echo "pages $(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null)"
echo "flags $(grep -m 1 -E '^(flags|Features)' /proc/cpuinfo)"
for gpu in /dev/nvidia[0-9]* /dev/kfd; do [ -e "$gpu" ] && echo "gpu $gpu"; done
sed -n 's/^MemTotal: *\([0-9]*\) kB/kib \1/p' /proc/meminfo
while IFS=: read -r _ kinds path; do
  case ",$kinds," in
    ,,) root=/sys/fs/cgroup file=memory.max ;;
    *,memory,*) root=/sys/fs/cgroup/memory file=memory.limit_in_bytes ;;
    *) continue ;;
  esac
  while [ -r "$root$path/$file" ] && echo "bytes $(cat "$root$path/$file")"; [ "$path" ]; do path=${{path%/*}}; done
done < /proc/self/cgroup
exit 0"""
#: What a rank must have so that it, and the processes that it starts, may keep what they free, with gaps that nothing else fits into.
_ENOUGH_GIB = 8.0
#: From here on the C library asks for huge pages itself where it is told to, and takes any threshold; before, half of its largest heap.
_HUGE_PAGES_SINCE = "2.35"
_LARGEST_KEPT, _LARGEST_KEPT_BEFORE = 1 << 30, 32 << 20  # bytes of a block; larger ones go back to the system
_TRIM = 2 << 30  # bytes free at the end of the heap from which on they go back
_MAX_NAMES = 3  # of hosts in a sentence


@dataclass(frozen=True)
class Processors:
    """What a host says of itself: the release of glibc (empty: another C library), the kernel's choice of huge pages, GiB of memory."""

    libc: str = ""
    huge_pages: str = ""
    bf16: str = ""
    memory_gib: float = 0.0
    has_gpus: bool = False

    @classmethod
    def of(cls, text: str) -> Processors:
        """From what `PROBE` printed; what cannot be read is as if it were missing."""
        libc, pages = re.search(r"^libc glibc (\d{1,3}\.\d{1,3})$", text, re.M | re.A), re.search(r"^pages .*\[(\w+)\]", text, re.M)
        flags = re.search(r"^flags .*:(.*)$", text, re.M)
        sizes = [int(kib) / (1 << 20) for kib in re.findall(r"^kib (\d{1,15})$", text, re.M)]
        sizes += [int(size) / (1 << 30) for size in re.findall(r"^bytes (\d{1,20})$", text, re.M)]
        return cls(
            libc[1] if libc else "",
            pages[1] if pages else "",
            next((flag for flag in _BF16_FLAGS if flags and flag in flags[1].split()), ""),
            min(sizes, default=0.0),
            bool(re.search(r"^gpu ", text, re.M)),
        )


@dataclass(frozen=True)
class Choice:
    """The variables of a host's ranks, and why, as parts of a sentence."""

    variables: dict[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def choose(host: Processors, ranks: int, level: str, environment: Mapping[str, str]) -> Choice:
    """For ``ranks`` ranks on a host. What ``environment`` has stays, and so does what is set in the host's own."""
    if host.has_gpus or level == OFF:
        return Choice()
    variables, reasons = {}, []
    is_ours = not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) or name == "LD_PRELOAD" for name in environment)
    if host.libc and is_ours and host.memory_gib >= _ENOUGH_GIB * ranks:
        is_new = key(host.libc) >= key(_HUGE_PAGES_SINCE)
        variables["MALLOC_MMAP_THRESHOLD_"] = str(_LARGEST_KEPT if is_new else _LARGEST_KEPT_BEFORE)
        variables["MALLOC_TRIM_THRESHOLD_"] = str(_TRIM)
        reasons.append("freed memory is kept")
        if is_new and host.huge_pages == "madvise":
            variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
            reasons[-1] += " in huge pages"
    if level in (ENGINE, BF16):
        variables["COLLECTIVE_FOR_GLOO"] = "1"
        reasons.append("the engine takes the place of Gloo in PyTorch")
    if level == BF16:
        variables["COLLECTIVE_AUTOCAST"] = "bf16"
        reasons.append(f"autocast multiplies in bfloat16 ({host.bf16})")
    return Choice({name: value for name, value in variables.items() if name not in environment}, tuple(reasons))


def common_level(wanted: str, hosts: Mapping[str, Processors | None]) -> tuple[str, str]:
    """The level that all hosts of a job can have, as ranks must sum and multiply alike, and why it is not the one that is wanted.

    None: nothing is known of the host.
    """
    unfit = [name for name, host in hosts.items() if host is None or host.has_gpus]
    if wanted in (ENGINE, BF16) and unfit:
        return MEMORY, f"--tune {wanted}: only freed memory is kept: with GPUs, or unknown: {few(unfit, _MAX_NAMES)}"
    without = [name for name, host in hosts.items() if host is not None and not host.bf16]
    if wanted == BF16 and without:
        return ENGINE, f"--tune bf16: no rank uses it: no instructions for bfloat16: {few(without, _MAX_NAMES)}"
    return wanted, ""


def sentences(chosen: Mapping[str, Choice]) -> list[str]:
    """What was chosen, a line for all hosts of which the same is true."""
    alike = grouped((choice.reasons, name) for name, choice in chosen.items())
    names = {reasons: "all hosts" if len(alike) == 1 else few(those, _MAX_NAMES) for reasons, those in alike.items()}
    return [f"{who}: {'; '.join(reasons)} (not with --tune off)" for reasons, who in names.items() if reasons]

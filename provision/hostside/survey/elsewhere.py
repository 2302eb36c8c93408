"""Which builds of NCCL come from package repositories that the host knows without us: for these, it need not be told of NVIDIA's."""

import os

from .installed import read_json
from .looking import section
from .packages import offers, read_dnf_list, read_madison

REPOSITORY_LISTS = ("/etc/apt/sources.list.d/", "/etc/yum.repos.d/")
OF_THE_HOST_ALONE = ("file:", "cdrom:", "copy:")  # no other machine could gather from there what the host is to get


@section("candidates_elsewhere")
def candidates_elsewhere(machine):
    """package -> versions, as `candidates`."""
    record = read_json(machine, machine.prefix + "/record.json") or {}
    ours = [path for path in record.get("files") or () if path.startswith(REPOSITORY_LISTS)]
    if machine.which("apt-cache"):
        lists = machine.glob("/etc/apt/sources.list.d/*.list") + machine.glob("/etc/apt/sources.list.d/*.sources")  # apt reads no others
        theirs = [path for path in ["/etc/apt/sources.list"] + lists if path not in ours]
        in_ours, in_theirs = entries(machine, ours), entries(machine, theirs) if ours else ""

        def without_us(address):
            name = address.rstrip("/")
            return not name.startswith(OF_THE_HOST_ALONE) and (name not in in_ours or name in in_theirs)

        found = read_madison(offers(machine), without_us)
    else:
        names = [os.path.basename(path)[: -len(".repo")] for path in ours]
        found = read_dnf_list(offers(machine), lambda repository: repository not in names)
    return {package: versions for package, versions in found.items() if package.startswith("libnccl")}


def entries(machine, lists):
    """The text of apt's lists without what is commented out."""
    lines = [line for path in lists for line in (machine.read(path) or "").splitlines()]
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))

"""The certificate as one page that opens from disk; nothing is fetched and nothing runs."""

from __future__ import annotations

from provision.base import pages
from provision.doctor.certify.model import Certificate


def render(made: Certificate) -> str:
    """The page's HTML. Columns are called as in the JSON document."""
    hosts = [
        {
            "host": name,
            "mtu": made.targets[name].mtu,
            "cores": len(each.cores),
            "made": sum(part.made for part in (*each.cores, *each.devices)),
            "wrong": sum(part.wrong for part in (*each.cores, *each.devices)),
            "copied_gbs": each.memory_gbs,
            "GPUs": "; ".join(
                f"{gpu.kind}: {gpu.speed / 1e3:.4g} TFLOPS; GB/s: {gpu.memory_gbs:.4g}, to it {gpu.to_gbs:.4g}, from it {gpu.from_gbs:.4g}"
                for gpu in each.devices
            ),
        }
        for name, each in made.measured.items()
    ]
    pairs = [{"hosts": " – ".join(each.hosts), "round": each.round, **each.measured.model_dump()} for each in made.pairs]
    groups = [{"hosts": ", ".join(each.hosts), "us": each.us, "wrong": each.wrong} for each in made.groups]
    tables = [("Hosts", hosts), ("Pairs", pairs), ("Allreduce of growing groups", groups)]
    return pages.template("provision.doctor.certify").render(made=made, tables=tables)

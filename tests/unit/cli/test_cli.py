"""The command line with good and bad input: exit codes, streams, and no traceback without --debug."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rendered import variables_in
from rollouts import manifest_with
from typer.testing import CliRunner

import provision as provision_package
from provision.base.errors import UsageError
from provision.cli import main, up
from provision.launch import program_files
from provision.survey import collect, preflight

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


def provision(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """``provision WORDS…`` within this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        ended = main.guarded(lambda: main.app(args=list(words), prog_name="provision"), debug=False)
    return checked(subprocess.CompletedProcess(words, ended, out.getvalue(), err.getvalue()), code)


def process(*words: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``provision WORDS…`` as a process of its own, without a terminal."""
    command = [sys.executable, "-m", "provision", *words]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "start_new_session": True}
    return checked(subprocess.run(command, check=False, cwd=cwd, **options), code)


def checked(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


def plan(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return provision("plan", str(DATA / "lint.ini"), "--facts", str(DATA / "lint-facts.json"), *words, code=code)


def test_version_and_help() -> None:
    assert process("--version").stdout.startswith("provision 0.")
    assert "sandbox" in process("--help").stdout


def commands(group: Any, *path: str) -> Iterator[tuple[list[str], Any]]:
    yield list(path), group
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, *path, name)


def test_help_cuts_no_name_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    every = list(commands(typer.main.get_command(main.app)))
    assert {"run", "up"} <= {path[-1] for path, _ in every if path}
    for path, command in every:
        shown = CliRunner().invoke(main.app, [*path, "--help"]).stdout
        assert "…" not in shown.replace("eth0,…", ""), path
        assert "<bool>" not in shown, path
        assert all(f" {name} " in shown for name, each in getattr(command, "commands", {}).items() if not each.hidden), path
        assert max(map(len, shown.splitlines())) <= 80
        words = set(re.split(r"[\s,/]+", shown))
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert {*parameter.opts, *parameter.secondary_opts} <= words, path


def test_a_plan_from_facts_touches_no_host_and_is_one_json_document() -> None:
    document = json.loads(plan("--json").stdout)
    assert document["schema"] == 1
    assert document["hosts"]["node1"]["nccl"] is None
    assert document["hosts"]["gpu1"]["nccl"]["package"].startswith("nvidia-nccl-cu12==")
    assert document["hosts"]["gpu1"]["torch"]["why"]
    assert document["conflicts"] == []


def test_unreachable_hosts_of_the_facts_are_named(tmp_path: Path) -> None:
    minimal = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64"}
    known = {"a": minimal, "b": {"unreachable": "no route to host"}, "c": {"missing_python": True}}
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"hosts": known}))
    done = provision("plan", "--facts", str(file), "--json", code=1)
    assert list(json.loads(done.stdout)["hosts"]) == ["a"]
    assert "no route to host" in done.stderr
    assert "no plan for b, c: they have no facts\n  → fix the problems above, or leave them out: --limit" in done.stderr
    file.write_text(json.dumps({"hosts": {"a": minimal, "b": known["b"]}}))
    said = provision("plan", "--facts", str(file), code=1).stderr
    assert "no plan for b: it has no facts\n  → fix the problems above, or leave it out: --limit" in said
    file.write_text(json.dumps({"hosts": {"b": known["b"]}}))
    assert "no route to host" in provision("plan", "--facts", str(file), code=2).stderr


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["a"], "no plan for a: it has no facts\n"),
        (["a,b"], "no plan for a, b: they have no facts\n"),
        (["root@a", "b:2222"], "no plan for a, b: they have no facts\n"),
    ],
)
def test_where_no_host_is_left_there_is_nothing_to_leave_out(
    hosts: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "survey_hosts", lambda *_, **__: collect.Survey({}, []))
    assert main.guarded(lambda: main.app(args=["plan", *hosts], prog_name="provision"), debug=False) == 1
    assert capsys.readouterr().err.endswith(said)


def facts_file(folder: Path, **hosts: dict[str, object]) -> str:
    (folder / "facts.json").write_text(json.dumps({"hosts": hosts}))
    return str(folder / "facts.json")


BARE: dict[str, object] = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64"}


def test_cpu_builds_for_gpus_without_a_driver(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    dark = {"os": {"id": "debian", "version": "12"}, "arch": "x86_64", "nvidia": {"pci_devices": ["0000:41:00.0"]}}
    file.write_text(json.dumps({"hosts": {"dark": dark}}))
    assert "no NVIDIA driver" in provision("plan", "--facts", str(file), code=1).stderr
    assert "torch==2.15.0+cpu" in provision("plan", "--facts", str(file), "--cpu", "--why").stdout
    assert provision("image", "render", "--facts", str(file), "--cpu").stdout.startswith("# debian 12 on x86_64, without CUDA")


def test_full_disks_of_the_facts_are_named(tmp_path: Path) -> None:
    full = {"prefix": {"path": "/opt/provision", "free_mb": 1500}, "tmp": {"path": "/tmp", "free_mb": 5, "total_mb": 9}}
    said = provision("plan", "--facts", facts_file(tmp_path, full=BARE | {"disk": full}, well=BARE)).stderr
    assert "full: error: the disk is full: /opt/provision has 1.5 GB free, 2.4 GB are needed" in said
    assert "/tmp (temporary files) has 5 MB free, 100 MB are needed" in said
    assert "well:" not in said
    assert said.rstrip().endswith("provision up would not install this: 2 errors at the top (full)")
    installed = BARE | {"disk": full, "installed": {"manifest": manifest_with()}}
    assert "/opt/provision has" not in provision("plan", "--facts", facts_file(tmp_path, full=installed)).stderr


def test_limit_chooses_among_the_hosts_of_the_facts(tmp_path: Path) -> None:
    file = facts_file(tmp_path, a=BARE, b=BARE, c=BARE)
    assert list(json.loads(provision("plan", "--facts", file, "--limit", "!b", "--json").stdout)["hosts"]) == ["a", "c"]
    assert "no host or group is called `d`" in provision("plan", "--facts", file, "--limit", "d", code=2).stderr
    assert "a facts file has no last run" in provision("plan", "--facts", file, "--limit", "@failed", code=2).stderr


def test_python_of_the_inventory_with_facts_from_a_file(tmp_path: Path) -> None:
    file = facts_file(tmp_path, a=BARE)
    (tmp_path / "hosts.ini").write_text("a provision_python=python3.12\n")
    made = json.loads(provision("plan", str(tmp_path / "hosts.ini"), "--facts", file, "--json").stdout)["hosts"]["a"]["python"]
    assert (made["version"], made["package"], made["why"][0]) == ("3.12", "/usr/bin/python3.12", "requested in the inventory")
    (tmp_path / "hosts.ini").write_text("a provision_python=/opt/mine/bin/python\n")
    said = provision("plan", str(tmp_path / "hosts.ini"), "--facts", file, code=2).stderr
    assert "hosts.ini, host a: " in said
    assert "the facts do not say which Python that is" in said


def test_untested_systems_are_named_once(tmp_path: Path) -> None:
    new = {**BARE, "os": {"id": "debian", "version": "14"}, "python": {"version": "3.13.9"}}
    done = provision("plan", "--facts", facts_file(tmp_path, a=new, b=new, c=BARE))
    assert done.stderr.strip() == "a and b: warning: debian 14 is newer than what this was tested with (13)"


def test_a_conflict_is_printed_once(tmp_path: Path) -> None:
    old = {**BARE, "os": {"id": "centos", "version": "6.10", "libc": "2.12"}}
    done = provision("plan", "--facts", facts_file(tmp_path, a=old, b=old), code=1)
    assert done.stdout == ""
    assert "a: no plan fits: nothing can be installed on centos 6.10: its glibc 2.12 is older than 2.17" in done.stderr
    assert done.stderr.count("no plan fits") == 1
    assert "; the same on b" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["up", "run"])
@pytest.mark.parametrize("columns", [36, 43])
def test_help_in_a_narrow_terminal_cuts_no_name_and_no_text(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = provision(command, "--help").stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = provision(command, "--help").stdout
    names = {name for name in re.findall(r"--[a-z][\w-]+", wide) if len(name) < columns - 4}
    assert names <= set(re.findall(r"--[a-z][\w-]+", narrow))
    assert len(narrow.splitlines()) < 12 * len(names), "texts have room"


@pytest.mark.parametrize("columns", ["80", "100"])
def test_a_plan_of_three_unlike_hosts_fits_a_terminal(columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = ("real-b200-570-and-h100-550", "debian-12-and-13", "driver-auto-keeps-the-newer-one")
    known = [json.loads((DATA / f"plans/{name}.json").read_text()) for name in names]
    facts = {name: one for each in known for name, one in list(each["hosts"].items())[:1]}
    file = facts_file(tmp_path, **facts)
    for words, code in ((), 0), (("--torch", "2.15.0", "--nccl", "2.4.8"), 1):
        done = provision("plan", "--facts", file, *words, code=code)
        assert len((done.stdout + done.stderr).splitlines()) <= 25
        assert len(provision("plan", "--facts", file, *words, "--why", code=code).stdout.splitlines()) >= 100 * (not code)


def test_the_same_facts_give_the_same_plan() -> None:
    assert plan("--json").stdout == plan("--json").stdout


def test_the_rendered_playbook_stands_alone(tmp_path: Path) -> None:
    plan("--out", str(tmp_path / "book"))
    text = (tmp_path / "book/site.yml").read_text()
    assert "[[" not in text
    assert "role: openmpi" in text
    variables = variables_in(tmp_path / "book/vars.json")
    assert Path(variables["provision_engine"]["archive"]).exists()
    syntax = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "--syntax-check",
            "-i",
            str(DATA / "lint.ini"),
            "site.yml",
            "-e",
            "@vars.json",
        ],
        cwd=tmp_path / "book",
        capture_output=True,
        text=True,
        check=False,
    )
    assert syntax.returncode == 0, syntax.stderr


def test_a_conflict_names_the_host_and_exits_1(tmp_path: Path) -> None:
    document = json.loads((DATA / "lint-facts.json").read_text())
    document["hosts"]["gpu1"]["driver"] = {"version": "390.157", "cuda": "9.1"}
    (tmp_path / "facts.json").write_text(json.dumps(document))
    done = provision("plan", str(DATA / "lint.ini"), "--facts", str(tmp_path / "facts.json"), code=1)
    assert "gpu1: no plan fits: driver 390.157 does not support its GPUs" in done.stderr
    assert "→" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "missing.ini"], "missing.ini"),
        (["missing.ini"], "missing.ini"),
        (["up"], "provision: missing argument 'HOSTS'\n  → see provision up --help\n"),
        (["up", "localhost", "--no-such-option"], "provision: no such option: --no-such-option\n  → see provision up --help\n"),
        (["up", "localhost", "--chekc"], "provision: no such option: --chekc\n  → did you mean --check?\n"),
        (["--verison"], "provision: no such option: --verison\n  → did you mean --version?\n"),
        (["smoke", "localhost", "--np", "many"], "provision: invalid value for '--np'"),
        (["smoke", "localhost", "--np"], "provision: option '--np' requires an argument\n"),
        (["sandbox", "dwon"], "provision: no such command 'dwon'\n  → did you mean down?\n"),
        (["image", "xyz"], "provision: no such command 'xyz'\n  → see provision image --help\n"),
        (["plan", "localhost", "--openmpi", "5"], "invalid --openmpi 5: expected a release"),
        (["plan", "localhost", "--nccl", "web"], "one of wheel, repository, source, strict, compatible"),
        (["up", "localhost", "--nccl", "newest"], "invalid --nccl newest: expected a release"),
        (["plan", "localhost", "--nccl", "missing.deb"], "missing.deb: no such file"),
        (["plan", "localhost", "--nccl", __file__], "cannot be read as a tarball"),
        (["plan", "localhost", "--openmpi", __file__], "its name does not say a version"),
        (["plan"], "--facts FILE"),
        (["plan", "localhost", "--facts", "missing.json"], "missing.json"),
        (["plan", "localhost", "--wheels", "missing-folder"], "missing-folder"),
        (["survey", "localhost", "--become-password-file", "missing-file"], "missing-file"),
        (["remove", "a,b", "--yes", "--limit", ""], "--limit '': invalid pattern: expected"),
        (["run", "-H", "a,b", "--limit=", "true"], "--limit '': invalid pattern: expected"),
        (["upp"], "did you mean up?"),
        *(([word], f"provision: no such command '{word}'\n") for word in ("help", "list", "deploy", "clean", "upgrade", "node1", "hosts")),
        (["help", "--yes"], "did you mean provision --help? (a host of this name: provision up help)"),
        (["--debug", "docter"], "did you mean doctor? (a host of this name: provision up docter)"),
        (["--", "clean"], "no such command 'clean'"),
        (["up", "hosts.ini", "--debug"], "it stands before the command: provision --debug"),
        (["upp", "hosts.ini"], "did you mean up?"),
        (
            ["up", "a", "hosts.ini", "b"],
            "invalid HOSTS: hosts.ini and 2 more: expected one inventory, or hosts\n",
        ),
        (["doctor", "missing.log", "absent.out"], "missing.log and absent.out: read as with --log"),
        (["install", "hosts.ini"], "did you mean provision up?"),
        (["report", "--open"], "did you mean provision runs report?"),
        (["ps"], "did you mean provision jobs?"),
        (["up", "hosts.ini", "--dry-run"], "no such option: --dry-run\n  → did you mean --check?"),
        (["survey", "--inventory", "hosts.ini"], "did you mean HOSTS, without an option before it?"),
        (["survey", "hosts.ini", "--dry-run"], "see provision survey --help"),
        (["run", "--inventory", "hosts.ini"], "did you mean --hosts?"),
        (["runs", "-H", "a"], "see provision runs --help"),
        (["sandbox", "destroy"], "see provision sandbox --help"),
        (["sandbox", "up", "-n", "0"], "invalid value for '-n' / '--count': expected greater than or equal to 1"),
        (["sandbox", "up", "-n", "1000000"], "invalid value for '-n' / '--count': expected less than or equal to"),
        (["image", "verify", "x:1", "--hosts", "1000000"], "invalid value for '--hosts': expected less than or equal to"),
        *(
            ([*command, "99999999999999999999"], f"invalid value for '{command[-1]}'")
            for command in (
                *(["smoke", "localhost", "--np"], ["smoke", "localhost", "--epochs"]),
                *(["sandbox", "up", "--slots"], ["bench", "localhost", "--rounds"], ["bench", "localhost", "--repetitions"]),
                *(["status", "localhost", "--watch", "--interval"], ["doctor", "--gpu", "--dcgm"]),
            )
        ),
        (["status", "localhost", "--watch", "--interval", "nan"], "invalid value for '--interval'"),
        (["runs", "-n", "99999999999999999999"], "invalid value for '-n' / '--most'"),
        (["sandbox", "up", "--sudo", "maybe"], "one of nopasswd, password, none"),
        (["image", "verify", "A B"], "not the name of an image"),
    ],
)
def test_wrong_usage_exits_2(words: list[str], said: str) -> None:
    printed = provision(*words, code=2).stderr
    assert said in printed
    assert "╭" not in printed


@pytest.mark.parametrize("word", ["localhost", "a,b", "node1,", "./x", "hosts.ini", "n[1:2]", "me@a", "a:2222", "listed"])
@pytest.mark.parametrize("before", [[], ["--debug"]])
def test_a_word_that_can_only_be_hosts_needs_no_up(word: str, before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def stop(hosts: list[str], _limit: str | None) -> None:
        seen.append(hosts)
        raise UsageError("enough")

    monkeypatch.setattr(up, "inventory_of", stop)
    monkeypatch.chdir(tmp_path)
    Path("listed").write_text("a\n")
    provision(*before, word, "--check", code=2)
    assert seen == [[word]]


_LONG = "x" * 300
_INVALID = "invalid path: expected names of at most 255 bytes"
_NO_HOST = "a name has at most 240 characters"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([_LONG], "no such command"),
        ([f"./{_LONG}"], "no such file"),
        (["plan", _LONG], _NO_HOST),
        (["remove", "--yes", f"{_LONG},b"], _NO_HOST),
        (["status", f"{_LONG}:22"], _NO_HOST),
        (["run", "-np", "1", "--hosts", _LONG, "true"], _NO_HOST),
        (["run", "-np", "1", "--hostfile", _LONG, "true"], "cannot read it: File name too long"),
        (["run", "-np", "1", "--env", _LONG, "true"], _INVALID),
        (["plan", "localhost", "--limit", _LONG], "no host or group is called"),
        (["plan", "localhost", "--limit", f"!@{_LONG}"], "cannot be read"),
        (["plan", "--facts", _LONG], _LONG),
        (["plan", "--facts", str(DATA / "plans/a100-570-cuda-12.8.json"), "--out", _LONG], "cannot be written: File name too long"),
        (["plan", "localhost", "--wheels", _LONG], _INVALID),
        (["plan", "localhost", "--catalog", _LONG], _INVALID),
        (["plan", "localhost", "--openmpi", _LONG], "invalid --openmpi xxx"),
        (["plan", "localhost", "--nccl", _LONG], "invalid --nccl xxx"),
        (["plan", "localhost", "--become-password-file", _LONG], "cannot read it"),
        (["up", "localhost", "--check", "--data", _LONG], _INVALID),
        (["up", "localhost", "--check", "--env", _LONG], "cannot be read"),
        (["up", "localhost", "--check", "--bundle", _LONG], "cannot be read as a bundle: File name too long"),
        (["doctor", "--log", _LONG], _LONG),
        (["plan", "a\nb"], "is not a host name"),
        (["plan", "a\0b"], "is not a host name"),
        (["plan", "./a\nb.ini"], "no such file"),
    ],
)
def test_a_name_that_no_file_can_have_is_wrong_usage(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = provision(*words, code=2).stderr
    assert said in re.sub(r"\n +", " ", shown)
    assert not re.search(r"Errno|--debug|defect|Survey", shown)
    assert not re.fullmatch(r"provision: \S+: File name too long\n.*", shown, re.DOTALL)


def test_a_program_that_no_file_can_be_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([_LONG], ["python", _LONG], ["python", "-c", _LONG], [f"{_LONG}.sh"]):
        assert program_files.syntax_error(words) is None
        assert program_files.pack(words, []).command == words


def test_no_password_is_asked_for_without_a_terminal() -> None:
    said = process("survey", "localhost", "--ask-become-pass", code=2).stderr
    assert "no terminal to prompt for the password on" in said
    assert "Warning" not in said


def test_broken_settings_of_ansible_are_named(tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text("[defaults")
    said = process("plan", "node1,node2", code=2, cwd=tmp_path).stderr
    assert f"Ansible's settings: Error reading config file ({tmp_path}/ansible.cfg)" in said


def test_all_problems_of_an_inventory_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts.ini"
    path.write_text("a ansible_host=10.0.0.1 provision_prefx=/x\nb ansible_host=10.0.0.1 slots=many\n")
    said = provision("up", str(path), code=2).stderr
    for part in (
        "hosts.ini: hosts `a` and `b` are the same machine",
        "hosts.ini: unknown variable `provision_prefx` (host `a`)",
        "hosts.ini: slots must be a whole number from 1 to 1000000, not `many` (host `b`)",
    ):
        assert part in said


@pytest.mark.parametrize(("name", "right"), [("mnist", "mirrors:"), ("connection", "todo:")])
def test_a_typo_in_the_catalogue_is_an_error_before_any_connection(tmp_path: Path, name: str, right: str) -> None:
    package = tmp_path / "provision"
    real = Path(provision_package.__file__).parent
    shutil.copytree(real, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("playbooks", "collective_core"):
        (tmp_path / folder).symlink_to(real.parent / folder)
    file = package / "catalog" / f"{name}.yaml"
    before, _, after = file.read_text().partition(right)
    file.write_text(f"{before}{right}:{after}")
    (tmp_path / "hosts.ini").write_text("node1 ansible_host=127.0.0.1 ansible_port=1\n")
    done = process("up", "hosts.ini", code=2, cwd=tmp_path)
    assert f"provision/catalog/{name}.yaml:{before.count(chr(10)) + 1}" in done.stderr
    assert not (tmp_path / "home/runs").exists()


def test_password_prompt_without_a_terminal() -> None:
    assert "--become-password-file" in process("survey", "localhost", "-K", code=2).stderr


def test_localhost_is_surveyed_without_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_disk_space", lambda *_: ())  # a nearly full disk of this machine is not what is tested
    document = json.loads(provision("survey", "localhost", "--json").stdout)
    assert list(document["hosts"]) == ["localhost"]
    assert document["hosts"]["localhost"]["arch"]


def test_debug_shows_the_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "provision", "--debug", "up", "missing.ini"], capture_output=True, text=True, check=False)
    assert "Traceback" in done.stderr


def test_json_plan_from_facts_alone() -> None:
    document = json.loads(provision("plan", "--facts", str(DATA / "lint-facts.json"), "--json").stdout)
    assert document["schema"] == 1
    assert document["conflicts"] == []
    assert set(document["hosts"]) == {"node1", "gpu1"}
    for host in document["hosts"].values():
        for name in ("openmpi", "cmake", "python", "torch", "hwloc"):
            assert {"version", "cuda", "package", "source", "why", "rejected"} <= set(host[name])
    assert document["hosts"]["node1"]["nccl"] is None
    assert {"candidate", "reason"} == set(document["hosts"]["gpu1"]["nccl"]["rejected"][0])


def test_a_conflict_in_json_has_remedies(tmp_path: Path) -> None:
    host = {"os": {"id": "ubuntu", "version": "22.04"}, "arch": "x86_64", "driver": {"version": "390.157", "cuda": "9.1"}}
    (tmp_path / "facts.json").write_text(json.dumps({"hosts": {"old": host}}))
    done = provision("plan", "--facts", str(tmp_path / "facts.json"), "--json", code=1)
    conflicts = json.loads(done.stdout)["conflicts"]
    assert {conflict["host"] for conflict in conflicts} == {"old"}
    assert all(conflict["remedies"] for conflict in conflicts)
    assert "old: no plan fits" in done.stderr


ENDED_BETWEEN_TWO_STEPS = """
import signal, sys
from provision.cli import main
from provision.survey import collect
collect.survey_hosts = lambda *_, **__: signal.raise_signal(signal.SIGTERM)
sys.argv = ["provision", "up", "a,b"]
main.main()
"""


def test_sigterm_between_two_steps_exits_130(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDED_BETWEEN_TWO_STEPS], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "provision: interrupted\n  → run the same command again" in done.stderr
    assert f"all about this run: {tmp_path}/home/runs/2" in done.stderr


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{} runs >/dev/full", 1, "provision: No space left on device"),
        ("{} runs >&-", 0, ""),
        ("PYTHONIOENCODING=ascii {} schema nosuchname", 2, "provision: "),
        ('mkdir gone; cd gone; rmdir "$PWD"; {} plan nosuch.ini', 1, "provision: No such file or directory"),
    ],
)
def test_what_this_machine_lacks_is_no_defect(shell: str, code: int, said: str, tmp_path: Path) -> None:
    command = shell.format(f"{sys.executable} -m provision")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "defect" not in done.stderr


CALLED = """
import atexit, sys
atexit.register(lambda: print(*sys.modules))
from provision.cli import main
main.main()
"""


def test_a_command_is_imported_when_it_is_called() -> None:
    def loaded(*words: str) -> set[str]:
        done = subprocess.run([sys.executable, "-c", CALLED, *words], capture_output=True, text=True, check=False)
        return set(done.stdout.splitlines()[-1].split())

    assert not {"provision.cli.options", "provision.catalog", "ansible_runner", "docker", "requests"} & loaded("--version")
    assert not {"docker", "provision.cli.up", "provision.image"} & loaded("runs")
    assert "provision.report.status.server" not in loaded("status", "--help")

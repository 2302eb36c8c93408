"""`provision export`: which files it writes of which hosts, and what it refuses. Hosts are invented."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollouts import lint_plan

from provision.cli import main
from provision.export import pools, render
from provision.image import local_images
from provision.inventory import load
from provision.plan import lock_file
from provision.plan.model import HostPlan, Plan
from provision.survey import installed

DIGEST = "sha256:" + "0" * 64
HOSTILE = 'a\'; touch {mark}; $(touch {mark}) `touch {mark}` "\n"""; import os\nEND\n[[ 1 ]] {{{{ 1 }}}} #\u2028x: - ['


def host(name: str, of: str = "node1", **changed: Any) -> HostPlan:
    known = lint_plan().hosts[of]
    network = replace(known.network, address=f"192.0.2.{len(name)}")
    return replace(known, **{"name": name, "hostname": name, "login": "trainer", "network": network, **changed})


def plan(*hosts: HostPlan) -> Plan:
    return Plan({each.name: each for each in hosts})


def texts(target: str, found: list[pools.Pool]) -> dict[str, str]:
    return {path: file.content.decode() for path, file in render.files(target, found).items()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Plan]:
    """The hosts a and b of hosts.ini, with a lock; ``held["plan"]`` is what they hold."""
    file = tmp_path / "hosts.ini"
    file.write_text("a ansible_host=192.0.2.1\nbb ansible_host=192.0.2.2\n")
    made = plan(host("a"), host("bb"))
    lock_file.record(load(str(file)), made, {"a": {}, "bb": {}})
    held = {"plan": made}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed, "read_plan", lambda session, *_: plan(*(held["plan"].hosts[h.name] for h in session.inventory.hosts)))
    return held


def exported(*words: str) -> int:
    return main.guarded(lambda: main.app(args=["export", *words], prog_name="provision"), debug=False)


def test_files_of_equal_hosts_name_versions_and_lock(cluster: dict[str, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = lock_file.read(load("hosts.ini"))
    assert lock is not None
    for target, names in render.TARGETS.items():
        if target != "kubernetes":
            assert exported(target, "hosts.ini", "-o", target) == 0
            assert f"{target}: {', '.join(names)}" in capsys.readouterr().out
            for name in names:
                text = (tmp_path / target / name).read_text()
                assert f"from hosts.ini, lock {lock.as_dict()['digest']}: 2 hosts, a, bb" in text
                assert f"torch {cluster['plan'].hosts['a'].torch.version}" in text  # type: ignore[union-attr]
    assert exported("slurm", "hosts.ini", "-o", "slurm") == 0, "an unchanged export is replaced"
    assert exported("ray", "hosts.ini", "-o", "slurm") == 2, "of another target"
    assert exported("slurm", "hosts.ini", "--limit", "a", "-o", "slurm") == 0
    assert "#SBATCH --nodes=1\n" in (tmp_path / "slurm/train.sbatch").read_text()


def test_hosts_that_differ_get_files_of_their_own_and_the_reasons(
    cluster: dict[str, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpu1's driver has it get builds for CUDA."""
    cluster["plan"] = plan(host("a"), host("bb", of="gpu1"))
    lock_file.record(load("hosts.ini"), cluster["plan"], {"a": {}, "bb": {}})
    assert exported("slurm", "hosts.ini", "-o", "job") == 0
    said = capsys.readouterr().err
    assert "pool 1 of 2: torch 2.14.1+cpu, ranks per host 1, without nccl" in said
    assert "for CUDA 12.6, ranks per host 4, nccl " in said
    assert "one job over all hosts: provision run hosts.ini" in said
    for number, other, lines in ((2, "a", ["--ntasks-per-node=4", "--gpus-per-node=4"]), (1, "bb", ["--ntasks-per-node=1"])):
        text = (tmp_path / f"job/pool-{number}/train.sbatch").read_text()
        assert f"#SBATCH --exclude={other}\n" in text
        assert f"# pool {number} of 2: " in text
        assert all(f"#SBATCH {line}\n" in text for line in lines)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nomad", "hosts.ini", "-o", "job"], 2, "invalid TARGET nomad: expected one of slurm, kubernetes, ray"),
        (["slurm", "other,hosts", "-o", "job"], 2, "no lock of these hosts"),
        (["slurm", "hosts.ini", "-o", "full"], 2, "it holds files that were not written by this command"),
        (["slurm", "hosts.ini", "-o", "hosts.ini"], 2, "hosts.ini: is not a folder"),
        (["kubernetes", "hosts.ini", "-o", "job"], 2, "Kubernetes runs images: HOSTS have none"),
        (["kubernetes", "registry.example/mine:1", "-o", "job"], 2, "an image without its digest: expected NAME@sha256:…"),
        (["kubernetes", "mine:latest", "-o", "job"], 2, "an image without its digest"),
        (["kubernetes", "mine@sha256:12", "-o", "job"], 2, "'mine@sha256:12' is not the name of an image"),
        (["ray", f"mine@{DIGEST}", "-o", "job"], 2, "ray runs on hosts: an image names none"),
        (["slurm", f"mine@{DIGEST}", "--limit", "a", "-o", "job"], 2, "--limit chooses hosts"),
    ],
)
def test_wrong_input(
    words: list[str], code: int, said: str, cluster: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert cluster
    monkeypatch.setattr(pools, "of_image", of_known_image(pools.of_image))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/other").touch()
    assert exported(*words) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def of_known_image(real: Any) -> Any:
    """As `pools.of_image`, without a container engine where the name is one of an image."""
    return lambda name: pools.Pool(f"image {name}", {}, {}, gpus=False, image=name) if name == f"mine@{DIGEST}" else real(name)


def test_hosts_that_hold_something_else_than_the_lock(cluster: dict[str, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = cluster["plan"].hosts["bb"]
    cluster["plan"] = plan(host("a"), replace(before, numpy=replace(before.numpy, version="1.26.4", package="numpy==1.26.4")))
    assert exported("slurm", "hosts.ini", "-o", "job") == 1
    said = capsys.readouterr().err
    assert "hold something else than" in said
    assert "1.26.4" in said
    assert "provision up hosts.ini, then export again" in said
    (tmp_path / "provision.lock").write_text("schema: 1\ninventories: {hosts.ini: {}}\n")
    assert exported("slurm", "hosts.ini", "-o", "job") == 2
    assert not (tmp_path / "job").exists()


def test_ray_logs_in_as_one_user() -> None:
    with pytest.raises(render.UsageError, match="as one user, at port 22: expected one, not root, trainer"):
        render.files("ray", pools.of_plan(plan(host("a"), host("bb", login="root")), "x"))


def test_slurm_gets_no_list_of_nodes_from_a_name() -> None:
    mixed = plan(host("a", hostname="node[1-1000]"), host("bb", of="gpu1"))
    with pytest.raises(render.UsageError, match="invalid host name for Slurm's list of nodes"):
        render.files("slurm", pools.of_plan(mixed, "x"))


def test_an_image_says_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"": "debian12", ".arch": "aarch64", ".torch": "2.14.1", ".cuda": "12.6", ".engine": "0.1.0"}
    info = local_images.ImageInfo("x", "sha256:1", {f"org.provision.image{name}": value for name, value in labels.items()}, ready=False)
    monkeypatch.setattr(local_images, "get", lambda *_: info)
    monkeypatch.setattr(local_images.container_engine, "connect", open_nothing)
    pool = pools.of_image(f"registry.example/mine@{DIGEST}")
    assert (pool.versions, pool.gpus) == ({"torch": "2.14.1", "engine": "0.1.0"}, True)
    (text,) = texts("slurm", [pool]).values()
    assert "not verified: provision image verify" in text
    assert f"--container-image='registry.example#mine:{DIGEST}'" in text
    assert 'kubernetes.io/arch: "arm64"' in texts("kubernetes", [pool])["mpijob.yaml"]


def open_nothing() -> Any:
    return type("Client", (), {"close": lambda _: None})()


@pytest.mark.parametrize(
    ("image", "written"),
    [
        ("mine", "registry-1.docker.io#library/mine"),
        ("team/mine:1", "registry-1.docker.io#team/mine"),
        ("registry.example:5000/team/mine:1", "registry.example:5000#team/mine"),
        ("localhost/mine", "localhost#mine"),
    ],
)
def test_images_as_enroot_writes_them(image: str, written: str) -> None:
    pool = pools.Pool("image", {}, {}, gpus=False, image=f"{image}@{DIGEST}")
    assert f"--container-image='{written}:{DIGEST}'" in texts("slurm", [pool])["train.sbatch"]


@pytest.mark.parametrize(
    ("target", "changed", "said"),
    [
        ("ray", {"ssh_port": 2222}, "at port 22"),
        ("ray", {"python": "3.13.1"}, r"Ray 2\.40\.0 has no build for Python 3\.13\.1"),
    ],
)
def test_what_a_target_cannot_take(target: str, changed: dict[str, Any], said: str) -> None:
    version = changed.pop("python", None)
    one = host("a", **changed)
    one = replace(one, python=replace(one.python, version=version)) if version else one
    with pytest.raises(render.UsageError, match=said):
        render.files(target, pools.of_plan(plan(one), "x"))


def test_ranks_get_the_variables_of_provision_run() -> None:
    """The networks, and for a host without root the libraries that its linker does not know."""
    one = host("a", of="gpu1", root=False)
    text = texts("slurm", pools.of_plan(plan(one), "x"))["train.sbatch"]
    assert f"export COLLECTIVE_NETWORK={one.network.cidr}\n" in text
    assert f'export LD_LIBRARY_PATH={":".join(one.library_folders)}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n' in text
    prepared = constant(texts("ray", pools.of_plan(plan(one), "x"))["train_ray.py"], "PREPARE")
    assert f"'LD_LIBRARY_PATH': '{':'.join(one.library_folders)}:{{inherited}}'" in prepared


def constant(text: str, name: str) -> str:
    """What a program assigns to a name."""
    (found,) = (each.value for each in ast.parse(text).body if isinstance(each, ast.Assign) and name in ast.unparse(each.targets))
    return str(ast.literal_eval(found))


def run(command: list[str], folder: Path, *programs: str) -> list[str]:
    """The words of all calls of ``programs``, which print ``a``, while a command runs."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "words").write_text("")
    for name in programs:
        (folder / "bin" / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> "$WORDS"\necho a\n')
        (folder / "bin" / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "a", "JOB_ID": "1", "NTASKS": "1", "NNODES": "1", "NTASKS_PER_NODE": "1", "SUBMIT_DIR": str(folder)}
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "WORDS": f"{folder}/words", "HOME": str(folder)}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "words").read_text().split("\0")


def test_texts_of_hosts_and_images_are_data_in_every_file(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = HOSTILE.format(mark=mark)
    one = host("a", login=text, hostname=text)
    odd = pools.Pool(
        text, {"python": "3.11.2", "torch": text}, {text: text}, False, prefix=text, arch=text, hosts=(one,),
        variables={"COLLECTIVE_NETWORK": text, "PATH": f"{text}:{{inherited}}"},
    )  # fmt: skip
    image = replace(odd, hosts=(), image=f"{text}@{DIGEST}", prefix="/opt/provision", variables={})
    (tmp_path / "hosts.sbatch").write_text(texts("slurm", [odd])["train.sbatch"])
    words = run(["bash", str(tmp_path / "hosts.sbatch"), "train.py"], tmp_path, "srun", "scontrol")
    assert "train.py" in words
    assert f"{text}/venv/bin/python" in " ".join(words)
    (tmp_path / "image.sbatch").write_text(texts("slurm", [image])["train.sbatch"])
    words = run(["bash", str(tmp_path / "image.sbatch"), "train.py"], tmp_path, "srun", "scontrol")
    assert any(word.startswith("--container-image=") and "touch" in word for word in words)
    prepare = ast.parse(constant(texts("ray", [odd])["train_ray.py"], "PREPARE"))
    assigned = next(each for each in prepare.body if isinstance(each, ast.Assign))
    assert ast.literal_eval(assigned.value)[:2] == (f"{text}/manifest.json", dict(odd.versions))
    cluster = yaml.safe_load(texts("ray", [odd])["cluster.yaml"])
    assert cluster["auth"]["ssh_user"] == text
    assert not mark.exists()


def test_rays_environment_is_made_by_the_installations_uv_over_its_packages(tmp_path: Path) -> None:
    """The command of the cluster's file, with a uv that makes folders alone; the quotes of an odd prefix hold."""
    prefix = tmp_path / "it's here; touch mark"
    (prefix / "venv/lib/python3.11/site-packages").mkdir(parents=True)
    (prefix / "venv/lib/python3.11/site-packages/installed_there.py").write_text("")
    (prefix / "uv").write_text(
        '#!/bin/sh\nprintf "%s\\0" "$@" >> "$WORDS"\n[ "$1" != venv ] || mkdir -p "$5/lib/python3.11/site-packages"\n'
    )
    (prefix / "uv").chmod(0o755)
    pool = pools.Pool("x", {"python": "3.11.2", "numpy": "2.2.6"}, {}, gpus=False, prefix=str(prefix), hosts=(host("a"),))
    (command,) = yaml.safe_load(texts("ray", [pool])["cluster.yaml"])["setup_commands"]
    words = run(["bash", "-c", command], tmp_path)
    (made,) = tmp_path.glob("provision-ray-*")
    assert words[:5] == ["venv", "--quiet", "--python", f"{prefix}/venv/bin/python", str(made)]
    assert words[-3:-1] == [f"ray[default,train]=={render.RAY}", "numpy==2.2.6"]
    assert run(["bash", "-c", command], tmp_path) == [""], "it is complete"
    (line,) = (made / "lib/python3.11/site-packages/provision.pth").read_text().splitlines()
    subprocess.run([sys.executable, "-c", f"{line}; import installed_there"], check=True, timeout=60)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["hosts", "image"])
def test_shellcheck_has_nothing_to_say(kind: str, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "it is one of the tools of `make setup`"
    found = pools.of_plan(plan(host("a")), "hosts.ini")
    image = [pools.Pool("image", {}, {}, gpus=True, image=f"mine@{DIGEST}")]
    (tmp_path / "train.sbatch").write_text(texts("slurm", found if kind == "hosts" else image)["train.sbatch"])
    done = subprocess.run([shellcheck, "--shell=bash", str(tmp_path / "train.sbatch")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_jobs_check_what_a_node_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that every file of a job on hosts has, run on a manifest."""
    pool = replace(pools.of_plan(plan(host("a")), "x")[0], prefix=str(tmp_path))
    check = constant(texts("ray", [pool])["train_ray.py"], "PREPARE")
    held: dict[str, Any] = {name: {"version": version} for name, version in pool.versions.items()}
    manifest = tmp_path / "manifest.json"
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("COLLECTIVE_NETWORK", "")
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    manifest.write_text(json.dumps({"host": held}))
    exec(check, {})  # noqa: S102
    assert os.environ["PATH"] == "/opt/provision/venv/bin:/bin"
    manifest.write_text(json.dumps({"host": {**held, "torch": {"version": "1.0"}}}))
    with pytest.raises(RuntimeError, match=r"holds .*'torch': '1\.0'.*: export it again"):
        exec(check, {})  # noqa: S102

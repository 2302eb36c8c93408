"""Loads PyTorch, and with ``cuda=MAJOR.MINOR`` every library of its packages, which must be of that CUDA's major and of one release each;
with ``hip`` it must be a build for AMD's GPUs. It needs no GPU, with ``no-driver`` no driver. Python 3.8+, PyTorch.

The first import writes the byte code, which users who may not write into the environment cannot: it must be readable under any umask.
"""

import csv
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile

os.umask(0o022)
import torch  # noqa: E402

LIBRARY = re.compile(r"lib.*\.so(\.[0-9.]+)?$")  # others are plug-ins, for networks and launchers that a host may not have
PACKAGE = re.compile(r"(torch|nvidia[-_].*)$", re.I)
ABSENT = re.compile(r"(\S+): cannot open shared object file")


def name_of(package):
    """Its name; empty for what an uninstallation that was interrupted leaves."""
    return (package.metadata or {}).get("Name") or ""


def broken(driver):
    """What the dynamic linker says of libraries that cannot be loaded, but for want of one that is optional on a host: libmlx5, ….

    It resolves functions when they are called, as programs have it: `ctypes` would do so at once.
    """
    c = ctypes.CDLL(None)
    c.dlopen.restype, c.dlopen.argtypes, c.dlerror.restype = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int), ctypes.c_char_p
    packages = [each for each in importlib.metadata.distributions() if PACKAGE.match(name_of(each))]
    # By their records: newer Pythons leave missing files out of what they list.
    rows = [(package, row[0]) for package in packages for row in csv.reader((package.read_text("RECORD") or "").splitlines()) if row]
    files = [str(package.locate_file(path)) for package, path in rows if LIBRARY.match(os.path.basename(path))]
    names = {os.path.basename(file) for file in files} | ({"libcuda.so.1"} if driver else set())
    for file in files:
        said = None if c.dlopen(file.encode(), os.RTLD_LAZY) else c.dlerror().decode()
        absent = ABSENT.match(said or "")
        if said and (absent is None or os.path.basename(absent.group(1)) in names):
            yield said


def differing():
    """Versions that do not agree."""
    number = ctypes.c_int()
    ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0]).cudaRuntimeGetVersion(ctypes.byref(number))
    runtime = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if runtime != torch.version.cuda:
        yield f"PyTorch is for CUDA {torch.version.cuda}, and its CUDA runtime is {runtime}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    installed = {each.version for each in importlib.metadata.distributions() if name_of(each).startswith("nvidia-nccl-")}
    if installed and nccl not in installed:
        yield f"PyTorch loads NCCL {nccl}, and its package is {', '.join(sorted(installed))}"
    torch.backends.cudnn.version()  # raises where cuDNN is older than the one that PyTorch was built with


def main(planned, driver=True):
    if not os.path.exists(importlib.util.find_spec("torch._dynamo").cached):  # what optimizers import: it takes seconds
        with tempfile.TemporaryDirectory() as folder:  # it makes one in /tmp and leaves it there
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            importlib.import_module("torch._dynamo")
    if planned == "hip" and not torch.version.hip:
        return [f"torch.version.hip is missing: {torch.__version__} is not the build for AMD's GPUs in the plan"]
    if not planned.startswith("cuda="):
        return []
    if (torch.version.cuda or "").split(".")[0] != planned[len("cuda=") :].split(".")[0]:
        return [f"torch.version.cuda is {torch.version.cuda}: {torch.__version__} is not the build in the plan, {planned}"]
    return [*broken(driver), *differing()]


if __name__ == "__main__":
    wrong = main(sys.argv[1], "no-driver" not in sys.argv)
    print("\n".join(wrong) or torch.__version__, file=sys.stderr if wrong else sys.stdout, flush=True)
    os._exit(bool(wrong))  # no library's end matters

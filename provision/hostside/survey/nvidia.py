"""Driver, GPUs and CUDA toolkits."""

import json
import os
import re
import sys
from xml.etree import ElementTree

from .machine import in_parallel, number, program_in, section
from .user import running_programs

GPU_TIMEOUT_S = 25.0  # without the persistence daemon nvidia-smi wakes every GPU first: several seconds on an 8-GPU host


# Run in a process of its own: a broken driver can crash or hang what loads its library.
LIBCUDA_PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
n = ctypes.c_int()
out = {"cuda": None, "gpus": []}
if cuda.cuDriverGetVersion(ctypes.byref(n)) == 0:
    out["cuda"] = "%d.%d" % (n.value // 1000, n.value % 1000 // 10)
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(n)) == 0:
    for i in range(n.value):
        device, major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        name, uuid = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        cuda.cuDeviceGetUuid(uuid, device)
        h = bytes(bytearray(uuid)).hex()
        out["gpus"].append({"name": name.value.decode(), "compute_capability": "%d.%d" % (major.value, minor.value), "memory_mb": size.value >> 20,
                            "uuid": "GPU-%s-%s-%s-%s-%s" % (h[:8], h[8:12], h[12:16], h[16:20], h[20:])})
print(json.dumps(out))
"""

GPU_FIELDS = ("name", "uuid", "memory.total", "driver_version", "pci.bus_id", "compute_cap")


def read_gpu_table(text, fields):
    """The rows of `nvidia-smi --query-gpu --format=csv,noheader,nounits` (names hold no commas)."""
    gpus, driver = [], None
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(fields):
            continue
        row = dict(zip(fields, values))
        capability = row.get("compute_cap", "")
        gpus.append(
            {
                "name": "NVIDIA GPU" if row["name"].startswith("[") else row["name"],  # such as [GPU is lost]
                "compute_capability": capability if re.match(r"^\d+\.\d+$", capability) else None,
                "memory_mb": number(row["memory.total"].split()[0] if row["memory.total"] else ""),
                "uuid": row["uuid"],
                "bus": row["pci.bus_id"],
            }
        )
        driver = row["driver_version"]
    return gpus, driver


def query_gpus(machine):
    """(GPUs, driver version, the error message of nvidia-smi)"""
    complaint = ""
    for fields in (GPU_FIELDS, GPU_FIELDS[:-1]):  # drivers before 470 or so do not know compute_cap
        command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
        status, output, problems = machine.run(command, timeout=GPU_TIMEOUT_S * 0.8)
        if status == 0:
            gpus, driver = read_gpu_table(output, fields)
            return gpus, driver, None if gpus else (output + problems).strip()[-500:]  # "No devices were found" is a success for some
        complaint = (output + problems).strip()
        if "not a valid field" not in complaint:
            break
    return [], None, complaint[-500:]


MAX_DETAILS = 8 << 20  # of `nvidia-smi -q -x`: some 30 kB per GPU, more with MIG and processes
GPU_DETAILS = {
    "mig_mode/current_mig": "mig",
    "gpu_virtualization_mode/virtualization_mode": "virtualization",
    "vgpu_software_licensed_product/license_status": "license",
    "grid_licensed_product/license_status": "license",
    "fabric/state": "fabric_state",
    "fabric/status": "fabric_status",
    "fabric/clusterUuid": "fabric_cluster",
}
UNSUPPORTED = ("", "n/a", "not supported", "none", "gpu is lost")  # drivers differ in the word, and in brackets around it


def read_gpu_details(text):
    """(CUDA of the driver, {PCI address: details}) of `nvidia-smi -q -x`; of anything else nothing. A field that a driver does not have or a
    GPU does not support is left out."""
    try:
        root = ElementTree.fromstring(text[max(0, text.find("<?xml")) : MAX_DETAILS])
    except (ElementTree.ParseError, ValueError):
        return None, {}
    found = {}
    for node in root.findall("gpu"):
        gpu = found[node.get("id")] = {"mig_instances": len(node.findall("mig_devices/mig_device"))}
        if node.findtext("vbios_version") == "simulated":  # a sandbox's; a real one is numbers
            gpu["simulated"] = True
        for path, name in GPU_DETAILS.items():
            value = (node.findtext(path) or "").strip()
            if value.strip("[]").lower() not in UNSUPPORTED:
                gpu[name] = value[:100]
    cuda = root.findtext("cuda_umd_version") or root.findtext("cuda_version") or ""
    return cuda if re.match(r"\d+\.\d+$", cuda) else None, found


def probe_libcuda(machine):
    status, output, _ = machine.run([sys.executable, "-c", LIBCUDA_PROBE], timeout=GPU_TIMEOUT_S * 0.6)
    try:
        return json.loads(output) if status == 0 else {"cuda": None, "gpus": []}
    except ValueError:
        return {"cuda": None, "gpus": []}


def nvidia_pci_devices(machine, *classes):
    """{PCI address: (device id, the subsystem's vendor and device)} of NVIDIA's devices of these classes."""
    found = {}
    for folder in machine.glob("/sys/bus/pci/devices/*"):
        if machine.line(folder + "/vendor") == "0x10de" and (machine.line(folder + "/class") or "")[:6] in classes:
            ids = [(machine.line(folder + name) or "")[2:].lower() for name in ("/device", "/subsystem_vendor", "/subsystem_device")]
            found[os.path.basename(folder)] = ids[0], ":".join(ids[1:])
    return found


@section(None, timeout=GPU_TIMEOUT_S)
def nvidia(machine):
    kernel_text = machine.line("/proc/driver/nvidia/version") or ""
    module = machine.line("/sys/module/nvidia/version")
    stated = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", kernel_text)
    module = module or (stated.group(1) if stated else None)
    smi = machine.which("nvidia-smi")
    gpus, smi_driver, complaint, cuda = [], None, None, None
    if smi:
        answer, details = in_parallel(
            lambda: query_gpus(machine),
            lambda: read_gpu_details(machine.run(["nvidia-smi", "-q", "-x"], timeout=GPU_TIMEOUT_S * 0.8)[1]),
        )
        gpus, smi_driver, complaint = answer or ([], None, "nvidia-smi could not be run")
        cuda, of_gpus = details or (None, {})
        for gpu in gpus:
            gpu.update(of_gpus.get(gpu["bus"], {}))
    incomplete = not gpus or cuda is None or any(gpu["compute_capability"] is None for gpu in gpus)
    if incomplete and (module or smi_driver):
        direct = probe_libcuda(machine)
        cuda = cuda or direct["cuda"]
        if not gpus:
            gpus = direct["gpus"]
        known = {gpu["uuid"]: gpu["compute_capability"] for gpu in direct["gpus"]}
        for gpu in gpus:
            gpu["compute_capability"] = gpu["compute_capability"] or known.get(gpu["uuid"])
    version = module or smi_driver
    driver = {"version": version, "cuda": cuda, "kernel_module": module, "open": "Open Kernel Module" in kernel_text}
    modinfo = "" if module else machine.run(["modinfo", "nvidia"])[1]
    on_disk = re.search(r"^version:\s+(\d+(\.\d+)+)\s*$", modinfo, re.MULTILINE)
    pci = nvidia_pci_devices(machine, "0x0300", "0x0302")  # VGA and 3D controllers: GPUs, with or without a driver; no sound and no NVSwitch
    return {
        "driver": driver if version else None,
        "gpus": gpus,
        "nvidia": {
            "smi": smi,
            "smi_error": complaint,
            "pci_devices": sorted(pci),
            "pci_ids": sorted({device for device, _ in pci.values()} - {""}),
            "pci_subsystems": sorted({subsystem for _, subsystem in pci.values() if len(subsystem) == 9}),
            "pci_switches": len(nvidia_pci_devices(machine, "0x0680")),  # NVSwitches
            "runfile": machine.exists("/usr/bin/nvidia-uninstall"),  # NVIDIA's installer (.run) leaves it, packages do not
            "module_on_disk": on_disk and on_disk.group(1),
            "open_on_disk": bool(re.search(r"^license:.*GPL", modinfo, re.MULTILINE)) if on_disk else None,
            "device_nodes": machine.glob("/dev/nvidia[0-9]*"),
            "nouveau": machine.exists("/sys/module/nouveau"),
            "peer_memory": machine.exists("/sys/module/nvidia_peermem") or machine.exists("/sys/module/nv_peer_mem"),
            # The kernel keeps 15 letters of a name. Without the first process (hidepid) those of others are hidden.
            "fabric_manager": "nv-fabricmanage" in running_programs(machine) or (False if machine.exists("/proc/1/comm") else None),
            "imex": "nvidia-imex" in running_programs(machine),
            "imex_channels": bool(machine.glob("/dev/nvidia-caps-imex-channels/channel*")),
        },
    }


def nvcc_version(machine, nvcc):
    said = re.search(r"release (\d+\.\d+)", machine.run([nvcc, "--version"])[1])
    return said.group(1) if said else None


def cuda_version_in(machine, folder):
    text = machine.read(folder + "/version.json")
    if text:
        try:
            return json.loads(text)["cuda"]["version"]
        except (ValueError, KeyError, TypeError):
            pass
    stated = re.search(r"CUDA Version (\S+)", machine.read(folder + "/version.txt") or "")
    if stated:
        return stated.group(1)
    nvcc = machine.path(folder + "/bin/nvcc")
    if os.access(nvcc, os.X_OK):
        return nvcc_version(machine, nvcc)
    number = re.search(r"#define CUDA_VERSION (\d+)", machine.read(folder + "/include/cuda.h") or "")  # 12040 is 12.4
    return "%d.%d" % (int(number.group(1)) // 1000, int(number.group(1)) % 1000 // 10) if number else None


def toolkit_of(machine, nvcc):
    """The folder of the toolkit that an nvcc belongs to. It may be reached by a link; Debian's is a script in /usr/bin."""
    real = machine.host_path(os.path.realpath(nvcc))
    return os.path.dirname(os.path.dirname(real if os.path.basename(real) == "nvcc" else machine.host_path(nvcc)))


def toolkit_folders(machine, nvcc):
    """(folder, how it was found) of possible CUDA toolkits, those first that a user has configured."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if machine.env.get(variable):
            yield os.path.normpath(machine.env[variable]), "%s names it" % variable
    if nvcc:
        yield toolkit_of(machine, nvcc), "its nvcc is on the PATH"
    for folder in machine.glob("/usr/local/cuda*") + ["/opt/cuda"]:
        yield folder, "it is in a usual place"
    for folder in ("/usr", "/usr/lib/cuda"):  # nvcc in the one is a script that takes a compiler which fits
        yield folder, "it is the distribution's nvidia-cuda-toolkit"


@section("cuda")
def cuda(machine):
    toolkits = []
    nvcc = program_in(machine.env.get("PATH", ""), "nvcc")
    for folder, found in toolkit_folders(machine, nvcc):
        real = machine.host_path(os.path.realpath(machine.path(folder)))
        compiler = machine.exists(folder + "/bin/nvcc")
        if real in [each["real"] for each in toolkits]:
            continue
        version = cuda_version_in(machine, folder)
        if version or compiler:
            toolkits.append({"nvcc": compiler, "path": folder, "real": real, "version": version, "found": found})
    return {"toolkits": toolkits, "nvcc": {"path": nvcc, "version": nvcc_version(machine, nvcc)} if nvcc else None}

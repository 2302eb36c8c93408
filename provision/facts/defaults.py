"""What every host has, whoever wrote its facts. Data only; a test holds it against what the survey really prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOTHING_ON_DISK = {"path": None, "exists": None, "free_mb": None, "total_mb": None, "read_only": False, "noexec": False, "writable": None}

# What every host has, whoever wrote its facts. Sections that hand-written facts leave out get these and are named under "missing".
DEFAULTS: Mapping[str, Any] = {
    "hostname": None,
    "fqdn": None,
    "hosts_file": [],
    "machine_id": None,
    "boot_id": None,
    "container": None,
    "os": {"id": "linux", "version": "", "codename": None, "name": None, "id_like": [], "family": None, "kernel": None, "libc": None},
    "arch": None,
    "cpu": {"model": None, "cores": None, "logical": None, "physical": None, "sockets": None, "flags": []},
    "memory": {"total_mb": None, "available_mb": None, "swap_mb": None, "limited": False},
    "disk": {"prefix": _NOTHING_ON_DISK, "home": _NOTHING_ON_DISK, "tmp": _NOTHING_ON_DISK, "shm": _NOTHING_ON_DISK},
    "user": {
        "name": None,
        "uid": None,
        "home": None,
        "shell": None,
        "groups": [],
        "sudo": None,
        "sudo_says": None,
        "sudo_installed": None,
        "can_become": None,
    },
    "limits": {},
    "sysctl": {},
    "environment": {"path": "", "ld_library_path": None, "locale": None, "variables": {}},
    "security": {"selinux": None, "firewalld": None, "ufw": None},
    "time": {"epoch": None, "ntp_synced": None, "timezone": None},
    "python": {
        "executable": None,
        "version": None,
        "has_pip": None,
        "has_headers": None,
        "others": [],
        "asked_for": None,
    },
    "pip": {
        "index_url": None,
        "extra_index_urls": [],
        "find_links": [],
        "no_index": False,
        "torch_wheels": [],
        "certificates": None,
        "config_files": [],
        "proxies": [],
    },
    "package_manager": {"name": None, "lock": None},
    "packages": {},
    "held_packages": [],
    "broken_packages": [],
    "dpkg_interrupted": False,
    "candidates": {},
    "candidates_elsewhere": {},
    "wheel_candidates": {},
    "driver": None,
    "gpus": [],
    "nvidia": {
        "smi": None,
        "smi_error": None,
        "pci_devices": [],
        "device_nodes": [],
        "nouveau": False,
        "peer_memory": False,
        "fabric_manager": None,
    },
    "cuda": {"toolkits": [], "nvcc": None},
    "nccl": {"libraries": [], "in_cache": []},
    "mpi": {"found": [], "first": None, "orted": None},
    "hwloc": {"libraries": [], "tool": None, "version": None},
    "linker": {"conf_d": {}, "ours": [], "cache": {}},
    "cmake": None,
    "compiler": None,
    "gcc": None,
    "make": None,
    "ninja": None,
    "network": {"interfaces": [], "default_route_interface": None, "ssh_connection": None},
    "infiniband": [],
    "signs": {"kernel_log": [], "modes": {}, "listening": [], "nccl_conf": {}, "mca_params": {}, "nvswitches": 0},
    "ssh": {
        "sshd": None,
        "ports": [],
        "configured_ports": [],
        "settings": {},
        "client": None,
        "host_keys": [],
        "mesh_key": None,
        "files": [],
    },
    "drift": None,
    "installed": {
        "prefix": None,
        "exists": False,
        "manifest": None,
        "manifest_error": None,
        "elsewhere": [],
        "venv": None,
        "packages": {},
        "torch_cuda": None,
        "files": {},
        "system_packages": {"added": [], "replaced": []},
        "partial_mb": 0,
        "engine_libraries": [],
    },
}
# package → versions: of the package manager's index, of it without the lists that we wrote, and of pip's where that was asked
OFFERS = ("candidates", "candidates_elsewhere", "wheel_candidates")
DRIVER = {"version": None, "cuda": None, "kernel_module": None, "library": None, "open": None}
GPU = {"name": None, "compute_capability": None, "memory_mb": None, "uuid": None}
BESIDES = ("schema", "errors", "missing", "survey", "missing_python", "unreachable")
PACKAGE_MANAGERS = {"debian": "apt", "rhel": "dnf"}

"""What a host with these GPUs and these faults shows, as files. Pure.

The names of the files, below ``gpus/`` of the host's folder: ``tree/…`` is laid over ``/sys`` and ``/proc`` (``host/gpus.sh``),
``state.txt`` is what the stand-in library answers from (``nvml.c``), ``kernel.log`` what dmesg prints, ``set/NAME`` one setting each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from provision.base.versions import key
from provision.catalog import OURS
from provision.sandbox.gpus import recorded
from provision.sandbox.gpus.model import Fault, Gpus, HostFault, faults, profiles

Settings = Mapping[str, int | str]

#: PCI buses on which servers with eight GPUs have them.
BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
_SWITCH_BUS, _CARD_BUS = 0x05, 0xE0
_MODULE_BYTES = {"nvidia": 104_071_168, "nvidia_uvm": 2_019_328, "nvidia_peermem": 16_384, "nouveau": 3_096_576, "amdgpu": 19_718_144}
_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_EFI_ATTRIBUTES = "\x06\x00\x00\x00"
# NVML's numbers (nvml.h): architectures by the lowest compute capability, topology levels, states.
_ARCHITECTURES = (("10.0", 10), ("9.0", 9), ("8.9", 8), ("8.0", 7), ("7.5", 6), ("7.0", 5))
_SYSTEM, _NODE = 50, 40
_WAYS = {_SYSTEM: "SYS", _NODE: "NODE"}
_NOT_CONNECTED = 3
_CLUSTER = "6b1d2f0a-7c35-4e91-9a44-5d8e0c2b7f13"  # of the rack, where there is one
_NOT_LOADED, _MISMATCH = 9, 18
_IN_PROGRESS = 2  # of the fabric


@dataclass(frozen=True)
class Gpu:
    """One GPU of a host, with the words that faults' texts are filled with."""

    number: int
    bus: str
    uuid: str

    def words(self, gpus: Gpus) -> dict[str, object]:
        kind = gpus.kind
        power, heat, links = kind.power or (0, 0, 0), kind.temperatures or (0, 0), kind.nvlink
        return {
            "name": kind.name, "number": self.number, "bus": self.bus, "short": self.bus.rpartition(".")[0],
            "uuid": self.uuid, "slice_gb": -(-kind.memory_mb // 8192), "slice_memory": kind.memory_mb // 8 << 20,
            "serial": int(self.uuid[:8], 16), "pci": kind.pci, "gpus": gpus.count, "version": gpus.driver, "library": f"{gpus.driver}.1",
            "major": kind.capability.partition(".")[0], "minor": kind.capability.partition(".")[2],
            "architecture": next((number for oldest, number in _ARCHITECTURES if key(kind.capability or "0") >= key(oldest)), 0),
            "clock": kind.clocks[0], "memory_clock": kind.clocks[1], "pcie": kind.pcie, "fan": kind.fan,
            "memory": kind.memory_mb << 20, "bar1": 1 << kind.memory_mb.bit_length() + 20,
            "power": power[0] * 1000, "half_power": power[0] * 500, "least_power": power[1] * 1000, "most_power": power[2] * 1000,
            "shutdown": heat[0], "slowdown": heat[1], "hottest": heat[1] - 2, "hot": heat[1] + 1,
            "links": len(_peers(gpus, self.number)) or (links and links.links),
            "link_mbps": links and links.mbps, "link_version": links and links.version,
            "gfx": int(kind.gfx[3:-2]) * 10000 + int(kind.gfx[-2], 16) * 100 + int(kind.gfx[-1], 16) if kind.gfx else 0,  # 90402 of gfx942
            "simds": kind.units * 4, "location": BUSES[self.number] << 8, "device": int(kind.pci, 16), "render": 128 + self.number,
            "cluster": _CLUSTER.replace("-", "") if "imex" in kind.features else "0" * 32,
        }  # fmt: skip


def files(host: str, gpus: Gpus, wrong: Iterable[HostFault] = ()) -> dict[str, str]:
    """The files of a host. ``wrong``: faults of any host, of which its own count."""
    known = faults()
    own = [(known[each.name], each.gpu) for each in wrong if each.host == host]
    cards = [_gpu(host, number) for number in range(gpus.count)]
    settings: dict[str, int | str] = {"shm_mb": 2048}
    for fault, _ in own:
        settings |= fault.host
    if "branch" in settings:
        gpus = Gpus(gpus.profile, gpus.count, _other_driver(gpus, str(settings["branch"])), gpus.fabric)
    said = [line.format(**cards[at].words(gpus)) for fault, at in own for line in fault.log]
    log = [f"[{at:5}.000000] {line}" for at, line in enumerate([*_usual_log(gpus, settings), *said])]
    tree = {_SECURE_BOOT: _EFI_ATTRIBUTES + chr(int(settings.get("secure_boot", 0)))}
    tree |= _amd(gpus, cards) if gpus.kind.vendor == "amd" else _nvidia(gpus, cards, settings)
    tree |= _fabric(gpus, settings)
    made = {f"tree/{path}": text for path, text in tree.items()}
    made["kernel.log"] = "".join(f"{line}\n" for line in log)
    loaded = str(settings.get("driver", "loaded"))
    if gpus.kind.vendor == "amd":
        made["amd-smi"] = _amd_smi(gpus, cards)
        made["devices"] = "/dev/kfd\n" + "".join(f"/dev/dri/renderD{128 + card.number}\n" for card in cards)
    else:
        shown = _shown(cards, settings, own)
        made["state.txt"] = _state(gpus, cards, shown, settings, own)
        made["nvidia-smi"] = recorded.script(*_recorded_of(gpus, shown, loaded))
        made["devices"] = "".join(f"{each}\n" for each in _devices(gpus, settings)) if loaded in ("loaded", "mismatched") else ""
        made["programs"] = "".join(f"{each}\n" for each in _programs(gpus, settings)) if loaded in ("loaded", "mismatched") else ""
        if "imex" in gpus.kind.features:
            made["cluster"] = _CLUSTER
        made["set/nvidia_smi"] = str(int(loaded not in ("none", "nouveau")))
        made["set/libcuda"] = str(int(bool(settings.get("libcuda", 1)) and loaded not in ("none", "nouveau")))
    made["set/shm_mb"] = str(settings["shm_mb"])
    return made


def _gpu(host: str, number: int) -> Gpu:
    digits = hashlib.sha256(f"{host}/{number}".encode()).hexdigest()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))
    return Gpu(number, f"0000:{BUSES[number]:02x}:00.0", uuid)


def _usual_log(gpus: Gpus, settings: Settings) -> list[str]:
    """What the kernel of a healthy host says."""
    loaded = gpus.kind.vendor == "nvidia" and settings.get("driver", "loaded") in ("loaded", "mismatched")
    said = [f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {gpus.driver}"] if loaded else []
    return ["Linux version 6.1.0-40-amd64 (simulated)", *said]


def _other_driver(gpus: Gpus, branch: str) -> str:
    known = OURS.cuda().toolkits.of.values()
    return next((each for each in known if each.split(".")[0] == branch and each != gpus.driver), f"{branch}.1")


def _device(bus: str, vendor: str, device: str, pci_class: str) -> dict[str, str]:
    """A device on the PCI bus, as sysfs has it."""
    values = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{pci_class}00", "numa_node": "0"}
    return {f"sys/bus/pci/devices/{bus}/{name}": f"{value}\n" for name, value in values.items()}


def _modules(**versions: str) -> dict[str, str]:
    """Loaded modules: in /sys/module, and in the list that lsmod prints."""
    found = {f"sys/module/{name}/version": f"{version}\n" for name, version in versions.items()}
    found["proc/modules"] = "".join(f"{name} {_MODULE_BYTES.get(name, 65_536)} 0 - Live 0x0000000000000000 (OE)\n" for name in versions)
    return found


def _nvidia(gpus: Gpus, cards: list[Gpu], settings: Settings) -> dict[str, str]:
    kind, loaded = gpus.kind, settings.get("driver", "loaded")
    tree: dict[str, str] = {}
    for card in cards:
        tree |= _device(card.bus, "10de", kind.pci, kind.pci_class)
    for number in range(kind.switches.count if kind.switches and gpus.count > 1 else 0):
        tree |= _device(f"0000:{_SWITCH_BUS + number:02x}:00.0", "10de", kind.switches.pci if kind.switches else "", "0680")
    if loaded == "nouveau":
        return tree | _modules(nouveau="")
    if loaded not in ("loaded", "mismatched"):
        return tree | _modules()
    is_open = bool(settings.get("open", kind.open))
    flavour = "Open Kernel Module for x86_64" if is_open else "x86_64 Kernel Module"
    tree["proc/driver/nvidia/version"] = f"NVRM version: NVIDIA UNIX {flavour}  {gpus.driver}  Release Build\n"
    for card in cards:
        said = {"Model": kind.name, "IRQ": 0, "GPU UUID": f"GPU-{card.uuid}", "Bus Location": card.bus, "Device Minor": card.number}
        tree[f"proc/driver/nvidia/gpus/{card.bus}/information"] = "".join(f"{name}: \t {value}\n" for name, value in said.items())
    modules = {"nvidia": gpus.driver, "nvidia_uvm": gpus.driver}
    if gpus.fabric and settings.get("peer_memory", 1):
        modules["nvidia_peermem"] = gpus.driver
    return tree | _modules(**modules)


def _devices(gpus: Gpus, settings: Settings) -> list[str]:
    """Device nodes, which are ordinary files here."""
    nodes = [f"/dev/nvidia{number}" for number in range(gpus.count)] + ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    nodes += [f"/dev/nvidia-nvswitch{number}" for number in range(gpus.kind.switches.count if gpus.kind.switches and gpus.count > 1 else 0)]
    if "imex" in gpus.kind.features and settings.get("imex_channel", 1):
        nodes.append("/dev/nvidia-caps-imex-channels/channel0")
    return nodes


def _programs(gpus: Gpus, settings: Settings) -> list[str]:
    """Services that run, by their names."""
    if "imex" in gpus.kind.features:
        return ["nvidia-imex"] if settings.get("imex", 1) else []
    return ["nv-fabricmanager"] if "nvlink" in gpus.features and not gpus.kind.mesh and settings.get("fabric_manager", 1) else []


def _shown(cards: list[Gpu], settings: Settings, own: list[tuple[Fault, int]]) -> list[Gpu]:
    """Those that the driver shows."""
    missing = {at for fault, at in own if fault.host.get("hidden") == 1}
    return [card for card in cards if settings.get("hidden") != "all" and card.number not in missing]


def _recorded_of(gpus: Gpus, shown: list[Gpu], loaded: str) -> tuple[set[str], dict[str, object], list[dict[str, object]]]:
    """What nvidia-smi's recorded outputs are filled with: names of what the host has, words of the host, and words of each GPU."""
    kind, has, cards = gpus.kind, _has(gpus), list[dict[str, object]]()
    reserved, power = int(profiles().answers["memory"]["memory.reserved"]) >> 20, kind.power or (0, 0, 0)
    host: dict[str, object] = {
        "version": gpus.driver, "nvml": ".".join(gpus.driver.split(".")[:2]), "cuda": OURS.cuda().toolkits.of_branch(gpus.driver) or "0.0",
        "gpus": len(shown), "columns": "\t".join(f"GPU{index}" for index in range(len(shown))), "pci": kind.pci.upper(),
        "total": kind.memory_mb, "free": kind.memory_mb - reserved, "bar1": 1 << kind.memory_mb.bit_length(), "power": power[0],
        "least_power": power[1], "most_power": power[2], "gbps": f"{kind.nvlink.mbps / 1000:g}" if kind.nvlink else "",
    }  # fmt: skip
    for index, card in enumerate(shown):
        near, peers, alike = _ways(gpus, card, shown), _peers(gpus, card.number), kind.nvlink.links if kind.nvlink and "links" in has else 0
        links = [peers.count(each.number) if kind.mesh else alike for each in shown]
        ways = [f"NV{count}" if count else _WAYS[int(near[f"topology.{at}"])] for at, count in enumerate(links)]
        ways[index] = " X "
        own = {"index": index, "bus": f"0000{card.bus}".upper(), "slot": card.bus[5:7].upper(), "ways": "\t".join(ways)}
        cards.append(card.words(gpus) | host | own)
    return has | {gpus.profile, loaded} | (set() if shown else {"no-gpu"}), host, cards


def _state(gpus: Gpus, cards: list[Gpu], shown: list[Gpu], settings: Settings, own: list[tuple[Fault, int]]) -> str:
    """The text from which the stand-in library answers."""
    cuda = (OURS.cuda().toolkits.of_branch(gpus.driver) or "0.0").split(".")
    loaded = settings.get("driver", "loaded")
    host: dict[str, object] = {"driver": gpus.driver, "library": f"{cuda[0]}.{gpus.driver}", "cuda": f"{cuda[0]}0{cuda[1]}0"}
    if loaded in ("unloaded", "mismatched"):
        host["error"] = _NOT_LOADED if loaded == "unloaded" else _MISMATCH
    lines = [f"- {name} {value}" for name, value in host.items()]
    for index, card in enumerate(shown):  # the library counts those that it finds
        values = {"minor": str(card.number)} | _values(gpus, card, cards, shown)
        if "fabric.state" in values and not settings.get("fabric_manager", 1):
            values["fabric.state"] = str(_IN_PROGRESS)
        for fault, at in own:
            changed = {**fault.all, **(fault.gpu if at == card.number else {})}
            values |= {name: str(value).format(**card.words(gpus)) for name, value in changed.items()}
        lines += [f"{index} {name} {value}" for name, value in values.items()]
    return "".join(f"{line}\n" for line in lines)


def _values(gpus: Gpus, card: Gpu, cards: list[Gpu], shown: list[Gpu]) -> dict[str, str]:
    """What a healthy GPU answers, by the stand-in library's keys."""
    words, has = card.words(gpus), _has(gpus)
    answers = profiles().answers.items()
    values = {name: str(value).format(**words) for group, each in answers if group in has for name, value in each.items()}
    return values | (_links(gpus, card, cards, shown) if "nvlink" in has else {}) | _ways(gpus, card, shown)


def _has(gpus: Gpus) -> set[str]:
    """What such GPUs have, by the names of the answers that need it."""
    kind = gpus.kind
    has = gpus.features | {"always"} | {name for name, value in (("memory", kind.memory_mb), ("temperatures", kind.temperatures)) if value}
    has |= {"fan"} if kind.fan is not None else set()
    if "nvlink" in has:
        has |= {"links"} if kind.mesh else {"links", "switched"}
    return set(has)


def _peers(gpus: Gpus, number: int) -> list[int]:
    """The GPU at the other end of each NVLink of a GPU in a mesh."""
    return [other for other in range(gpus.count) if gpus.kind.mesh for _ in range(int(gpus.kind.mesh[number][other]))]


def _ways(gpus: Gpus, card: Gpu, shown: list[Gpu]) -> dict[str, str]:
    """The ways over PCI Express to the other GPUs: of more than four, half are next to each processor."""
    half = gpus.count // 2 if gpus.count > 4 else gpus.count
    near = [card.number // half == each.number // half for each in shown]
    return {f"topology.{index}": str(_NODE if each else _SYSTEM) for index, each in enumerate(near)}


def _links(gpus: Gpus, card: Gpu, cards: list[Gpu], shown: list[Gpu]) -> dict[str, str]:
    """Each NVLink, with what it leads to, and which GPUs are reached by them."""
    kind, peers = gpus.kind, _peers(gpus, card.number)
    switches = [f"0000:{_SWITCH_BUS + number:02x}:00.0" for number in range(kind.switches.count if kind.switches else 2)]
    connected = [not kind.mesh or each.number in peers for each in shown]
    values = {f"p2p.{index}": str(0 if each else _NOT_CONNECTED) for index, each in enumerate(connected)}
    for link in range(len(peers) or (kind.nvlink.links if kind.nvlink else 0)):
        remote = cards[peers[link]].bus if peers else switches[link % len(switches)]
        values[f"nvlink.remote.{link}"] = f"0000{remote}"
    return values


def _fabric(gpus: Gpus, settings: Settings) -> dict[str, str]:
    """Cards for RDMA, each with one port, whose faults the settings name."""
    tree: dict[str, str] = {}
    if not gpus.fabric:
        return tree
    card = profiles().fabric[gpus.fabric]  # type: ignore[index]
    count = min(gpus.count, 8)
    wrong = count if settings.get("ports") == "all" else int(settings.get("ports", 0))
    for number in range(count):
        bad: Settings = settings if number < wrong else {}
        tree |= _device(f"0000:{_CARD_BUS + number:02x}:00.0", card.vendor, "1021", "0207" if gpus.fabric == "ib" else "0200")
        top = f"sys/class/infiniband/{card.device}_{number}"
        port = f"{top}/ports/1"
        values = {
            f"{top}/device/vendor": f"0x{card.vendor}",
            f"{port}/state": bad.get("port_state", "4: ACTIVE"),
            f"{port}/phys_state": bad.get("port_phys", "5: LinkUp"),
            f"{port}/rate": bad.get("port_rate", card.rate),
            f"{port}/link_layer": card.link_layer,
            f"{port}/counters/symbol_error": bad.get("port_errors", 0),
            f"{port}/counters/link_downed": 0,
            f"{port}/gid_attrs/types/0": "RoCE v2" if gpus.fabric == "roce" else "IB/RoCE v1",
        }
        tree |= {path: f"{value}\n" for path, value in values.items()}
    return tree


def _amd(gpus: Gpus, cards: list[Gpu]) -> dict[str, str]:
    """PCI devices, the kernel's topology of compute devices (KFD), and the module."""
    kind = gpus.kind
    nodes = "sys/class/kfd/kfd/topology/nodes"
    tree = {f"{nodes}/0/gpu_id": "0\n", f"{nodes}/0/properties": "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n"}
    for card in cards:
        tree |= _device(card.bus, "1002", kind.pci, kind.pci_class)
        tree[f"sys/bus/pci/devices/{card.bus}/mem_info_vram_total"] = f"{kind.memory_mb << 20}\n"
        properties = {name: str(value).format(**card.words(gpus)) for name, value in profiles().answers["kfd"].items()}
        node = f"{nodes}/{card.number + 1}"
        tree[f"{node}/properties"] = "".join(f"{name} {value}\n" for name, value in properties.items())
        tree[f"{node}/gpu_id"] = f"{int(card.uuid[:4], 16)}\n"
        tree[f"{node}/name"] = "ip discovery\n"
    return tree | _modules(amdgpu=gpus.driver)


def _amd_smi(gpus: Gpus, cards: list[Gpu]) -> str:
    """A stand-in for amd-smi that prints recorded answers: `list`, `static` and `version`, as JSON whether or not that is asked for."""
    kind = gpus.kind
    listed = [{"gpu": card.number, "bdf": card.bus, "uuid": card.uuid, "node_id": card.number + 1} for card in cards]
    asic = {"market_name": kind.name, "device_id": f"0x{kind.pci}", "num_compute_units": kind.units, "target_graphics_version": kind.gfx}
    driver, vram = {"name": "amdgpu", "version": gpus.driver}, {"size": {"value": kind.memory_mb, "unit": "MB"}}
    static = [{"gpu": card.number, "asic": asic, "bus": {"bdf": card.bus}, "driver": driver, "vram": vram} for card in cards]
    version = [{"tool": "AMDSMI Tool", "version": "simulated", "amdgpu_version": gpus.driver}]
    answers = "".join(
        f"{name}) cat <<'END'\n{json.dumps(said)}\nEND\n;;\n" for name, said in (("list", listed), ("static", static), ("version", version))
    )
    return f"#!/bin/sh\n# Recorded answers of a simulated host.\ncase ${{1:-}} in\n{answers}*) echo 'not simulated' >&2; exit 1 ;;\nesac\n"

"""Interfaces, the default route, InfiniBand."""

import re
import socket
import struct

from .machine import number, section

# Interfaces that exist for containers, virtual machines or tunnels: never the way to another host unless the inventory says so.
CONTAINER_INTERFACE = re.compile(
    r"^(docker\d*|docker_gwbridge|br-[0-9a-f]{6,}|veth.*|virbr.*|vnet\d+|cni.*|cbr\d+|flannel.*|cali.*|cilium.*|lxc.*|lxd.*|podman.*|nerdctl.*|kube.*|"
    r"weave.*|dummy.*|vmnet.*|vboxnet.*|ifb.*|ovs-.*|vxlan.*|nodelocaldns|incusbr.*)$"
)
TUNNEL_INTERFACE = re.compile(r"^(tun|tap|wg|tailscale|zt|utun|ppp|sit|gre|ip6tnl|tunl|nebula|ipsec)")


def netlink_addresses():
    """{interface index: ["192.0.2.1/24", ...]}, asked of the kernel itself: `ip` is missing on small systems."""
    rtm_getaddr, dump_request, done, error = 22, 0x301, 3, 2
    found = {}
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    try:
        link.settimeout(2)
        link.bind((0, 0))
        link.send(struct.pack("=IHHIIBxxx", 20, rtm_getaddr, dump_request, 1, 0, socket.AF_UNSPEC))
        while True:
            data = link.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (done, error) or length < 16:
                    return found
                family, prefix_length, _, _, index = struct.unpack_from("=BBBBI", data, 16)
                attributes, values = data[24:length], {}
                while len(attributes) >= 4:
                    size, name = struct.unpack_from("=HH", attributes)
                    if size < 4:
                        break
                    values[name] = attributes[4:size]
                    attributes = attributes[(size + 3) & ~3 :]
                address = values.get(2) or values.get(1)  # IFA_LOCAL, else IFA_ADDRESS: they differ on point-to-point links
                if address and family in (socket.AF_INET, socket.AF_INET6):
                    found.setdefault(index, []).append("%s/%d" % (socket.inet_ntop(family, address), prefix_length))
                data = data[(length + 3) & ~3 :]
    finally:
        link.close()


def interface_kind(machine, name, flags):
    folder = "/sys/class/net/" + name
    if flags & 0x8:
        return "loopback"
    if CONTAINER_INTERFACE.match(name):
        return "container"
    if TUNNEL_INTERFACE.match(name) or machine.exists(folder + "/tun_flags"):
        return "tunnel"
    if machine.line(folder + "/type") == "32":
        return "infiniband"
    for mark, kind in (("wireless", "wireless"), ("bonding", "bond"), ("bridge", "bridge")):
        if machine.exists(folder + "/" + mark):
            return kind
    return "ethernet"


def default_route_interface(machine):
    best = None
    for line in (machine.read("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            if best is None or int(fields[6]) < best[0]:
                best = (int(fields[6]), fields[0])
    if best is None:
        for line in (machine.read("/proc/net/ipv6_route") or "").splitlines():
            fields = line.split()
            if len(fields) == 10 and set(fields[0]) == {"0"} and fields[1] == "00" and fields[9] != "lo":
                if best is None or int(fields[5], 16) < best[0]:
                    best = (int(fields[5], 16), fields[9])
    return best[1] if best else None


@section("network")
def network(machine):
    addresses = netlink_addresses() if machine.root == "/" else {}
    interfaces = []
    for name in machine.listdir("/sys/class/net"):
        folder = "/sys/class/net/" + name
        if not machine.exists(folder + "/flags"):
            continue  # bonding_masters and the like
        flags = int(machine.line(folder + "/flags") or "0", 16)
        kind = interface_kind(machine, name, flags)
        speed = number(machine.line(folder + "/speed"))
        state = machine.line(folder + "/operstate")
        interfaces.append(
            {
                "name": name,
                "addresses": addresses.get(number(machine.line(folder + "/ifindex")), []),
                "mtu": number(machine.line(folder + "/mtu")),
                "up": bool(flags & 0x1) and state in ("up", "unknown"),
                "loopback": kind == "loopback",
                "virtual": kind in ("container", "tunnel"),
                "kind": kind,
                "speed": speed if speed and speed > 0 else None,
                "device": machine.exists(folder + "/device"),
            }
        )
    return {
        "interfaces": interfaces,
        "default_route_interface": default_route_interface(machine),
        "ssh_connection": ssh_connection(machine.env.get("SSH_CONNECTION", ""), interfaces),
    }


def ssh_connection(variable, interfaces):
    """Which of our addresses, on which interface, the controller reached us by."""
    fields = variable.split()
    if len(fields) != 4:
        return None
    ours = fields[2].split("%")[0]
    if ours.startswith("::ffff:"):
        ours = ours[len("::ffff:") :]
    carrier = next((entry["name"] for entry in interfaces for cidr in entry["addresses"] if cidr.split("/")[0] == ours), None)
    return {"server_address": ours, "server_port": number(fields[3]), "interface": carrier}


MAX_GIDS = 256  # of a port: mlx5 has 255 places, most of them empty


def roce_v2_gids(machine, port):
    """The indexes of a port's GIDs of RoCE v2: the kernel answers for an empty place with an error."""
    places = sorted(number(name) for name in machine.listdir(port + "/gid_attrs/types") if name.isdigit())[:MAX_GIDS]
    return [place for place in places if machine.line("%s/gid_attrs/types/%d" % (port, place)) == "RoCE v2"]


@section("infiniband")
def infiniband(machine):
    ports = []
    for folder in machine.glob("/sys/class/infiniband/*/ports/*"):
        device, _, port = folder[len("/sys/class/infiniband/") :].partition("/ports/")
        ports.append(
            {
                "device": device,
                "port": number(port),
                "state": (machine.line(folder + "/state") or "").split(":")[-1].strip().lower() or None,
                "link_layer": machine.line(folder + "/link_layer"),
                "rate": machine.line(folder + "/rate"),
                "vendor": (machine.line("/sys/class/infiniband/%s/device/vendor" % device) or "")[2:] or None,
                "roce_v2_gids": roce_v2_gids(machine, folder),
                "interfaces": machine.listdir("/sys/class/infiniband/%s/device/net" % device),
            }
        )
    return ports

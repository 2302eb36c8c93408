"""Container engines of sandbox hosts: a real dockerd in the host's network, and the real client in the host.

A sandbox host is an ordinary container, which may not start containers. So this machine starts the dockerd, as root, in the host's network
and under its name, with mounts of its own; its socket is in the host, where it is the host's engine.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from hosts import container, root, wait_until

from provision.sandbox import SandboxHost, names

_PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/bin"


@contextlib.contextmanager
def engine_of_its_own(host: SandboxHost, folder: Path) -> Iterator[None]:
    """The host has an engine within the block, which its user may use; its data are in ``folder``."""
    client = shutil.which("docker", path=_PATH)
    assert client is not None
    box = container(host)
    place = folder / host.name
    place.mkdir(parents=True)
    process = box.attrs["State"]["Pid"]
    command = [
        "nsenter",
        f"--target={process}",
        "--net",
        "--uts",
        "unshare",
        "--mount",
        "dockerd",
        "-H",
        f"unix:///proc/{process}/root/run/docker.sock",
    ]
    command += ["--data-root", str(place / "data"), "--exec-root", str(place / "exec"), "--pidfile", str(place / "pid")]
    command += ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--containerd-namespace", f"provision-{process}"]
    command += ["--insecure-registry", "0.0.0.0/0"]
    # The proxy of other tests is not its own, and ends before it.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | {"PATH": _PATH}
    with (place / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as dockerd:
        try:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                tar.add(os.path.realpath(client), "usr/bin/docker")
            box.put_archive("/", buffer.getvalue())
            wait_until(lambda: box.exec_run(["docker", "version"]).exit_code == 0 or dockerd.poll() is not None, timeout=60)
            assert dockerd.poll() is None, (place / "log").read_text()[-2000:]
            user = names.USER
            root(host, f"groupadd -f docker && usermod -aG docker {user} && chgrp docker /run/docker.sock && chmod 660 /run/docker.sock")
            yield
        finally:
            root(host, "docker ps -aq | xargs -r docker rm -f")
            dockerd.terminate()
            dockerd.wait(timeout=60)
            subprocess.run(["rm", "-rf", str(place)], check=True)  # many thousand files

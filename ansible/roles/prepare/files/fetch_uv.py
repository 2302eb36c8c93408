"""uv's program out of its wheel, by pip and by checksum: ``fetch_uv.py VERSION ARCHITECTURE SHA256 FOLDER``. Python 3.8+."""

import os
import subprocess
import sys
import tempfile
import zipfile

version, arch, sha256, folder = sys.argv[1:]
with tempfile.TemporaryDirectory() as work:
    pinned = os.path.join(work, "requirements.txt")
    with open(pinned, "w") as file:
        file.write(f"uv=={version} --hash=sha256:{sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--platform", f"manylinux2014_{arch}", "--dest", work]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *options, "--requirement", pinned]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"uv {version} cannot be downloaded by pip of {sys.executable}; with a uv of your own, set provision_uv: {{{arch}: PATH}}")
    wheel = next(name for name in os.listdir(work) if name.endswith(".whl"))
    with zipfile.ZipFile(os.path.join(work, wheel)) as archive:
        content = archive.read(f"uv-{version}.data/scripts/uv")
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "uv")
with open(path + ".new", "wb") as program:
    program.write(content)
os.chmod(path + ".new", 0o755)  # noqa: S103  a program
os.replace(path + ".new", path)

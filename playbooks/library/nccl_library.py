#!/usr/bin/python
"""Ansible module: which NCCL a program on this host gets. It loads the library as a program does. Python 3.7+, standard library only.

`ncclGetVersion` needs no GPU; the CUDA that a build is for is not asked of a function but stands in the library ("NCCL version
2.21.5+cuda12.4", which NCCL_DEBUG=VERSION prints).
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_library
short_description: Load NCCL and tell its version and CUDA
description:
  - Read-only.
author: [the provision authors]
"""

EXAMPLES = r"""
- name: Load NCCL
  nccl_library:
  register: nccl
"""

RETURN = r"""
version: {description: "e.g. C(2.21.5).", returned: always, type: str}
cuda: {description: "e.g. C(12.4); empty when the library does not say.", returned: always, type: str}
path: {description: The file that was loaded., returned: always, type: str}
"""

import json  # noqa: E402
import mmap  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

# In a process of its own: a broken library can crash or hang whoever loads it.
LOOK = r"""
import ctypes, json, os
library = ctypes.CDLL("libnccl.so.2")
number = ctypes.c_int()
status = library.ncclGetVersion(ctypes.byref(number))
with open("/proc/self/maps") as maps:
    paths = [line.split(None, 5)[5].strip() for line in maps if "libnccl.so" in line]
print(json.dumps({"status": status, "number": number.value, "path": os.path.realpath(paths[0]) if paths else ""}))
"""


def spelt(number):
    """22105 → 2.21.5; before 2.9 it was 2708 → 2.7.8."""
    thousands, hundreds = (10000, 100) if number >= 10000 else (1000, 100)
    return f"{number // thousands}.{number % thousands // hundreds}.{number % hundreds}"


def cuda_of(path, version):
    pattern = rb"NCCL version " + re.escape(version.encode()) + rb"[^+\0]*\+cuda(\d+\.\d+)"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # 200 MB and more
        found = re.search(pattern, content)
        return found.group(1).decode() if found else ""


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    rc, out, err = module.run_command([sys.executable, "-c", LOOK])
    if rc != 0:
        last = (err.strip().splitlines() or [f"the process that loaded it ended with {rc}"])[-1]
        module.fail_json(msg=f"NCCL cannot be loaded: {last}")
    said = json.loads(out)
    if said["status"] != 0:
        module.fail_json(msg=f"libnccl.so.2: ncclGetVersion failed with {said['status']}")
    version = spelt(said["number"])
    module.exit_json(changed=False, version=version, cuda=cuda_of(said["path"], version), path=said["path"])


if __name__ == "__main__":
    main()

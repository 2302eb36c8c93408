"""The NCCL that a program on this host gets: one line of JSON with its version, CUDA and file. Python 3.7+, standard library only.

`ncclGetVersion` needs no GPU; the CUDA that a build is for is not asked of a function but is in the library ("NCCL version
2.21.5+cuda12.4", which NCCL_DEBUG=VERSION prints).
"""

import ctypes
import json
import mmap
import os
import re
import sys

try:
    library = ctypes.CDLL("libnccl.so.2")
except OSError as error:
    sys.exit(f"NCCL cannot be loaded: {error}")
number = ctypes.c_int()
status = library.ncclGetVersion(ctypes.byref(number))
if status != 0:
    sys.exit(f"libnccl.so.2: ncclGetVersion failed with {status}")
with open("/proc/self/maps") as maps:
    path = os.path.realpath(next(line.split(None, 5)[5].strip() for line in maps if "libnccl.so" in line))
# 22105 is 2.21.5; before 2.9 it was 2708 for 2.7.8.
thousands, hundreds = (10000, 100) if number.value >= 10000 else (1000, 100)
version = f"{number.value // thousands}.{number.value % thousands // hundreds}.{number.value % hundreds}"
with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # 200 MB and more
    match = re.search(rb"NCCL version " + re.escape(version.encode()) + rb"[^+\0]*\+cuda(\d+\.\d+)", content)
    cuda = match.group(1).decode() if match else ""  # before the mapping is closed
print(json.dumps({"version": version, "cuda": cuda, "path": path}))

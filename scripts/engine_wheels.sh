#!/bin/sh
# Wheels of the engine for Linux with glibc 2.17 or newer, where the toolkit and its own wheel have them: provision/_bundled/wheels. Zig's
# clang compiles them, as it links with any glibc and needs no other system for that; auditwheel refuses what needs a newer one.
# Arguments: the folder of Python's programs, then architectures. The build tag names the sources (provision/base/engine_source.py).
set -eu
bin=$PWD/$1 target=provision/_bundled/wheels
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tag=$("$bin/python" -c 'from provision.base import engine_source; print(engine_source.pack().build)')
mkdir -p "$target"
find "$target" -name '*.whl' ! -name "*-$tag-*" -delete # of other sources
for arch; do
    # By their versions, they come from the host's glibc, which knows its processor; else from Zig's own run time, which is slower.
    case $arch in x86_64) oldest=GLIBC_2.2.5 ;; *) oldest=GLIBC_2.17 ;; esac
    for each in memcpy memmove memset memcmp; do echo "__asm__(\".symver $each,$each@$oldest\");"; done >"$work/glibc.h"
    CXX="$bin/python-zig c++ -target $arch-linux-gnu.2.17" CXXFLAGS="-O3 -fomit-frame-pointer -include $work/glibc.h" \
        _PYTHON_HOST_PLATFORM=linux-$arch \
        CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$arch" \
        "$bin/python" -m build --wheel --outdir "$work/linux" collective_core
    PATH="$bin:$PATH" "$bin/auditwheel" repair --plat "manylinux_2_17_$arch" --wheel-dir "$work/$arch" "$work"/linux/*"_$arch.whl"
    "$bin/python" -m wheel tags --build "$tag" --remove "$work/$arch"/*.whl
    mv "$work/$arch"/*.whl "$target/"
done

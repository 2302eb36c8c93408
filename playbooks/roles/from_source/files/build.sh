#!/bin/sh
# Build sources into one archive, whose members are relative to the folder where it will be, and print the archive's SHA-256.
#
# Sources are configured, made and installed; with BUILD_FOLDERS they have a makefile alone, as NCCL's, and these folders of its BUILDDIR are
# wanted; with BUILD_UV they are a Python package and the archive is its wheel. The arguments are options for configure, or for make where
# there is no configure. However the build ends, it leaves nothing but the archive with its checksum, or the log of what has failed.
# BUILD_FOLDERS and BUILD_MAKE_WORDS are lists of words.
# shellcheck disable=SC2086
set -eu
umask 022
log=$BUILD_WORK/log

clean_up() {
    status=$?
    trap '' EXIT HUP INT TERM
    # A compiler that is just dying may still write.
    for _ in 1 2 3 4 5; do if rm -rf "$BUILD_WORK" "$BUILD_ARCHIVE.part"; then break; else sleep 1; fi; done
    exit $status
}

stop() { # MESSAGE
    printf '%s\n' "$1" >&2
    exit 1
}

run() { # NAME FOLDER COMMAND...: the part of the log that tells the cause is from shortly before the first error, else its end
    name=$1 folder=$2
    shift 2
    if (cd "$folder" && exec "$@") >>"$log" 2>&1 </dev/null; then return; fi
    cp "$log" "$BUILD_ARCHIVE.log"
    excerpt=$(awk 'NF { line[++n] = $0; if (!first && /(^|[^[:alnum:]_])error:|No space left/) first = n }
                   END { begin = (first ? first : n + 1) - 2; if (begin > n - 11) begin = n - 11; if (begin < 1) begin = 1
                         for (at = begin; at < begin + 12 && at <= n; at++) print line[at] }' "$log")
    stop "$name of $BUILD_NAME failed:
$excerpt
the whole log: $BUILD_ARCHIVE.log"
}

unpack() { # FILE: where the sources are, the folder that holds FILE
    "$BUILD_PYTHON" -m tarfile -e "$BUILD_SOURCES" "$BUILD_WORK/source" >/dev/null
    set -- "$BUILD_WORK"/source/*/"$1" "$1"
    [ $# = 2 ] && [ -e "$1" ] || stop "$BUILD_SOURCES holds no sources that are ready to be built: it has no $2"
    source=${1%/*}
}

jobs() { # compilers to run at a time: one a core, as far as the memory goes
    awk -v cores="$(nproc)" -v each="$BUILD_JOB_MB" '/^MemAvailable:/ { most = int($2 / 1024 / each) }
        END { print (most < 1 ? 1 : most < cores ? most : cores) }' /proc/meminfo
}

pack() { # FOLDER NAME...
    folder=$1
    shift
    tar --create --gzip --file "$BUILD_ARCHIVE.part" --owner=root:0 --group=root:0 --sort=name --directory "$folder" "$@"
}

build_wheel() {
    set -- --wheel --no-build-isolation --offline --no-config --no-progress --python "$BUILD_PYTHON" --out-dir "$BUILD_WORK/wheel"
    run uv "$BUILD_WORK" env NO_COLOR=1 UV_CACHE_DIR="$BUILD_WORK/cache" PATH="${BUILD_PYTHON%/*}:$PATH" "$BUILD_UV" build "$@" "$BUILD_SOURCES"
    # What does not load is not handed on.
    "$BUILD_PYTHON" -m zipfile -e "$BUILD_WORK"/wheel/*.whl "$BUILD_WORK/loaded"
    [ -z "$BUILD_MODULE" ] || run import "$BUILD_WORK/loaded" "$BUILD_PYTHON" -c "import $BUILD_MODULE"
    mv "$BUILD_WORK"/wheel/*.whl "$BUILD_ARCHIVE.part"
}

build_with_make() {
    unpack Makefile
    run make "$source" make "-j$(jobs)" $BUILD_MAKE_WORDS "$@" "BUILDDIR=$BUILD_WORK/objects" "PREFIX=$BUILD_PREFIX"
    for folder in $BUILD_FOLDERS; do
        [ -d "$BUILD_WORK/objects/$folder" ] || stop "make of $BUILD_NAME ended well and made no $folder"
    done
    pack "$BUILD_WORK/objects" $BUILD_FOLDERS
}

build_with_configure() {
    unpack configure
    # Where the linker's configuration names the folder by now, libtool leaves the path out, and other hosts would not find the libraries.
    run configure "$BUILD_WORK/objects" "$source/configure" "--prefix=$BUILD_PREFIX" "LDFLAGS=-Wl,-rpath,$BUILD_PREFIX/lib" "$@"
    run make "$BUILD_WORK/objects" make "-j$(jobs)" $BUILD_MAKE_WORDS
    run "make install" "$BUILD_WORK/objects" make $BUILD_MAKE_WORDS install "DESTDIR=$BUILD_WORK/stage"
    pack "$BUILD_WORK/stage$BUILD_PREFIX" .
}

# One that an earlier run has started may still be at work: wait for it, and take what it has built. Its compilers hold the lock, too.
exec 9<"${BUILD_ARCHIVE%/*}"
flock 9
if [ -e "$BUILD_ARCHIVE.sha256" ] && echo "$(cat "$BUILD_ARCHIVE.sha256")  $BUILD_ARCHIVE" | sha256sum --check --status; then
    cat "$BUILD_ARCHIVE.sha256" # of a run that was cut off afterwards
    exit
fi
trap clean_up EXIT
trap 'exit 1' HUP INT TERM
rm -rf "$BUILD_WORK"
mkdir -m 700 "$BUILD_WORK" # sources keep the owners that their archive names
mkdir "$BUILD_WORK/objects"
export LC_ALL=C TMPDIR="$BUILD_WORK"
actual=$(sha256sum "$BUILD_SOURCES") || stop "cannot read $BUILD_SOURCES"
[ "${actual%% *}" = "$BUILD_SHA256" ] || stop "$BUILD_SOURCES has checksum ${actual%% *}, not $BUILD_SHA256; nothing of it was used"
if [ -n "${BUILD_UV-}" ]; then
    build_wheel
elif [ -n "$BUILD_FOLDERS" ]; then
    build_with_make "$@"
else
    build_with_configure "$@"
fi
sum=$(sha256sum "$BUILD_ARCHIVE.part")
mv "$BUILD_ARCHIVE.part" "$BUILD_ARCHIVE"
printf '%s\n' "${sum%% *}" | tee "$BUILD_ARCHIVE.sha256"

#!/usr/bin/env bash
# compile.sh FOLDER ARCH [PROBE]: the programs of testing/wrappers and testing/probe, all at once, for one architecture;
# or one probe. What an architecture cannot do is left out, and said so.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "$1")
arch=$2
mkdir -p "$folder"
: "${NVCC:=nvcc}"
libraries=$(dirname "$(command -v "$NVCC")")/../lib

one() { # name, source, flags
    local name=$1 source=$2
    shift 2
    "$NVCC" -std=c++17 -O3 -arch="$arch" -Werror all-warnings "$@" "$source" -L"$libraries" -o "$folder/$name" >"$folder/$name.log" 2>&1 ||
        { echo "not compiled: $name"; head -5 "$folder/$name.log"; touch "$folder/failed"; }
}
wrappers() { # folder, architecture
    mkdir -p "$folder/$1"
    make -s -C testing/wrappers NVCC="$NVCC" OUT="$folder/$1" ARCH="$2" >"$folder/$1.log" 2>&1 ||
        { echo "not compiled: $1"; head -5 "$folder/$1.log"; touch "$folder/failed"; }
}
tuned() { # name, format, group, rows of x, words in the ring
    one "gemv-$1-m$4-w$5" testing/probe/gemv.cu -DTUNE_FORMAT="$2" -DTUNE_GROUP="$3" -DTUNE_ROWS="$4" -DCQ_RING_WORDS="$5"
}
rm -f "$folder/failed"
if [ -n "${3-}" ]; then
    one "$3" "testing/probe/$3.cu"
    [ ! -e "$folder/failed" ] || exit 1
    exit 0
fi

# The branches for this card, and those for cards before it, which the driver compiles.
wrappers wrappers "$arch" &
wrappers wrappers-75 compute_75 &
for probe in alive issue_rates bandwidth launches strides splits; do
    one "$probe" "testing/probe/$probe.cu" &
done
[ "$(nproc)" -gt 4 ] || wait
for words in 8 16 32; do
    tuned a4_g64 'Affine<4>' 64 1 "$words" &
    tuned mxfp4 Mxfp4 32 1 "$words" &
    [ "$(nproc)" -gt 4 ] || wait
done
tuned a4_g64 'Affine<4>' 64 8 16 &
tuned a4_g64 'Affine<4>' 64 16 16 &
tuned nvfp4 Nvfp4 16 1 16 &
tuned mxfp8 Mxfp8 32 1 16 &
[ "$(nproc)" -gt 4 ] || wait
tuned a3_g64 'Affine<3>' 64 1 16 &
tuned a5_g64 'Affine<5>' 64 1 16 &
tuned a8_g64 'Affine<8>' 64 1 16 &
wait
[ ! -e "$folder/failed" ]

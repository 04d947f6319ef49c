#!/usr/bin/env bash
# What of scripts/gpu.sh can be tested without a GPU: its runs, with fakes; that its test and bench programs link, with the
# pretend driver; and, if a source of theirs has changed, that NVIDIA's compiler takes the programs of testing/.
set -euo pipefail
cd "$(dirname "$0")/../.."

python3 -m unittest discover -s benches
# They wait most of the time.
python3 -m unittest discover -s testing/gpu &
fakes=$!
scripts/test-cuda.sh --build

: "${CUDA_HOME:=$(scripts/cuda-tools.sh)}"
# candle's kernels are compiled for streams of threads, and call functions of other names than candle itself: a program that
# loads libraries late is linked only if all of them are known.
absent=$(nm -D --defined-only "$CUDA_HOME/lib/libcudart.so.13" | sed -E 's/.* //; s/@.*//' | grep -E '^__cuda|_pt[sd][sz]$' |
    grep -vxFf <(tr ' ' '\n' <crates/delay-load/symbols/cudart) || true)
if [ -n "$absent" ]; then
    echo "crates/delay-load/symbols/cudart lacks functions of CUDA's runtime:" $absent >&2
    exit 1
fi

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/gpu
sources=$(find cuda testing/probe testing/wrappers testing/pretend-cuda/emulator scripts/gpu/compile.sh scripts/cuda-tools.sh \
    -type f -print0 | sort -z | xargs -0 sha256sum)
if [ "$(cat "$target/compiled" 2>/dev/null)" != "$sources" ]; then
    NVCC=$CUDA_HOME/bin/nvcc scripts/gpu/compile.sh "$target/tools" sm_90
    echo "$sources" >"$target/compiled"
fi
wait "$fakes"

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

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/gpu
sources=$(find cuda testing/probe testing/wrappers testing/pretend-cuda/emulator scripts/gpu/compile.sh scripts/cuda-tools.sh \
    -type f -print0 | sort -z | xargs -0 sha256sum)
if [ "$(cat "$target/compiled" 2>/dev/null)" != "$sources" ]; then
    : "${CUDA_HOME:=$(scripts/cuda-tools.sh)}"
    NVCC=$CUDA_HOME/bin/nvcc scripts/gpu/compile.sh "$target/tools" sm_90
    echo "$sources" >"$target/compiled"
fi
wait "$fakes"

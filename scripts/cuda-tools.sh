#!/usr/bin/env bash
# Fetches the CUDA compiler and disassembler, and libclang, from PyPI into cuda-tools in cargo's target folder, once, and
# prints where they are (the folder that CUDA_HOME names). No driver and no GPU are needed.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(realpath -m "${CARGO_TARGET_DIR:-target}")/cuda-tools
packages=(
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    nvidia-cuda-cuobjdump==13.4.92 nvidia-cuda-nvdisasm==13.5.37 libclang==18.1.1
)
if [ "$(cat "$tools/packages" 2>/dev/null)" != "${packages[*]}" ]; then
    python3 -m venv --clear "$tools"
    "$tools/bin/python" -m pip install --quiet --no-deps "${packages[@]}" >&2
    echo "${packages[*]}" >"$tools/packages"
fi
echo "$tools"/lib/python3*/site-packages/nvidia/cu13

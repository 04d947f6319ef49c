#!/usr/bin/env bash
# Checks the machine code of the CUDA kernels against their budgets (testing/sass); no GPU is needed.
# The tools are those of NVCC or CUDA_HOME if set, else they are fetched.
#
#   scripts/sass-gate.sh [arguments of sass_gate.py]
#   scripts/sass-gate.sh --planted [NAME ..]    whether planted bugs are noticed
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${NVCC:-}${CUDA_HOME:-}" ]; then
    CUDA_HOME=$(scripts/cuda-tools.sh)
    export CUDA_HOME
fi
python3 -m unittest discover -s testing/sass
if [ "${1-}" = --planted ]; then
    shift
    exec python3 testing/sass/planted.py "$@"
fi
exec python3 testing/sass/sass_gate.py "$@"

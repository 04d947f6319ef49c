#!/usr/bin/env bash
# All tests: of the crate; of the CUDA backend, its kernels run by an emulator below a pretend driver; of the kernels'
# machine code. No GPU is needed.
#
#   scripts/test.sh [--full]
#
# --full: the CUDA tests with sanitizers as well, whether they notice bugs that are planted in the kernels, and
# whether the kernels compile for every architecture.
# Needs a C++ compiler. The checks of machine code and of generated bindings need Python 3, with which they fetch
# NVIDIA's compiler and libclang; without it they are left out, unless CI is set.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

step "the crate"
cargo test --release --features cli

step "the CUDA backend on the pretend driver"
scripts/test-cuda.sh

if [ "${1-}" = --full ]; then
  step "the same with sanitizers"
  scripts/test-cuda.sh --asan
  step "planted bugs"
  scripts/mutants.sh
fi

if command -v python3 >/dev/null || [ -n "${CI-}" ]; then
  step "machine code of the kernels"
  if [ "${1-}" = --full ]; then scripts/sass-gate.sh --archs all; else scripts/sass-gate.sh; fi
  step "bindings"
  scripts/check-bindings.sh
else
  echo "no python3: machine code and bindings were not checked" >&2
fi

#!/usr/bin/env bash
# Are src/backend/cuda/bindings.rs what bindgen makes of cuda/params.h? Fetches libclang unless LIBCLANG_PATH is set.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${LIBCLANG_PATH:-}" ]; then
  LIBCLANG_PATH=$(echo "$(scripts/cuda-tools.sh)"/../../clang/native)
  export LIBCLANG_PATH
fi
cargo run --quiet --release -p bindings -- --check
echo "the bindings are up to date"

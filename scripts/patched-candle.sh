#!/usr/bin/env bash
# The example of a patched candle-nn: makes the folder as its Cargo.toml says, tests and runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
command="$CARGO_TARGET_DIR/release/candle-quant"
[ -x "$command" ] || cargo build --release -p candle-quant-tools
cd examples/patched-candle
rm -rf candle-nn
"$command" patch-candle candle-nn
# A package that is not the one: refused, and nothing is written.
if "$command" patch-candle --package Cargo.toml elsewhere 2>refused; then
  echo "patch-candle took Cargo.toml for candle-nn" >&2 && exit 1
fi
grep -q "Cargo.toml: its SHA-256 is" refused && rm refused && [ ! -e elsewhere ]
cargo test --release --locked

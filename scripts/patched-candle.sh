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
# The results are checked, not the speed; this crate's part of them is tested elsewhere as users have it.
quickly=(--release --locked --config 'profile.release.package.candle-quant.opt-level=1')
cargo test "${quickly[@]}"
# What the tests have built. `cargo run` would build it again, without the features of what only tests need.
text="$("$CARGO_TARGET_DIR/release/patched-candle" 2>told)" || { cat told >&2; exit 1; }
echo "$text"
grep " packed, 0 dequantized" told && rm told

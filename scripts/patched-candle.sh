#!/usr/bin/env bash
# The example of a patched candle-nn: makes the folder as its Cargo.toml says, tests and runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/crates.sh
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
command="$CARGO_TARGET_DIR/release/candle-quant"
[ -x "$command" ] || cargo build --release -p candle-quant-tools
cd examples/patched-candle
rm -rf candle-nn
"$command" patch-candle candle-nn

# packages ARGUMENTS: everything that is compiled, with its features; without what lies in folders.
packages() {
  cargo tree --locked --edges normal,build,dev --no-dedupe --prefix none --format '{p} [{f}]' "$@" | sed 's/ (\*)$//; s/ (proc-macro)//; / (\//d' | sort -u
}
other=$(comm -13 <(packages --manifest-path ../../Cargo.toml "${crates[@]}") <(packages))
[ -z "$other" ] || { echo "packages that scripts/test.sh has compiled with other features; these belong into Cargo.toml's dev-dependencies:" >&2 && echo "$other" >&2 && exit 1; }

# The results are checked, not the speed; this crate's part of them is tested elsewhere as users have it.
quickly=(--release --locked --config 'profile.release.package.candle-quant.opt-level=1')
cargo test "${quickly[@]}"
# What the tests have built. `cargo run` would build it again, without the features of what only tests need.
text="$("$CARGO_TARGET_DIR/release/patched-candle" 2>told)" || { cat told >&2; exit 1; }
echo "$text"
grep " packed, 0 dequantized" told && rm told

#!/usr/bin/env bash
# Fuzzes everything that reads what others wrote: before a release, for an hour.
#
#   scripts/fuzz.sh [--built] [SECONDS [TARGET]..]
#
# Guided by coverage (libFuzzer), with AddressSanitizer, if there are a nightly toolchain and cargo-fuzz (cargo install
# cargo-fuzz); by random changes of the seeds otherwise. All targets share the time. What fails is in fuzz/artifacts.
# --built: by random changes, with the program that scripts/test.sh has built.
set -euo pipefail
cd "$(dirname "$0")/.."
program=''
if [ "${1-}" = --built ]; then
  program=${CARGO_TARGET_DIR:-target}/release/soak
  shift
fi
seconds=${1:-3600}
shift || true
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(basename -s .rs -a fuzz/fuzz_targets/*.rs)
each=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))

soak() {
  if [ -n "$program" ]; then "$program" "$@"; else cargo run --release -p candle-quant-fuzz --bin soak -- "$@"; fi
}

if [ -z "$program" ] && cargo +nightly fuzz --version >/dev/null 2>&1; then
  soak --corpus
  for target in "${targets[@]}"; do
    cargo +nightly fuzz run "$target" -- -max_len=1000000 -timeout=10 -rss_limit_mb=2048 -max_total_time="$each"
  done
else
  soak --seconds "$each" "${targets[@]}"
fi

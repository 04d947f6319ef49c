#!/usr/bin/env bash
# What the compiler does not check: the unit tests of the core (kernels, packing) and those of its readers (mapped files) with
# AddressSanitizer and debug assertions, and those of packing in Miri.
#
#   scripts/memory.sh [--full]
#
# --full: all of them.
# Miri is a part of nightly toolchains (rustup component add miri rust-src --toolchain nightly); without it that half is left
# out, and a line says so.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1-} in '' | --full) ;; *) echo "$0: $1: --full" >&2 && exit 2 ;; esac
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

# What is exhaustive, or of long texts, takes half a minute each; in Miri minutes.
long=(--skip products_agree_with_f64_everywhere --skip a_long_text_agrees_with_f64)
long+=(--skip on_the_number_of_threads --skip on_any_number_of_threads --skip results_are_as_good)
# What compares tables with the sources of kernels, which lie elsewhere as seen from this package.
tables=(--skip backend::cuda::)
# Safe code alone, and hundreds of thousands of draws.
tables+=(--skip backend::cpu::sample::)
packing=(format::bits format::layout format::grammar format::mx format::nf4) cases=8
if [ "${1-}" = --full ]; then
  long=() packing=(format:: tensor:: --skip the_nearest_element) cases=256
fi
. scripts/crates.sh
profile=profile.release.package
RUSTC_WORKSPACE_WRAPPER=$PWD/testing/unit-tests/sanitizing-rustc cargo test --release "${with_unit_tests[@]}" \
  --test core --test mapped \
  --config "$profile.unit-tests.opt-level=1" --config "$profile.unit-tests.debug-assertions=true" \
  --config "$profile.unit-tests.overflow-checks=true" -- "${tables[@]}" "${long[@]}"

if cargo +nightly miri --version >/dev/null 2>&1; then
  CARGO_TARGET_DIR=$target/miri MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-deterministic-floats' PROPTEST_CASES=$cases \
    cargo +nightly miri test -p unit-tests --test core -- "${packing[@]}"
else
  echo "packing was not run in Miri: rustup component add miri rust-src --toolchain nightly" >&2
fi

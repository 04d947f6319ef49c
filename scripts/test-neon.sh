#!/usr/bin/env bash
# Runs the tests of the CPU backend with the NEON kernels, or those that arguments name; where the CPU is not an ARM one,
# under an emulator.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=("${@:-backend::cpu}")

if [ "$(uname -m)" = aarch64 ]; then
  exec cargo test --release -p candle-quant --lib -- "${tests[@]}"
fi
for tool in aarch64-linux-gnu-gcc aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$tool" >/dev/null; then
    echo "no $tool; on Debian: apt-get install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  fi
done
target=aarch64-unknown-linux-gnu
rustup target add "$target"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++
cargo test --release --target "$target" -p candle-quant --lib -- "${tests[@]}"

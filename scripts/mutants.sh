#!/usr/bin/env bash
# Do the CUDA tests notice bugs? Plants each of testing/mutants/*.patch in a copy of the sources and runs tests that have to
# fail with it, and to pass without.
#
#   scripts/mutants.sh [--sample | NAME ...]      all, a sample of each kind, or those of testing/mutants/NAME.patch
#   scripts/mutants.sh --check                    only whether all apply, also those in machine code (testing/sass/planted)
#
# --sample is for after scripts/test-cuda.sh: that tests pass without the bug is not shown again, only that there are some.
#
# A patch begins with
#   Bug: what is wrong.
#   Kernels: the sources of cuda/ that get the bug, without `.cu`; few, for they have to be compiled; none if it is in src/
#   Tests: arguments of the test program
#   Program: lib                    (optional) unit tests instead of tests/cuda
#   Sample: yes                    (optional) one of the sample
#   Sanitizers: yes                    (optional) with AddressSanitizer and UndefinedBehaviorSanitizer
# The exit code is 0 if every bug was caught.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
target=${target%/pretend-cuda} # as test-cuda.sh has it
work=$target/mutants
mkdir -p "$work"
export CXX=$PWD/testing/pretend-cuda/remembering-c++ REMEMBERED_OBJECTS=$target/pretend-cuda/objects
# As test-cuda.sh has these: what is shown is that its tests notice.
export CANDLE_QUANT_REQUIRE_CUDA=1 PRETEND_CUDA_SCHEDULES=two
export GLIBC_TUNABLES=glibc.rtld.optional_static_tls=1048576

field() { sed -n "s/^$2: //p;/^---/q" "$1"; }

# sources FOLDER [MUTANT KERNEL ...]: every kernel in FOLDER, those named from the folder MUTANT.
sources() {
  local folder=$1 mutant=${2-} kernel from
  shift $(($# < 2 ? $# : 2))
  rm -rf "$folder" && mkdir -p "$folder"
  for kernel in cuda/*.cu; do
    kernel=$(basename "$kernel" .cu) from=$PWD
    case " $* " in *" $kernel "*) from=$mutant ;; esac
    echo "#include \"$from/cuda/$kernel.cu\"" >"$folder/$kernel.cu"
  done
}

# link FOLDER: the pretended driver that is there, under the names of CUDA's libraries.
link() {
  local name
  for name in cuda.so.1 cuda.so cudart.so cublas.so cublasLt.so curand.so nvrtc.so nccl.so; do
    ln -sf libpretend_cuda.so "$1/lib$name"
  done
}

# run PATCH FOLDER: the tests of the patch on the kernels of FOLDER. 0: passed, 1: failed, 2: could not be run.
run() {
  local log=$2.log sanitize='' build=$target/pretend-cuda preload='' program
  program=$(field "$1" Program)
  if [ -n "$(field "$1" Sanitizers)" ]; then
    sanitize=address,undefined build=$target/pretend-cuda/asan preload=$(c++ -print-file-name=libasan.so)
  fi
  mkdir -p "$2.lib"
  # One bug is built while the tests of another run.
  (
    flock 9
    PRETEND_CUDA_KERNELS=$2 PRETEND_CUDA_SANITIZE=$sanitize \
      cargo build --quiet --release -p pretend-cuda --target-dir "$build" >"$log" 2>&1 &&
      cp "$build/release/libpretend_cuda.so" "$2.lib"
  ) 9>"$work/lock" || return 2
  link "$2.lib"
  # shellcheck disable=SC2046 # several arguments
  LD_LIBRARY_PATH=$2.lib LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 \
    timeout 600 "$tests/${program:-cuda}" $(field "$1" Tests) >"$log" 2>&1 || return 1
  # Nothing passes if nothing ran.
  grep -q 'test result: ok. [1-9]' "$log" || return 2
}

# unharmed PATCH: its tests pass on the kernels as they are.
unharmed() {
  local key folder program
  program=$(field "$1" Program)
  if [ -n "$sample" ]; then
    # Not `grep -q`, which would close the pipe while the names are printed.
    # shellcheck disable=SC2046 # several arguments
    LD_LIBRARY_PATH=$target/pretend-cuda/toolkit/lib "$tests/${program:-cuda}" --list $(field "$1" Tests) | grep ': test$' >/dev/null
    return
  fi
  key=$program.$(field "$1" Tests).$(field "$1" Sanitizers)
  folder=$work/unharmed/${key//[^a-zA-Z0-9_.]/-}
  (
    flock 8
    [ -e "$folder" ] || { sources "$folder" && run "$1" "$folder"; } || { rm -r "$folder" && exit 1; }
  ) 8>"$work/unharmed.lock"
}

# build FOLDER: the tests, as the programs `cuda` (of tests/cuda) and `lib` (unit tests) of the folder, and the driver: the one in
# cargo's folder gets the kernels of whichever bug comes next.
build() {
  mkdir -p "$1"
  scripts/test-cuda.sh --core --no-run --lib >"$1/build.log" 2>&1 || return 1
  local program source
  for program in cuda=tests/cuda/main.rs lib=src/lib.rs; do
    source=${program#*=}
    cp "$(sed -n "s|.*Executable.* $source (\(.*\))\$|\1|p" "$1/build.log")" "$1/${program%%=*}"
  done
  cp "$target/pretend-cuda/release/libpretend_cuda.so" "$1"
  link "$1"
}

# tests_pass PATCH FOLDER: of the programs there.
tests_pass() {
  local program
  program=$(field "$1" Program)
  # shellcheck disable=SC2046 # several arguments
  LD_LIBRARY_PATH=$2 timeout 600 "$2/${program:-cuda}" $(field "$1" Tests) >"$2/tests.log" 2>&1 &&
    grep -q 'test result: ok. [1-9]' "$2/tests.log"
}

# put_back: what was planted in the copy of the checkout, also by a run that was interrupted. It is newer than what was built
# with the bug, also here: cargo keeps one result for both folders.
put_back() {
  [ -e "$work/planted" ] || return 0
  local file
  while read -r file; do
    # A later commit may have lost it.
    if [ -e "$file" ]; then touch "$file" && cp --parents "$file" -t "$work/checkout"; fi
  done <"$work/planted"
  rm "$work/planted"
}

# verdict_of_src PATCH: of a bug in src/, in a copy of the checkout.
verdict_of_src() {
  local copy=$work/checkout changed
  put_back
  changed=$(sed -n 's|^+++ b/||p' "$1")
  mkdir -p "$copy"
  git ls-files -z | xargs -0 cp -P --parents --preserve=timestamps --update -t "$copy"
  echo "$changed" >"$work/planted"
  trap put_back RETURN
  if ! patch --quiet --directory="$copy" -p1 <"$1" >"$work/patch.log"; then
    echo 'does not apply any more'
  elif ! tests_pass "$1" "$work/without"; then
    echo 'its tests fail without it, too'
  elif ! (cd "$copy" && CARGO_TARGET_DIR=$target build "$work/with"); then
    echo 'does not build'
  elif tests_pass "$1" "$work/with"; then
    echo MISSED
  elif grep -q 'test result: FAILED' "$work/with/tests.log"; then
    echo caught
  else
    echo 'its tests could not be run'
  fi
}

# verdict PATCH FOLDER
verdict() {
  local code=0
  if [ -z "$(field "$1" Kernels)" ]; then
    verdict_of_src "$1"
    return
  fi
  rm -rf "$2" && mkdir -p "$2" && cp -r cuda "$2"
  if ! patch --quiet --directory="$2" -p1 <"$1" >"$2.log"; then
    echo 'does not apply any more'
  elif ! unharmed "$1"; then
    echo 'its tests fail without it, too'
  else
    # shellcheck disable=SC2046 # several kernels
    sources "$2/kernels" "$2" $(field "$1" Kernels)
    run "$1" "$2/kernels" || code=$?
    case $code in
      0) echo MISSED ;;
      1) echo caught ;;
      *) echo 'does not build, or no tests ran' ;;
    esac
  fi
}

# Also of those that do not run this time: what has lost its head, or does not apply, would be noticed long after.
for mutant in testing/mutants/*.patch; do
  for line in Bug Tests; do
    [ -n "$(field "$mutant" $line)" ] || { echo "$mutant: expected a line '$line: ..' at its head" >&2 && exit 1; }
  done
done
for mutant in testing/mutants/*.patch testing/sass/planted/*.patch; do
  patch --quiet --dry-run --fuzz=0 -p1 <"$mutant" || { echo "$mutant does not apply any more" >&2 && exit 1; }
done
[ "${1-}" != --check ] || exit 0

build "$work/without" || { cat "$work/without/build.log" >&2 && exit 1; }
tests=$work/without
rm -rf "$work/unharmed"

sample=''
if [ $# = 0 ]; then
  set -- testing/mutants/*.patch
elif [ "$1" = --sample ]; then
  sample=yes
  # shellcheck disable=SC2046 # several names, without blanks
  set -- $(grep -l '^Sample: yes' testing/mutants/*.patch)
else
  set -- "${@/#/testing/mutants/}"
  set -- "${@/%/.patch}"
fi
# One for each processor at a time; those in src/ share a copy of the checkout.
for mutant; do
  name=$(basename "$mutant" .patch)
  if [ -z "$(field "$mutant" Kernels)" ]; then
    wait
    verdict "$mutant" "$work/$name" >"$work/$name.verdict"
  else
    [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n
    verdict "$mutant" "$work/$name" >"$work/$name.verdict" &
  fi
done
wait

caught=0
for mutant; do
  name=$(basename "$mutant" .patch)
  result=$(<"$work/$name.verdict")
  [ "$result" != caught ] || caught=$((caught + 1))
  printf '%-30s %-32s %s\n' "$name" "$result" "$(field "$mutant" Bug)"
done
echo "$caught of $# caught"
[ "$caught" = $# ]

#!/usr/bin/env bash
# Everything that needs a GPU, for a machine that has one but neither a network nor Rust.
#
#   scripts/gpu.sh build         here: the test and bench programs, into carry/ (no GPU is needed)
#   scripts/gpu.sh run           there, from the same checkout with carry/: proofs, floors, benchmarks, into $OUT,
#                                in less than ten minutes (END=seconds sets another limit); fails unless every
#                                required step succeeded, and says so in $OUT/steps.json. ONLY=word,word leaves out
#                                steps behind the tests that have none of these in their names
#   scripts/gpu.sh record DIR    here: what came back from there, into benches/results/<date>-<gpu>
#
# The machine needs the driver, nvcc with a C++ compiler, and Python with PyTorch (its CUDA libraries are used).
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1-} in
build) exec scripts/gpu/build.sh ;;
run) exec "${PYTHON:-python3}" scripts/gpu/run.py ;;
record) exec python3 benches/report.py record "${2:?which folder came back?}" "${@:3}" ;;
*)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

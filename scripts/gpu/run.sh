#!/usr/bin/env bash
# The part of scripts/gpu.sh that runs on the GPU machine. Every step has a time limit of its own and writes as it
# goes, so that whatever stops one of them costs no other.
set -uo pipefail
cd "$(dirname "$0")/../.."

out=${OUT:-gpu-results}
end=${END:-560}
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1 3>&1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
failed=()

# step NAME SECONDS COMMAND..: nothing runs longer than its limit, nor than the whole may. The output of the
# command may be sent elsewhere; what is said of the step goes to the log (3).
step() {
    local name=$1 limit=$2 left=$((end - SECONDS))
    shift 2
    ((limit < left)) || limit=$left
    printf '\n== %s (%s s so far, at most %s s)\n' "$name" "$SECONDS" "$limit" >&3
    if ((limit < 5)); then
        echo "no time left" >&3
        failed+=("$name")
        return 1
    fi
    timeout -k 5 "$limit" "$@"
    local status=$?
    ((status == 124 || status == 137)) && echo "stopped: the limit of $limit s" >&3
    ((status == 0)) || failed+=("$name")
    return $status
}

# The programs of carry/, their libraries, and the folder that tests were built in.
unpack() {
    local file
    for file in carry/*.xz; do
        "$python" -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' "$file" "$work/$(basename "$file" .xz)" || return 1
    done
    chmod +x "$work"/{test,bench}-*
    LD_LIBRARY_PATH=$("$python" -c 'import glob, nvidia
print(":".join(folder for root in nvidia.__path__ for folder in glob.glob(root + "/*/lib")))')${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
    local built_in
    built_in=$(cat carry/built-in)
    [ -e "$built_in" ] || { mkdir -p "$(dirname "$built_in")" && ln -s "$PWD" "$built_in"; }
    if ldd "$work"/{test,bench}-* | grep 'not found'; then
        echo "libraries are missing"
        return 1
    fi
}

facts() {
    cat carry/commit
    nvidia-smi --query-gpu=name,driver_version,compute_cap,clocks.max.sm,clocks.max.mem,power.limit,memory.total --format=csv
    "${NVCC:-nvcc}" --version | tail -2
    "$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
}

tests() {
    local status=0
    for program in "$work"/test-*; do
        "$program" 2>&1 || status=1
    done | tee "$out/tests.txt" | tail -40
    return $((status | PIPESTATUS[0]))
}

# A few kernels of each kind: the checker makes everything a hundred times slower.
sanitized=${SANITIZED:-"k_that_is_split gated_products awkward_shapes weights_at_an_offset"}
sanitize() {
    local tool status=0
    command -v compute-sanitizer || { echo "there is no compute-sanitizer"; return 0; }
    for tool in memcheck racecheck; do
        # shellcheck disable=SC2086 # several filters
        timeout 45 compute-sanitizer --tool "$tool" --error-exitcode 9 "$work/test-cuda" --test-threads 1 $sanitized 2>&1 |
            tee -a "$out/tests.txt" | tail -6
        status=$((status | PIPESTATUS[0]))
    done
    return $status
}

# Exports what is needed in the shells that `timeout` starts.
export python out work sanitized
export -f facts tests sanitize

nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu --format=csv -lms 500 >"$out/clocks.csv" &
clocks=$!
trap 'kill $clocks 2>/dev/null; rm -rf "$work"' EXIT

step "what is here" 20 bash -c facts
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
step "compile" 90 scripts/gpu/compile.sh "$work/tools" "sm_$capability"
unpack || failed+=(unpack)

step "wrappers against their branches for the host" 60 "$work/tools/wrappers/wrappers" >"$work/wrappers.jsonl"
step "the same, as an older card has them" 60 "$work/tools/wrappers-75/wrappers" >"$work/wrappers-75.jsonl"
cat "$work/wrappers.jsonl" >>"$out/probe.jsonl"
sed 's/"kind": "wrapper"/"kind": "wrapper of sm_75"/' "$work/wrappers-75.jsonl" >>"$out/probe.jsonl"
grep -hv '"wrong": 0' "$work"/wrappers*.jsonl

CANDLE_QUANT_REQUIRE_CUDA=1 step "tests" 150 bash -c tests
CANDLE_QUANT_REQUIRE_CUDA=1 step "compute-sanitizer" 95 bash -c sanitize

for probe in issue_rates launches bandwidth splits strides; do
    step "probe: $probe" 40 "$work/tools/$probe" >>"$out/probe.jsonl"
done
step "products and experts, of this crate and others" "${BENCH_SECONDS:-170}" "$work"/bench-kernels --seconds "$((${BENCH_SECONDS:-170} - 20))" --out "$out"
step "products of other libraries" 60 "$python" benches/peers/gpu_peers.py --seconds 50 --out "$out/peers.jsonl"
for tuned in "$work"/tools/gemv-*; do
    [ -x "$tuned" ] && step "$(basename "$tuned")" 15 "$tuned" >>"$out/probe.jsonl"
done

step "report" 20 "$python" benches/report.py summary "$out"
if ((${#failed[@]})); then
    printf '\nNOT DONE OR FAILED: %s\n' "${failed[*]}"
    exit 1
fi
printf '\nall done in %s s\n' "$SECONDS"

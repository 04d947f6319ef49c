#!/usr/bin/env bash
# Builds the programs of scripts/gpu.sh for one architecture, with the real nvcc and all of candle's kernels, and
# packs them into carry/. The first build takes 10 to 20 minutes, most of it candle's kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/gpu
if [ -z "${CUDA_HOME:-}" ]; then
    CUDA_HOME=$(scripts/cuda-tools.sh)
fi
export CUDA_HOME CUDA_PATH=$CUDA_HOME NVCC=$CUDA_HOME/bin/nvcc PATH=$CUDA_HOME/bin:$PATH
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90} CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)}
export CARGO_TARGET_DIR=$target

# Libraries to link with, under the names that programs look for: every function that cudarc declares.
libraries=$target/libraries/lib
mkdir -p "$libraries"
cudarc=$(cargo metadata --format-version 1 --features cuda | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(next(os.path.dirname(package["manifest_path"]) for package in packages if package["name"] == "cudarc"))')
stub() { # cudarc module, prefix of its functions, file, link
    grep -ohE "fn $2[A-Za-z0-9_]+\(" "$cudarc/src/$1"/sys/*.rs | sort -u | sed -E 's/fn (.*)\(/int \1(void) { return 1; }/' |
        cc -shared -fPIC -w -xc - -Wl,-soname,"$3" -o "$libraries/$3"
    ln -sf "$3" "$libraries/$4"
}
stub driver cu libcuda.so.1 libcuda.so
stub cublas cublas libcublas.so.13 libcublas.so
stub cublaslt cublasLt libcublasLt.so.13 libcublasLt.so
stub curand curand libcurand.so.10 libcurand.so
stub nvrtc nvrtc libnvrtc.so.13 libnvrtc.so
ln -sf "$CUDA_HOME"/lib/libcudart.so.13 "$libraries/libcudart.so"
export CUDA_ROOT=$target/libraries

rm -rf carry "$target/carried"
mkdir -p carry "$target/carried"
cargo build --release --features cuda --test 'cuda*' --bench kernels --bench decode_steps --message-format=json-render-diagnostics >"$target/messages"
# kind-package-target and where it is, of each test, each bench, and the command line, which tests start.
python3 - "$target/messages" <<'END' >"$target/programs"
import json, sys
for line in open(sys.argv[1]):
    message = json.loads(line)
    if message.get("executable") and set(message["target"]["kind"]) & {"test", "bench", "bin"}:
        folder, _, package = message["package_id"].rpartition("#")
        package = package.split("@")[0] if "@" in package else folder.rpartition("/")[2]
        print(f'{message["target"]["kind"][0]}-{package}-{message["target"]["name"]}', message["executable"])
END
while read -r name program; do
    strip -o "$target/carried/$name" "$program"
    echo "$name" >>carry/programs
    case $name in bin-*) echo "$name $program" >>carry/binaries ;; esac
done <"$target/programs"
# Most of each is candle's kernels: with a dictionary larger than a program they are packed once.
tar -c --sort=name -C "$target/carried" . | xz --threads=1 --lzma2=preset=2,dict=256MiB >carry/programs.tar.xz
# Tests look for their files, and for the command line, where they were built.
printf '%s\n' "$PWD" >carry/built-in
git rev-parse HEAD >carry/commit
git diff --quiet HEAD || echo 'and changes' >>carry/commit

# The programs of testing/ are compiled there; that they compile is seen here.
scripts/gpu/compile.sh "$target/tools" "sm_$CUDA_COMPUTE_CAP"

# All that travels: the tree, without what git ignores and what no test on a GPU reads, and carry/.
unread=(benches/results crates docs examples src tests/fixtures/convert tests/fixtures/families tests/fixtures/mlx/codec.safetensors)
size() { # of the files whose names come in
    python3 -c 'import os, sys
files = {name for name in sys.stdin.buffer.read().split(b"\0") if name and os.path.lexists(name)}
print(sum(os.lstat(name).st_size for name in files))'
}
tree=$(git ls-files -coz --exclude-standard -- . "${unread[@]/#/:!}" | size)
carried=$(find carry -type f -print0 | size)
stat -c '  %s %n' carry/*
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }
summary="the tree is $(mib "$tree"), carry/ is $(mib "$carried")"
if ((tree + carried > 64 << 20)); then
    echo "too big to travel: $summary, together more than 64 MiB" >&2
    exit 1
fi
echo "$summary, of 64 MiB together"
if (($(git ls-files -z -- "${unread[@]}" | size) > 0)); then
    echo "Before it travels: git sparse-checkout set --no-cone '/*'$(printf " '!/%s'" "${unread[@]}")"
    echo "and afterwards:    git sparse-checkout disable"
fi

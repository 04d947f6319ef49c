# shellcheck shell=bash disable=SC2034 # sourced
# The packages that are compiled together: what they depend on is then built once, with the features that any of them asks for.
with_unit_tests=(--workspace --exclude pretend-cuda --exclude bindings --exclude published)
crates=("${with_unit_tests[@]}" --exclude unit-tests)

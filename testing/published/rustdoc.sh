#!/bin/sh
# rustdoc, with what is not stable.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fuzzes each parser that meets strangers' bytes, one after the other. Usage: server/fuzz/run.sh [seconds each]
# Needs cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler; a stable toolchain is enough.
set -eu
cd "$(dirname "$0")/.."
export RUSTC_BOOTSTRAP=1 # for the sanitizer
cp -n ../Cargo.lock fuzz/Cargo.lock 2>/dev/null || true
cargo fuzz build
for target in json base64 image form; do
  seeds=fuzz/seeds/$target
  [ -d "$seeds" ] || seeds=../code/tests/fixtures/references
  mkdir -p fuzz/corpus/$target
  cargo fuzz run $target fuzz/corpus/$target "$seeds" -- \
    -max_total_time="${1:-600}" -rss_limit_mb=4096 -timeout=25 -print_final_stats=1
done

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Load and abuse in full: 10,000 mixed requests over 64 connections, against the release build. What is sent and checked:
# server/tests/it/load.rs; a shorter form of it runs with the tests. Usage: tests/load/run.sh [requests]
set -eu
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=$PWD/target
cargo build --release --locked --workspace
FLUX2_LOAD_BINARY=$PWD/target/release/flux2-server FLUX2_LOAD_REQUESTS=${1:-10000} \
  cargo test --workspace --locked --test it load_and_abuse -- --nocapture

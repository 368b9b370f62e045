#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The server's own time, measured on the release build with the small checkpoint; see server_overhead.py. Run on an idle
# machine. Usage: benches/server_overhead.sh [requests]
set -eu
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=$PWD/target
cargo build --release --locked --workspace
log=$(mktemp)
target/release/flux2-server serve --port 20321 --checkpoint examples/klein-mini/checkpoint --log off > "$log" &
server=$!
trap 'kill $server; wait; rm "$log"' EXIT
until grep -q ready "$log"; do kill -0 $server; sleep 0.2; done
uptime
python3 benches/server_overhead.py http://127.0.0.1:20321 "${1:-200}"
uptime

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ours beside PyTorch and diffusers, run in turn on this machine: see compare.py, whose flags it takes.
#
#   benches/compare.sh --part linears              kernels only: no checkpoint, some minutes
#   benches/compare.sh --checkpoint /data/full     everything; makes the checkpoint (16 GB) if it is not there
#
# Sets up what it needs under target/ (6 GB), or uses the Python that PYTHON names. Run on an idle machine.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
python=$(code/tests/scripts/diffusers_python.sh)
checkpoint=target/full-size stages=yes previous=
for word in "$@"; do
    case $previous in
        --checkpoint) checkpoint=$word ;;
        --part) [[ ,$word, == *,stages,* ]] || stages=no ;;
    esac
    previous=$word
done
if [ $stages = yes ]; then
    if [ ! -f "$checkpoint/model_index.json" ]; then
        "$python" benches/make_full_checkpoint.py "$checkpoint" code/tests/fixtures/tiny/tokenizer
    fi
    cargo build --release --locked --package server
fi
shapes=$(cargo bench --locked --package flux2 --bench shapes --no-run --message-format=json |
    "$python" -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == "shapes":
        print(message["executable"])')
exec "$python" benches/compare.py --shapes "$shapes" --binary "$CARGO_TARGET_DIR/release/flux2-server" "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the published shapes of FLUX.2 [klein] 4B with random weights: seconds by stage and the peak of anonymous memory.
#
# usage: full_size.sh [CHECKPOINT_DIR] [-- generate's flags]
#   benches/full_size.sh                                  512×512 and 1024×1024, bf16
#   benches/full_size.sh /data/klein -- --image cat.png   another checkpoint, with a reference
#
# Makes CHECKPOINT_DIR (16 GB, default target/full-size) if it is not there, with torch and diffusers: name a Python that
# has them with PYTHON=..., or one is set up.
set -euo pipefail
cd "$(dirname "$0")/.."
checkpoint=target/full-size
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    checkpoint=$1
    shift
fi
[ "${1:-}" != -- ] || shift

if [ ! -f "$checkpoint/model_index.json" ]; then
    python=$(code/tests/scripts/diffusers_python.sh)
    "$python" benches/make_full_checkpoint.py "$checkpoint" code/tests/fixtures/tiny/tokenizer
fi
cargo build --release --locked --workspace
mkdir -p out

# kib NAME PID: a line of /proc/PID/status, or nothing if the process is gone.
kib() { awk -v name="$1:" '$1 == name { print $2 }' "/proc/$2/status" 2>/dev/null || true; }

grep -m1 'model name' /proc/cpuinfo
printf '%s cores, %s of memory, %s\n' "$(nproc)" "$(awk '/MemTotal/ { printf "%.1f GiB", $2 / 1048576 }' /proc/meminfo)" \
    "$(git describe --always --dirty)"
for side in 512 1024; do
    printf '\n== %s×%s %s\n' "$side" "$side" "$*"
    target/release/flux2-server generate "A red fox standing in fresh snow at dawn, wildlife photography" \
        --width "$side" --height "$side" --checkpoint "$checkpoint" --out "out/full-size-$side.png" "$@" &
    pid=$! anonymous=0 swapped=0
    while kill -0 "$pid" 2>/dev/null; do
        now=$(kib RssAnon "$pid")
        swap=$(kib VmSwap "$pid")
        [ "${now:-0}" -le "$anonymous" ] || anonymous=$now
        [ "${swap:-0}" -le "$swapped" ] || swapped=$swap
        sleep 0.2
    done
    wait "$pid"
    awk -v anonymous="$anonymous" -v swapped="$swapped" \
        'BEGIN { printf "peak of RssAnon %.2f GiB, of VmSwap %.2f GiB\n", anonymous / 1048576, swapped / 1048576 }'
done

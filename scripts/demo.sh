#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the server in release mode and makes pictures with the small trained checkpoint of examples/klein-mini.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/needs.sh
need cc:gcc,libc6-dev
need_rust

say "building flux2-server (release mode; two cores take some minutes the first time)"
CARGO_TARGET_DIR=$PWD/target cargo build --release --locked --package server </dev/null
flux2=target/release/flux2-server
checkpoint=examples/klein-mini/checkpoint
mkdir -p out

# picture NAME PROMPT FLAG...: one picture to out/NAME.png. The command is shown as it can be typed.
picture() {
    local name=$1
    shift
    say
    say "$ $flux2 generate \"$1\" ${*:2} --checkpoint $checkpoint --out out/$name.png"
    "$flux2" generate "$@" --checkpoint "$checkpoint" --out "out/$name.png"
}

picture red-circle "a red circle on a blue background" --width 512 --height 512 --seed 1
picture yellow-triangle "a large yellow triangle on a black background" --width 512 --height 512 --seed 1
picture cyan-ring "a large cyan ring on a black background" --width 512 --height 512 --seed 1 --dtype f32
picture red-square-right "a red square on the right on a yellow background" --width 512 --height 512 --seed 1
picture edit "make the circle green" --image out/red-circle.png --width 512 --height 512 --seed 2

say
say "Pictures:"
ls -1 "$PWD"/out/{red-circle,yellow-triangle,cyan-ring,red-square-right,edit}.png
cat >&2 <<END

The checkpoint is 11 MB and draws flat shapes; of a reference it keeps little
(examples/klein-mini/checkpoint/README.md says what it can and cannot).
Next:
  $flux2 generate "a green square on a white background" --checkpoint $checkpoint --width 512 --height 512
  $flux2 generate --help                         all flags
  $flux2 plan --width 1024 --height 1024         what FLUX.2 [klein] 4B would compute for a picture
  $flux2 check --checkpoint DIR                  whether a checkpoint of yours is complete
  make test                                      the proof that the pictures are right
END

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the server in release mode and makes pictures with a small checkpoint: the trained one of examples/klein-mini, or
# with MODEL=dev the random one of FLUX.2 [dev] that the tests use.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/needs.sh
model=${MODEL:-klein}
case $model in
klein) checkpoint=examples/klein-mini/checkpoint ;;
dev) checkpoint=code/tests/fixtures/dev/tiny ;;
*) say "error: MODEL is $model; next: MODEL=klein or MODEL=dev"; exit 2 ;;
esac
need cc:gcc,libc6-dev
need_rust

say "building flux2-server (release mode; two cores take some minutes the first time)"
CARGO_TARGET_DIR=$PWD/target cargo build --release --locked --package server </dev/null
flux2=target/release/flux2-server
mkdir -p out

# picture NAME PROMPT FLAG...: one picture to out/NAME.png. The command is shown as it can be typed.
picture() {
    local name=$1
    shift
    say
    say "$ $flux2 generate \"$1\" ${*:2} --checkpoint $checkpoint --out out/$name.png"
    "$flux2" generate "$@" --checkpoint "$checkpoint" --out "out/$name.png"
}

if [ "$model" = dev ]; then
    picture dev "a lighthouse in a thunderstorm" --width 512 --height 512 --seed 3
    picture dev-guided "a lighthouse in a thunderstorm" --width 512 --height 512 --seed 3 --steps 8 --guidance 2.5
    picture dev-edit "make it night" --image out/dev.png --width 768 --height 512 --seed 3 --steps 8
    say
    say "Pictures:"
    ls -1 "$PWD"/out/{dev,dev-guided,dev-edit}.png
    cat >&2 <<END

The checkpoint's weights are random: these pictures are coloured noise. What they show is that FLUX.2 [dev] runs, with its
steps, guidance and references, by the code that runs klein. The published weights are gated and 103 GB.
Next:
  $flux2 generate --help                                all flags
  $flux2 plan --model dev --prompt-tokens 45            what FLUX.2 [dev] would compute for a picture
  $flux2 serve --checkpoint $checkpoint --any-size      the same over HTTP, with a page to try it
  packager plan --manifest examples/flux2-dev-qb2/manifest.yaml    its package
END
    exit
fi
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

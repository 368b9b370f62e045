#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The packager's whole job with the small example, on a machine with nothing but Rust and apt: package
# it from its manifest, prove the package, serve it as a consumer would, ask for a picture, stop it.
#
#   scripts/demo-package.sh           build/klein-mini and out/package-red-circle.png
#
# An engine that answers is used and left as it is; otherwise a private one is started (scripts/engine.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

say "== engine and base images"
DOCKER_HOST=$(scripts/engine.sh start)
export DOCKER_HOST
bases=()
ca=()
if ! docker pull -q debian:bookworm-slim >/dev/null 2>&1 || ! docker pull -q rust:1.95-bookworm >/dev/null 2>&1; then
    say "no image registry can be reached: the base images are made from Debian's packages and this host's Rust"
    scripts/base-image.sh runtime
    scripts/base-image.sh builder
    bases=(--base-image BASE_IMAGE=flux2-base:bookworm --base-image BUILDER_IMAGE=flux2-builder:bookworm)
    # The network of such a place often has certificates of its own; they reach the builder stage only.
    bundle=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
    [ ! -f "$bundle" ] || ca=(--build-ca "$bundle")
fi

manifest=examples/klein-mini/manifest.yaml
revision=$(sed -n 's/^  revision: //p' $manifest)
cargo build --quiet --locked --package packager </dev/null
packager=target/debug/packager

# The weights as a consumer has them after a pull: a snapshot in a Hugging Face cache.
export HF_HOME=$PWD/out/hf
snapshot=$HF_HOME/hub/models--flux2-tt--klein-mini/snapshots/$revision
mkdir -p "$snapshot"
cp -R examples/klein-mini/checkpoint/. "$snapshot/"

say "== package"
# What cannot be pinned in such a place is allowed and stands on the card.
$packager pin --manifest $manifest "${bases[@]}"
$packager build --manifest $manifest --allow-unpinned "${bases[@]}" "${ca[@]}" ${PROFILE:+--build-arg PROFILE=$PROFILE}
say "== verify"
$packager verify build/klein-mini

say "== serve"
trap '$packager stop build/klein-mini >&2 || true' EXIT
endpoint=$($packager serve build/klein-mini --device cpu)
say "== a picture from $endpoint"
mkdir -p out
curl -fsS "$endpoint/predict" -H 'Content-Type: application/json' \
    -d '{"prompt":"a red circle on a blue background","width":512,"height":512,"seed":1}' >out/package-answer.json
sed -n 's/.*"image":"\([^"]*\)".*/\1/p' out/package-answer.json | base64 -d >out/package-red-circle.png
[ "$(head -c 4 out/package-red-circle.png | tail -c 3)" = PNG ] || { say "error: the answer holds no PNG: $(head -c 200 out/package-answer.json)"; exit 1; }
trap - EXIT
say "== stop"
$packager stop build/klein-mini >&2
echo "$PWD/out/package-red-circle.png"

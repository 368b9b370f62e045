#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The packager's whole job with a small example, on a machine with nothing but Rust and apt: package
# it from its manifest, prove the package, serve it as a consumer would, ask for a picture, stop it.
#
#   scripts/demo-package.sh [DIR]     DIR/klein-mini (DIR: build) and out/package-red-circle.png
#
# MODEL=dev takes examples/dev-tiny, whose weights are random: DIR/dev-tiny and out/package-dev.png.
# PROFILE=dev compiles the server in the image faster and larger than the published profile, dist;
# PACKAGER=FILE is a packager that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/needs.sh
out=${1:-build}
case ${MODEL:-klein} in
klein)
    name=klein-mini checkpoint=examples/klein-mini/checkpoint picture=out/package-red-circle.png
    prompt="a red circle on a blue background" seed=1 drew="The package, and the picture that its container drew:"
    ;;
dev)
    name=dev-tiny checkpoint=code/tests/fixtures/dev/tiny picture=out/package-dev.png
    prompt="a lighthouse in a thunderstorm" seed=3
    drew="The package, and the picture that its container drew; the weights are random, so it is noise:"
    ;;
*) say "error: MODEL is $MODEL; next: MODEL=klein or MODEL=dev"; exit 2 ;;
esac
private=${FLUX2_ENGINE_DIR:-/var/tmp/flux2-engine}
cat >&2 <<END
This makes a container package of examples/$name, proves it, serves it and asks it for a picture.
It compiles the packager here and the server in the image: some ten minutes on two cores, the first time.
  A Docker engine that answers is used, and left as it was but for its build cache. If none answers:
    docker.io (and curl) are installed with apt-get, a private engine is started under $private
    and stopped at the end.
  If no image registry can be reached: debootstrap is installed with apt-get, and the two base images
    are made from Debian's packages and this host's Rust (1 GB in the engine).
END

was_running=
kill -0 "$(cat "$private/dockerd.pid" 2>/dev/null)" 2>/dev/null && was_running=1
say "== engine"
DOCKER_HOST=$(scripts/engine.sh start)
export DOCKER_HOST
command -v docker >/dev/null || { say "error: the docker command is missing; next: apt-get install docker.io"; exit 4; }
before=$(docker images -q --no-trunc)

served=
finish() {
    [ -z "$served" ] || "$packager" stop "$out/$name" >&2 || true
    if [ "$DOCKER_HOST" != "unix://$private/docker.sock" ]; then
        # Somebody's own engine: our images go; those that were there before stay.
        for image in $(docker images --format '{{.Repository}}:{{.Tag}}' "tt-model/$name") "${bases[@]}"; do
            grep -qF "$(docker image inspect -f '{{.Id}}' "$image" 2>/dev/null || echo none)" <<<"$before" || docker rmi "$image" >/dev/null 2>&1 || true
        done
    elif [ -z "$was_running" ]; then
        scripts/engine.sh stop
        say "its images stay for the next run; to delete them: scripts/engine.sh purge"
    fi
}
bases=()
trap finish EXIT

say "== base images"
flags=()
there() { docker image inspect "$1" >/dev/null 2>&1 || docker pull -q "$1" >/dev/null 2>&1; }
if there debian:bookworm-slim && there rust:1.95-bookworm; then
    bases=(debian:bookworm-slim rust:1.95-bookworm)
else
    say "no image registry can be reached"
    scripts/base-image.sh runtime
    scripts/base-image.sh builder
    bases=(flux2-base:bookworm flux2-builder:bookworm)
    flags=(--base-image "BASE_IMAGE=${bases[0]}" --base-image "BUILDER_IMAGE=${bases[1]}")
fi
# A network may have certificates of its own; they reach the stage that compiles, and no further.
ca=()
bundle=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
[ ! -f "$bundle" ] || ca=(--build-ca "$bundle")

packager=${PACKAGER:-target/debug/packager}
if [ -z "${PACKAGER:-}" ]; then
    say "== packager"
    need cc:gcc,libc6-dev
    need_rust
    CARGO_TARGET_DIR=$PWD/target cargo build --locked --package packager </dev/null
fi

# The weights as a consumer has them after a pull: a snapshot in a Hugging Face cache.
manifest=examples/$name/manifest.yaml
revision=$(sed -n 's/^  revision: //p' $manifest)
export HF_HOME=$PWD/out/hf
unset HF_HUB_CACHE
snapshot=$HF_HOME/hub/models--flux2-tt--$name/snapshots/$revision
mkdir -p "$snapshot"
cp -R "$checkpoint/." "$snapshot/"

say "== package"
# The wheel of tt-metal is not fetched for an image that runs without a card: that stands on the card.
$packager pin --manifest $manifest "${flags[@]}" >&2
$packager build --manifest $manifest --out "$out" --allow-unpinned "${flags[@]}" "${ca[@]}" ${PROFILE:+--build-arg PROFILE=$PROFILE} >&2
say "== verify"
$packager verify "$out/$name" >&2

say "== serve"
served=1
endpoint=$($packager serve "$out/$name" --device cpu)
say "== a picture from $endpoint"
answer=$(curl -fsS "$endpoint/predict" -H 'Content-Type: application/json' \
    -d '{"prompt":"'"$prompt"'","width":512,"height":512,"seed":'$seed'}')
sed -n 's/.*"image":"\([^"]*\)".*/\1/p' <<<"$answer" | base64 -d >$picture.part
[ "$(head -c 4 $picture.part | tail -c 3)" = PNG ] || { say "error: the answer holds no PNG: ${answer:0:200}"; exit 1; }
mv $picture.part $picture
say "== stop"
$packager stop "$out/$name" >&2
served=
say
say "$drew"
realpath "$out/$name" $picture

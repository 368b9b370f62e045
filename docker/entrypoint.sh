#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts what the container was asked to run, as process 1, so that it gets the signals of `docker stop`.
set -eu

export HOME="${HOME:-/home/tt}" USER="${USER:-tt}" LOGNAME="${LOGNAME:-tt}"
# tt-metal writes logs at every device open; with a read-only root only /tmp may be left.
logs="$HOME/work/logs"
[ -w "$logs" ] || logs=/tmp
export TT_METAL_LOGS_PATH="${TT_METAL_LOGS_PATH:-$logs}"

# On a read-only root, a cache directory of the image that nobody mounted is none. One that was mounted
# and cannot be written stays a fault, which the server names.
unusable() { [ ! -w "$1" ] && ! grep -q " $1 " /proc/mounts; }
if [ "${TT_DIT_CACHE_DIR:-}" = /weight-cache ] && unusable /weight-cache; then unset TT_DIT_CACHE_DIR; fi
if [ "${TT_METAL_CACHE:-}" = /cache ] && unusable /cache; then export TT_METAL_CACHE=/tmp/tt-metal-cache; fi

if [ "${1:-}" = explain ]; then
    cat >&2 <<'TEXT'
This image serves FLUX.2 [klein] or [dev] over HTTP. The weights are not in it: mount a Hugging Face cache.

  on the host's processor:
    docker run --rm -p 20000:20000 -v ~/.cache/huggingface:/hf IMAGE \
        flux2-server serve --host 0.0.0.0 --port 20000

  on a Tenstorrent card, with the published package:
    tt-model serve ORGANISATION/NAME

  flux2-server --help says what else it can do.
TEXT
    [ -e /dev/tenstorrent ] || echo "No /dev/tenstorrent in this container: no card was passed to it." >&2
    exit 1
fi

# Tools that know only Python servers start `python -m uvicorn --host H --port P … app`.
if [ "${1:-}" = python ] && [ "${2:-}" = -m ] && [ "${3:-}" = uvicorn ]; then
    shift 3
    host=0.0.0.0
    port=20000
    while [ $# -gt 0 ]; do
        case $1 in
        --host) host=$2; shift ;;
        --port) port=$2; shift ;;
        esac
        shift
    done
    set -- flux2-server serve --host "$host" --port "$port"
fi

exec "$@"

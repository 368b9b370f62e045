#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Gives the tests and the demo a Docker engine: prints the DOCKER_HOST to use.
#
#   scripts/engine.sh start   use the engine that answers, else start a private one
#   scripts/engine.sh stop    stop the private one (never another)
#   scripts/engine.sh purge   stop it and delete its images
#
# A running engine of yours is used and left as it is. The private engine keeps everything it has
# under FLUX2_ENGINE_DIR (default /var/tmp/flux2-engine): socket, data, pid, log.
set -eu

dir=${FLUX2_ENGINE_DIR:-/var/tmp/flux2-engine}
socket="$dir/docker.sock"
say() { printf '%s\n' "$*" >&2; }
answers() { curl -fsS -m 5 --unix-socket "$1" http://localhost/_ping >/dev/null 2>&1; }

running() { # the private dockerd, and not another process that got its number
    [ -s "$dir/dockerd.pid" ] || return 1
    tr '\0' ' ' <"/proc/$(cat "$dir/dockerd.pid")/cmdline" 2>/dev/null | grep -q "dockerd.*$dir"
}

install() {
    command -v dockerd >/dev/null && command -v curl >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
        say "error: no Docker engine answers, and dockerd is not installed"
        say "next:  install Docker (Debian or Ubuntu: apt-get install docker.io) and start it, or run this as root"
        exit 4
    }
    say "installing docker.io and curl with apt-get (a private engine is started from it, no service)"
    # A package must not start a service of its own on this host: that is the owner's decision.
    policy=/usr/sbin/policy-rc.d
    made=
    if [ ! -e $policy ]; then printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; made=1; fi
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends docker.io curl >&2 || failed=1
    [ -z "$made" ] || rm -f $policy
    [ -z "${failed:-}" ] || exit 1
}

start() {
    case ${DOCKER_HOST:-} in
    unix://*) if answers "${DOCKER_HOST#unix://}"; then say "using the engine at $DOCKER_HOST"; echo "$DOCKER_HOST"; return; fi ;;
    ?*) say "using the engine at $DOCKER_HOST"; echo "$DOCKER_HOST"; return ;;
    esac
    for s in /var/run/docker.sock "${XDG_RUNTIME_DIR:-/nonexistent}/docker.sock" "$socket"; do
        if [ -S "$s" ] && answers "$s"; then say "using the engine at unix://$s"; echo "unix://$s"; return; fi
    done
    install
    mkdir -p "$dir"
    mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null || true
    # Without netfilter there is no bridge to be had: containers then use the host's network.
    net=
    iptables -t nat -L -n >/dev/null 2>&1 || { net="--iptables=false --ip6tables=false --bridge=none"; say "iptables does not work here: containers get the host's network only"; }
    say "starting a private engine under $dir"
    # shellcheck disable=SC2086
    nohup dockerd $net --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/dockerd.pid" \
        -H "unix://$socket" >"$dir/dockerd.log" 2>&1 </dev/null &
    i=0
    until answers "$socket"; do
        i=$((i + 1))
        if [ $i -gt 60 ]; then say "error: the engine did not answer within 60 s; its last lines:"; tail -n 8 "$dir/dockerd.log" >&2; exit 4; fi
        sleep 1
    done
    echo "unix://$socket"
}

stop() {
    if running; then
        pid=$(cat "$dir/dockerd.pid")
        kill "$pid"
        i=0
        while kill -0 "$pid" 2>/dev/null && [ $i -lt 60 ]; do i=$((i + 1)); sleep 1; done
        say "stopped the private engine under $dir"
    else
        say "no private engine under $dir"
    fi
}

case ${1:-} in
start) start ;;
stop) stop ;;
purge) stop; rm -rf "$dir" ;;
*) sed -n '3,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

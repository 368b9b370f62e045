#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the two base images of the Dockerfile from Debian's own packages and this host's Rust
# toolchain, for places where no image registry can be reached.
#
#   scripts/base-image.sh runtime   flux2-base:bookworm     what debian:bookworm-slim is
#   scripts/base-image.sh builder   flux2-builder:bookworm  what rust:1.95-bookworm is
#
# Needs root, debootstrap and a Docker engine (see engine.sh). An image that exists is kept.
set -eu

kind=${1:-}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
say() { printf '%s\n' "$*" >&2; }
case $kind in
runtime) name=flux2-base:bookworm; include=ca-certificates ;;
builder) name=flux2-builder:bookworm; include=ca-certificates,gcc,libc6-dev ;;
*) sed -n '3,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
if docker image inspect "$name" >/dev/null 2>&1; then say "$name exists"; exit 0; fi
command -v debootstrap >/dev/null || {
    [ "$(id -u)" = 0 ] || { say "error: debootstrap is not installed; next: apt-get install debootstrap"; exit 1; }
    say "installing debootstrap with apt-get"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends debootstrap >&2
}

work=$(mktemp -d /var/tmp/flux2-base.XXXXXX)
trap 'rm -rf "$work"' EXIT INT TERM
root="$work/root"
say "making $name from $mirror"
debootstrap --variant=minbase --include="$include" bookworm "$root" "$mirror" >"$work/log" 2>&1 || {
    say "error: debootstrap failed; its last lines:"; tail -n 8 "$work/log" >&2; exit 1
}
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*
find "$root/usr/share/doc" -mindepth 2 -type f ! -name copyright -delete
rm -rf "$root"/usr/share/man/* "$root"/usr/share/locale/* "$root"/usr/share/info/*
set -- --change 'CMD ["/bin/sh"]'
if [ "$kind" = builder ]; then
    toolchain=$(rustc --print sysroot)
    mkdir -p "$root/usr/local/rust" "$root/usr/local/cargo"
    cp -a "$toolchain/bin" "$toolchain/lib" "$root/usr/local/rust/"
    set -- "$@" --change 'ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_HOME=/usr/local/cargo'
fi
tar --numeric-owner -C "$root" -c . | docker import "$@" - "$name" >&2

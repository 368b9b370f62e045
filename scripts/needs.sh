# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the other scripts: says what is missing, and installs it on Debian or Ubuntu as root.

say() { printf '%s\n' "$*" >&2; }

# need COMMAND:PACKAGE[,PACKAGE]...: the commands exist after this, or the script ends with a sentence.
need() {
    local pair packages missing=()
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null && continue
        IFS=, read -ra packages <<<"${pair#*:}"
        missing+=("${packages[@]}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "error: these are missing: ${missing[*]} (names of Debian packages); install them and try again"
        exit 1
    fi
    say "installing ${missing[*]}"
    apt-get update -qq >&2 </dev/null || say "warning: apt-get update failed, trying with the lists there are"
    # A package must not start a service of its own on this host: that is the owner's decision.
    local policy=/usr/sbin/policy-rc.d made='' status=0
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        made=1
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null || status=$?
    [ -z "$made" ] || rm -f $policy
    return $status
}

# want COMMAND:PACKAGE...: like need, but false where they cannot be had.
want() { (need "$@"); }

# need_rust: cargo of the version in rust-toolchain.toml, or a newer one that is there.
need_rust() {
    if ! command -v cargo >/dev/null && [ -x "$HOME/.cargo/bin/cargo" ]; then
        PATH="$HOME/.cargo/bin:$PATH"
    fi
    cargo --version >/dev/null 2>&1 && return
    if cargo +stable --version >/dev/null 2>&1; then
        export RUSTUP_TOOLCHAIN=stable
        say "using the installed stable toolchain: $(rustc --version)"
        return
    fi
    say "error: no Rust toolchain; install $(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml) or newer from https://rustup.rs"
    exit 1
}

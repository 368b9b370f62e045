#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A reader who has only code/ can build it: checks a copy of it outside the workspace.
set -euo pipefail
cd "$(dirname "$0")/.."
alone=$(mktemp -d)
trap 'rm -rf "$alone"' EXIT
git ls-files -z code/Cargo.toml code/src code/benches | xargs -0 cp --parents -t "$alone"
cp Cargo.lock "$alone/code/" # the versions that the workspace was tested with
cd "$alone/code"
RUSTFLAGS="-D warnings" CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$OLDPWD/target}/code-alone cargo check --quiet

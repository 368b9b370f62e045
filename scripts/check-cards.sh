#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lints model cards with markdownlint-cli2 from npm; installs it into target/markdownlint if it is missing.
# All of its rules hold but the one on long lines: a paragraph of a card is one line.
#
#   scripts/check-cards.sh FILE...
set -euo pipefail
tools=$(cd "$(dirname "$0")/.." && pwd)/target/markdownlint
. "$(dirname "$0")/needs.sh"
need node:nodejs npm:npm
lint=$tools/node_modules/.bin/markdownlint-cli2
if [ ! -x "$lint" ]; then
    say "installing markdownlint-cli2 from npm into $tools"
    mkdir -p "$tools"
    npm install --silent --no-fund --no-audit --prefix "$tools" markdownlint-cli2@0.24.1 >&2
    echo '{"MD013": false}' >"$tools/cards.markdownlint.json"
fi
"$lint" --config "$tools/cards.markdownlint.json" "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The workflows in examples/ci: held against the schemas of GitHub and GitLab, then their commands run here, word for
# word, on a small package with a real engine and a real registry that wants a password.
#
#   scripts/check-ci-examples.sh        PACKAGER=FILE is a packager that is built already
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/needs.sh
need curl:curl node:nodejs npm:npm
python3 -c 'import ensurepip' 2>/dev/null || need ensurepip:python3-venv
scripts/registry.sh
tools=$PWD/target/ci-tools
if [ ! -x "$tools/bin/check-jsonschema" ]; then
    say "installing check-jsonschema from PyPI into $tools"
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check check-jsonschema==0.39.0 >&2
fi
if [ ! -x "$tools/node_modules/.bin/action-validator" ]; then
    say "installing action-validator from npm into $tools"
    npm install --silent --no-fund --no-audit --prefix "$tools" @action-validator/core@0.6.0 @action-validator/cli@0.6.0 >&2
fi
"$tools/bin/check-jsonschema" --builtin-schema vendor.github-workflows examples/ci/github-actions.yml
"$tools/bin/check-jsonschema" --builtin-schema vendor.gitlab-ci --data-transform gitlab-ci examples/ci/gitlab-ci.yml
"$tools/node_modules/.bin/action-validator" examples/ci/github-actions.yml

packager=${PACKAGER:-target/debug/packager}
[ -n "${PACKAGER:-}" ] || CARGO_TARGET_DIR=$PWD/target cargo build --locked --quiet --package packager </dev/null
DOCKER_HOST=$(scripts/engine.sh start)
export DOCKER_HOST
scripts/base-image.sh runtime
"$tools/bin/python" scripts/run_ci_examples.py "$packager"

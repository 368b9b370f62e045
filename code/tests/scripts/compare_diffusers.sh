#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the server, then runs compare_diffusers.py with the arguments given.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=$(code/tests/scripts/diffusers_python.sh)
cargo build --release --locked --workspace
exec "$python" code/tests/scripts/compare_diffusers.py "$@"

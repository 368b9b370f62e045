#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares `flux2-server generate --dtype f32` with diffusers, byte by byte, on a checkpoint with other random weights.
#
# usage: compare_diffusers.sh [compare_diffusers.py's arguments]
# Sets up torch and diffusers in target/venv-diffusers (6 GB, some minutes) unless PYTHON names a Python that has them.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=target/venv-diffusers/bin/python
    if ! "$PYTHON" -c 'import diffusers, transformers, torch' 2>/dev/null; then
        python3 -m venv target/venv-diffusers
        "$PYTHON" -m pip install --quiet torch diffusers==0.37.1 transformers==5.3.0 accelerate numpy pillow
    fi
fi
cargo build --release --locked --package server
exec "$PYTHON" code/tests/scripts/compare_diffusers.py "$@"

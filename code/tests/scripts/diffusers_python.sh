#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python that has torch and diffusers: $PYTHON, or one that is set up in target/venv-diffusers
# (6 GB, some minutes). With --installed only if there is one already.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${PYTHON:-$PWD/target/venv-diffusers/bin/python}
if ! "$python" -c 'import accelerate, diffusers, numpy, torch, transformers' 2>/dev/null; then
    [ "${1:-}" != --installed ] || exit 1
    if [ -n "${PYTHON:-}" ]; then
        echo "error: $PYTHON has no torch, diffusers, transformers, accelerate or numpy; install them or unset PYTHON" >&2
        exit 1
    fi
    echo "setting up $python" >&2
    python3 -m venv target/venv-diffusers
    "$python" -m pip install --quiet torch diffusers==0.37.1 transformers==5.3.0 accelerate numpy pillow >&2
fi
echo "$python"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A release wheel for manylinux_2_28 and every Python from 3.10 on, in target/wheels: linked by zig against that glibc, and
# checked by auditwheel.
#
#   python/build-wheel.sh [PYTHON]     by default python3
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/target/wheel-tools
"${1:-python3}" -m venv "$tools"
"$tools/bin/pip" install -q 'maturin[zig]>=1.9,<2' auditwheel
PATH=$tools/bin:$PATH maturin build --locked --release --zig --compatibility manylinux_2_28 -m python/Cargo.toml -o target/wheels
"$tools/bin/auditwheel" show "$(ls -t target/wheels/*.whl | head -n 1)"

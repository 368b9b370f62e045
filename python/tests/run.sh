#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Python package in clean virtual environments below target/python: built and installed by pip from source with the oldest
# Python, where all tests, mypy and the notebook run; the wheel of that build, and a short test, with every other one.
#
#   python/tests/run.sh [PYTHON...]     by default python3.10 to python3.13, those of them that are here
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/needs.sh
root=$PWD work=$PWD/target/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# What the workspace has compiled is compiled already; PROFILE=release is what a user's `pip install` takes.
export CARGO_TARGET_DIR=$root/target MATURIN_PEP517_ARGS="--profile ${PROFILE:-dev}"
export FLUX2_SERVER=${FLUX2_SERVER:-$root/target/debug/flux2-server}
mkdir -p "$work"

# Pythons on the path, then those of pyenv; one of each minor version.
pythons() {
    local minor found
    for minor in 10 11 12 13; do
        for found in "$(command -v python3.$minor || true)" "$HOME"/.pyenv/versions/3.$minor.*/bin/python python3; do
            [ "$("$found" -c 'import sys, ensurepip; print(sys.version_info[1])' 2>/dev/null)" = $minor ] || continue
            printf '%s\n' "$found"
            break
        done
    done
}
if [ $# -gt 0 ]; then list=("$@"); else mapfile -t list < <(pythons); fi
[ ${#list[@]} -gt 0 ] || { say "error: no Python 3.10 to 3.13 with the module venv is here; install python3 and python3-venv"; exit 1; }

# fresh NAME PYTHON: a new environment.
fresh() {
    rm -rf "${work:?}/$1"
    "$2" -m venv "$work/$1"
}

# The workspace's tests build both.
[ -x "$FLUX2_SERVER" ] && [ -x "${FLUX2_SERVER%/*}/examples/stand_in" ] || cargo build --locked --workspace --bins --examples
rm -rf "$work/wheels"
for index in "${!list[@]}"; do
    python=${list[$index]}
    version=$("$python" -c 'import platform; print(platform.python_version())')
    fresh "$version" "$python"
    bin=$work/$version/bin
    if [ "$index" = 0 ]; then
        say "== Python $version: pip install ./python, all tests"
        "$bin/pip" wheel -q --no-deps -w "$work/wheels" ./python
        ls "$work/wheels"
        "$bin/pip" install -q "$(ls "$work"/wheels/*.whl)[server]" -r python/tests/requirements.txt
        (
            cd python/tests
            "$bin/mypy" --strict --cache-dir "$work/mypy" -p tt_flux2_klein
            "$bin/mypy" --strict --cache-dir "$work/mypy" smoke.py
            "$bin/python" -m pytest -q -p no:cacheprovider .
        )
        # The notebook as a reader runs it; its pictures are PNG in the result.
        (
            cd examples/python
            KLEIN_SNAPSHOT=$root/examples/klein-mini/checkpoint "$bin/jupyter" nbconvert --to notebook --execute klein.ipynb \
                --output-dir "$work" --log-level WARN
        )
        "$bin/python" python/tests/check_notebook.py "$work/klein.ipynb"
    else
        say "== Python $version: the wheel, a short test"
        "$bin/pip" install -q "$work"/wheels/*.whl
        (cd python/tests && "$bin/python" -W error smoke.py)
    fi
done
say "the Python package works with ${#list[@]} of Python 3.10 to 3.13: ${list[*]}"

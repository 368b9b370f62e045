#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that has to hold before a change is merged. Runs all steps, ends with a line "N passed, N failed":
# the tests that cargo ran, plus one for each other step.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/needs.sh
need cc:gcc,libc6-dev git:git python3:python3 curl:curl
need_rust
want chromedriver:chromium,chromium-driver && browser=1
venv() { python3 -c 'import ensurepip' 2>/dev/null || want ensurepip:python3-venv; }
pypi() { python3 -m venv target/pip && target/pip/bin/pip download -q --no-deps -d target/pip/seen maturin >/dev/null 2>&1; }
venv && pypi && packages=1
want node:nodejs npm:npm && venv && clients=1
scripts/registry.sh || exit 1
export CARGO_TARGET_DIR=$PWD/target CARGO_TERM_COLOR=never RUST_BACKTRACE=1
mkdir -p target
log=target/test.log
passed=0 failed=0 broken=() skipped=()

# The engine that the packager's tests start goes with them; one that was there before stays.
engine=${FLUX2_ENGINE_DIR:-/var/tmp/flux2-engine}/dockerd.pid
kill -0 "$(cat "$engine" 2>/dev/null)" 2>/dev/null || trap 'scripts/engine.sh stop' EXIT

# step NAME COMMAND...: one test more.
step() {
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@" </dev/null; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        broken+=("$name")
    fi
    printf '== %s: %s s\n' "$name" $((SECONDS - start))
}

# skip NAME COMMAND: said, with the command that runs it elsewhere.
skip() { skipped+=("$1; to run it: $2"); }

# cargo_tests: all tests of the workspace, counted one by one.
cargo_tests() {
    local start=$SECONDS status
    printf '\n== tests\n'
    cargo test --workspace --locked --no-fail-fast </dev/null 2>&1 | tee "$log"
    status=$?
    passed=$((passed + $(count passed)))
    failed=$((failed + $(count failed)))
    # Something that did not compile, or crashed, leaves no line to count.
    if [ "$status" != 0 ] && [ "$(count failed)" = 0 ]; then failed=$((failed + 1)); fi
    [ "$status" = 0 ] || broken+=(tests)
    printf '== tests: %s s\n' $((SECONDS - start))
}

count() {
    grep -oE "^test result: .* $1;" "$log" | grep -oE "[0-9]+ $1" | awk '{ sum += $1 } END { print sum + 0 }'
}

step "format" cargo fmt --all --check
step "format of python/" cargo fmt --manifest-path python/Cargo.toml --check
step "lints" cargo clippy --workspace --all-targets --locked -- -D warnings
cargo_tests
RUSTDOCFLAGS="-D warnings" step "documentation" cargo doc --workspace --no-deps --locked --quiet
step "code/ alone" scripts/check-code-alone.sh
step "licences, bans, sources" scripts/deny.sh
step "THIRD-PARTY.md" scripts/third_party.py --check
# The one compile of the image; the demo then takes its layers.
step "our own image, and a consumer's life with it" cargo test --workspace --locked --test it ours -- --ignored
PROFILE=dev PACKAGER=target/debug/packager step "the demo of the package" scripts/demo-package.sh target/demo
PACKAGER=target/debug/packager step "the workflows for package authors" scripts/check-ci-examples.sh
if [ -n "${browser:-}" ]; then
    # The whole workspace, so that nothing is built again with other features.
    step "the page in a browser" cargo test --workspace --locked --test it page -- --ignored
else
    skip "the page in a browser" "cargo test -p server --test it page -- --ignored"
fi
if [ -n "${clients:-}" ]; then
    step "real clients" tests/clients/run.sh
else
    skip "real clients" tests/clients/run.sh
fi
if [ -n "${packages:-}" ]; then
    step "lints of python/" cargo clippy --manifest-path python/Cargo.toml --all-targets -- -D warnings
    step "Python package" python/tests/run.sh
else
    skip "Python package: python3 with venv, or PyPI, is missing" python/tests/run.sh
fi
if python=$(code/tests/scripts/diffusers_python.sh --installed); then
    step "pictures of other random weights against diffusers" "$python" code/tests/scripts/compare_diffusers.py \
        --binary target/debug/flux2-server --cases "64x64,512x512,512x768 1 ref,512x512 3 refs"
else
    skip "pictures of other random weights against diffusers" code/tests/scripts/compare_diffusers.sh
fi

# What takes longer than a change should wait for; short forms of both ran with the tests (load.rs, strangers.rs).
skip "10,000 requests of load and abuse" tests/load/run.sh
skip "5,000 cases of schemathesis" "tests/clients/run.sh 400"
skip "ten minutes of each fuzz target" server/fuzz/run.sh

[ ${#skipped[@]} = 0 ] || printf '\nnot run here: %s\n' "${skipped[@]}"
[ ${#broken[@]} = 0 ] || printf '\nfailed: %s\n' "${broken[*]}"
printf '\n%s passed, %s failed\n' "$passed" "$failed"
[ "$failed" = 0 ]

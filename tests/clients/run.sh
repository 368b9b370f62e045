#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Real clients against a real server: curl, the openai packages of PyPI and npm, schemathesis.
# Usage: tests/clients/run.sh [cases of schemathesis]. Needs python3 with venv, node with npm, curl; installs the packages
# below target/clients. FLUX2_SERVER is the server to ask; by default the one that the tests have built.
set -eu
cd "$(dirname "$0")/../.."
cases=${1:-20} here=$PWD work=$PWD/target/clients
mkdir -p "$work"
server=${FLUX2_SERVER:-$here/target/debug/flux2-server}
# As the tests are built: the same packages with the same features, so that nothing is built again.
[ -n "${FLUX2_SERVER:-}" ] || CARGO_TARGET_DIR=$here/target cargo test -q --workspace --locked --no-run
[ -x "$work/venv/bin/python" ] || python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'openai==3.57.0' 'schemathesis==4.32.5'
[ -d "$work/node_modules/openai" ] || npm install --silent --no-fund --no-audit --prefix "$work" openai

serve() { # port, then flags
  port=$1; shift
  "$server" serve --port "$port" --checkpoint code/tests/fixtures/tiny --small-sizes --warm-up 16 --threads 1 --dtype f32 \
    --log warn "$@" > "$work/$port.out" & servers="${servers:-} $!"
  for _ in $(seq 600); do grep -q ready "$work/$port.out" && return; sleep 0.1; done
  echo "the server on $port is not ready" >&2; exit 1
}
trap 'kill $servers 2>/dev/null; wait' EXIT
serve 20311
serve 20313 --max-side 64
echo tester:a-key-for-tests > "$work/keys"
serve 20312 --api-key-file "$work/keys"
open=http://127.0.0.1:20311 locked=http://127.0.0.1:20312 small=http://127.0.0.1:20313

cd "$work"
sh "$here/tests/clients/cards.sh" 20311
sh "$here/examples/clients/curl.sh" 127.0.0.1:20311 64 64
python3 "$here/examples/clients/predict.py" $open 64
venv/bin/python "$here/examples/clients/openai_client.py" $open 64
cp "$here"/examples/clients/openai_client.mjs "$here"/tests/clients/test_openai.mjs .
node openai_client.mjs $open 64
venv/bin/python "$here/tests/clients/test_openai.py" $open $locked
node test_openai.mjs $open $locked
venv/bin/schemathesis run $small/openapi.json --url $small --max-examples "$cases" --workers 2 --request-timeout 120 \
  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance
echo "all clients are served"

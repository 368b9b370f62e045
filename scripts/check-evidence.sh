#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Holds a package's evidence against public tools: spdx-tools and in-toto's attestation library from
# PyPI, skopeo from Debian. Installs them (into target/evidence-tools, or by apt as root) if missing.
#
#   scripts/check-evidence.sh build/<name>
#   scripts/check-evidence.sh --install     the tools only
set -eu
package=${1:?give a package directory, or --install}
root=$(cd "$(dirname "$0")/.." && pwd)
tools="$root/target/evidence-tools"
if [ ! -x "$tools/bin/pyspdxtools" ] || ! "$tools/bin/python" -c 'import in_toto_attestation' 2>/dev/null; then
    echo "installing spdx-tools and in-toto-attestation from PyPI into $tools" >&2
    rm -rf "$tools"
    python3 -c 'import ensurepip' 2>/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -qq -y python3-venv >&2
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet 'spdx-tools==0.8.3' 'in-toto-attestation==0.9.3' >&2
fi
if ! command -v skopeo >/dev/null; then
    echo "installing skopeo with apt-get" >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends skopeo >&2
fi
[ "$package" != --install ] || exit 0
"$tools/bin/pyspdxtools" --infile "$package/sbom.spdx.json" --version SPDX-2.3
"$tools/bin/python" - "$package/provenance.intoto.json" <<'PY'
import json, sys
from google.protobuf.json_format import ParseDict
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as Message
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
data = json.load(open(sys.argv[1]))
Statement.copy_from_pb(ParseDict(data, Message())).validate()
ParseDict(data["predicate"], Provenance())
assert data["predicateType"] == "https://slsa.dev/provenance/v1"
PY
[ "$(skopeo inspect --format '{{.Digest}}' "oci:$package/image:latest")" = "$(sed -n 's/.*"manifest_digest": "\(.*\)".*/\1/p' "$package/tt_kernel_manifest.json")" ]
(cd "$package" && sha256sum --quiet --check SHA256SUMS)
echo "the evidence of $package is accepted by spdx-tools, in-toto-attestation, skopeo and sha256sum"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the registry tests run against: Debian's docker-registry, and htpasswd. Starts nothing; the tests do.
set -euo pipefail
. "$(dirname "$0")/needs.sh"
need docker-registry:docker-registry htpasswd:apache2-utils

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Load and abuse in full: 10,000 mixed requests over 64 connections. What is sent and checked: server/tests/it/load.rs.
set -eu
cd "$(dirname "$0")/../.."
FLUX2_LOAD_REQUESTS=${1:-10000} cargo test -p server --test it load -- --nocapture

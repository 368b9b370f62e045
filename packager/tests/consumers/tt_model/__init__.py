# SPDX-License-Identifier: Apache-2.0
"""tt-model, acted out from the published format: see README.md beside this directory."""

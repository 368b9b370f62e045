# SPDX-License-Identifier: Apache-2.0
.PHONY: help demo test third-party

help: ## What there is
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 20

demo: ## Make pictures with the small checkpoint in examples/klein-mini; then package it, serve it in a container, ask for one (MODEL=dev: examples/dev-tiny)
	@scripts/demo.sh
	@scripts/demo-package.sh

test: ## Format, lints, all tests, documentation, licences
	@scripts/test.sh

third-party: ## Write THIRD-PARTY.md again after a change of Cargo.lock
	@scripts/third_party.py

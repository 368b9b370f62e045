// SPDX-License-Identifier: Apache-2.0
//! `packager`: from `manifest.yaml` to a container package.

use clap::Parser;

/// Turn a manifest and its model code into a container package that others can trust.
#[derive(Parser)]
#[command(version, about)]
struct Cli {}

fn main() {
    Cli::parse();
}

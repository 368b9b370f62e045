// SPDX-License-Identifier: Apache-2.0
//! `flux2-server`: FLUX.2 images over HTTP and from the command line.

use clap::Parser;

/// Serve FLUX.2, or make one picture from the command line.
#[derive(Parser)]
#[command(version, about)]
struct Cli {}

fn main() {
    Cli::parse();
}

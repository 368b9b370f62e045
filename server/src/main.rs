// SPDX-License-Identifier: Apache-2.0
//! `flux2-server`: FLUX.2 images over HTTP and from the command line.

mod cli;
mod commands;
mod failure;
mod interrupt;
mod output;
mod progress;
mod stdout;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            stdout::tell!("error: {failure}");
            ExitCode::from(failure.code())
        }
    }
}

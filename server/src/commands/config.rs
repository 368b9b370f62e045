// SPDX-License-Identifier: Apache-2.0
//! `config`: what `serve` would run with.

use clap::Args;
use server::{config, preflight};

use crate::{failure::Failure, stdout::print_line};

/// Print the effective settings of `serve` as JSON, without secrets
#[derive(Args)]
pub struct ShowConfig {
    #[command(flatten)]
    config: config::Config,
}

impl ShowConfig {
    /// Runs the command. Settings outside their range are a failure.
    pub fn run(&self) -> Result<(), Failure> {
        preflight::settings(&self.config)?;
        print_line!("{:#}", self.config.effective());
        Ok(())
    }
}

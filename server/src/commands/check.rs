// SPDX-License-Identifier: Apache-2.0
//! `check`: whether a checkpoint is complete, and everything that is wrong with it; or whether the program itself works here.

use clap::Args;
use flux2::device::{Precision, self_check::self_check};
use serde::Serialize;
use server::preflight;

use super::print_json;
use crate::{
    cli::CheckpointArgs,
    failure::Failure,
    stdout::{line, print_line},
};

/// Say whether a checkpoint is complete, and everything that is missing, without reading the weights
#[derive(Args)]
pub struct Check {
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// Check this installation instead, which needs no weights: kernels against plain ones, directories that are written to
    #[arg(long, conflicts_with_all = ["checkpoint", "text_encoder"])]
    installation: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    checkpoint: String,
    complete: bool,
    problems: Vec<String>,
}

#[derive(Serialize)]
struct Installation {
    version: &'static str,
    instructions: String,
    directories_writable: bool,
}

impl Check {
    /// Runs the command. An incomplete checkpoint or an installation that does not work is a failure.
    pub fn run(&self) -> Result<(), Failure> {
        if self.installation { self.installation() } else { self.checkpoint() }
    }

    fn installation(&self) -> Result<(), Failure> {
        preflight::directories().map_err(Failure::Start)?;
        let isa = self_check(Precision::F32)?;
        self_check(Precision::Bf16)?;
        let version = env!("CARGO_PKG_VERSION");
        if self.json {
            return print_json(&Installation {
                version,
                instructions: isa.to_string(),
                directories_writable: true,
            });
        }
        println!(
            "flux2-server {version}: kernels for {isa} compute what the portable ones do; directories can be written to"
        );
        Ok(())
    }

    fn checkpoint(&self) -> Result<(), Failure> {
        // A directory that is named is checked as it is, however little is in it.
        let checkpoint = match &self.checkpoint.checkpoint {
            Some(directory) => directory.clone(),
            None => self.checkpoint.find()?,
        };
        let problems = flux2::pipeline::check(&checkpoint, self.checkpoint.text_encoder().as_deref());
        let answer = Answer {
            checkpoint: checkpoint.display().to_string(),
            complete: problems.is_empty(),
            problems: problems.iter().map(ToString::to_string).collect(),
        };
        if self.json {
            print_json(&answer)?;
        } else if answer.complete {
            print_line!("{}: complete", answer.checkpoint);
        } else {
            answer.problems.iter().try_for_each(|problem| line(format_args!("{problem}")))?;
        }
        if answer.complete {
            return Ok(());
        }
        Err(Failure::Unusable(format!(
            "checkpoint {}: {} found; get what is missing or damaged again",
            answer.checkpoint,
            if problems.len() == 1 { "1 problem".to_owned() } else { format!("{} problems", problems.len()) }
        )))
    }
}

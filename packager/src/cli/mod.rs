// SPDX-License-Identifier: Apache-2.0
//! The command line: arguments, dispatch, and how failures are shown. Data goes to stdout, everything
//! else to stderr.

mod args;
mod author;
mod consume;
mod exchange;
pub mod json;
pub mod output;
mod produce;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

pub use args::Cli;
use args::Command;
use output::Output;

use crate::error::{Class, Failure, Result};

/// Parses, runs, reports; the exit code is that of the failure's class.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output::new(cli.json, cli.no_color);
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            return output
                .fail(&Failure::new(Class::Failure, "cannot start the async runtime").why(error), None);
        }
    };
    let manifest = cli.manifest.clone();
    match runtime.block_on(run(cli, output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output.fail(&failure, Some(&manifest)),
    }
}

async fn run(cli: Cli, output: Output) -> Result<()> {
    let manifest = cli.manifest.as_path();
    match cli.command {
        Command::Init(answers) => author::init(manifest, answers, output),
        Command::Check => author::check(manifest, output),
        Command::Schema => {
            author::schema();
            Ok(())
        }
        Command::Pin(options) => author::pin(manifest, options, output).await,
        Command::Plan(args) => produce::plan(manifest, args, output).await,
        Command::Build(args) => produce::build(manifest, args, output).await,
        Command::Card { package } => produce::card(&package, output),
        Command::Verify { package } => produce::verify(&package, output),
        Command::Fetch(args) => exchange::fetch(manifest, args, output).await,
        Command::Push(args) => exchange::push(args, output).await,
        Command::Serve(args) => consume::serve(args, output).await,
        Command::Stop { package, profile } => consume::stop(&package, profile.as_deref(), output).await,
        Command::Digest { dir } => author::digest(&dir, output),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "packager", &mut std::io::stdout());
            Ok(())
        }
        Command::Man { dir } => author::man(dir.as_deref()),
        Command::Help { topic } => author::help(&topic),
    }
}

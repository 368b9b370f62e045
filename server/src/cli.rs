// SPDX-License-Identifier: Apache-2.0
//! The commands of `flux2-server`. Each one's flags and code are in `commands/`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use flux2::{DeviceChoice, device::Precision};

use server::config::Published;

use crate::{commands, failure::Failure};

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failure, 2 wrong usage, 3 checkpoint or image unusable, 4 device lost, \
    5 address taken or Hub not reached, 6 token missing or refused by the Hub, 7 directory or file not usable or disk full, \
    8 downloaded bytes are wrong, 130 interrupted.";

/// FLUX.2 pictures over HTTP and from the command line.
#[derive(Parser)]
#[command(version, about, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Serve(Box<commands::serve::Serve>),
    Config(Box<commands::config::ShowConfig>),
    Doctor(Box<commands::doctor::Doctor>),
    Generate(commands::generate::Generate),
    Plan(commands::plan::Plan),
    Bench(commands::bench::Bench),
    Check(commands::check::Check),
}

impl Cli {
    /// Runs the command.
    pub fn run(&self) -> Result<(), Failure> {
        match &self.command {
            // Parsed from nothing: every flag of `serve` has a default or a variable.
            None => Self::parse_from(["flux2-server", "serve"]).run(),
            Some(Command::Serve(command)) => command.run(),
            Some(Command::Config(command)) => command.run(),
            Some(Command::Doctor(command)) => command.run(),
            Some(Command::Generate(command)) => command.run(),
            Some(Command::Plan(command)) => command.run(),
            Some(Command::Bench(command)) => command.run(),
            Some(Command::Check(command)) => command.run(),
        }
    }
}

/// Where the weights are.
#[derive(Args)]
pub struct CheckpointArgs {
    /// Checkpoint directory in diffusers layout; what is in it decides which model runs [default: $KLEIN_SNAPSHOT, else the
    /// pinned revision of --model in the Hugging Face cache]
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub checkpoint: Option<PathBuf>,
    /// Published model to look for where no checkpoint is named
    #[arg(long, env = "FLUX2_MODEL", value_enum, default_value_t, help_heading = "Model")]
    pub model: Published,
    /// Take the text encoder from here: a diffusers text_encoder directory or a Qwen3 checkpoint [default:
    /// $KLEIN_TEXT_ENCODER, else the checkpoint's own]
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    text_encoder: Option<PathBuf>,
}

impl CheckpointArgs {
    /// The checkpoint directory: the one named, or where it is looked for.
    pub fn find(&self) -> Result<PathBuf, Failure> {
        flux2::snapshot::find(self.model.spec(), self.checkpoint.as_deref()).map_err(Failure::checkpoint)
    }

    /// The text encoder's directory, where it is not the checkpoint's own.
    pub fn text_encoder(&self) -> Option<PathBuf> {
        self.text_encoder.clone().or_else(flux2::snapshot::text_encoder_override)
    }
}

/// What runs the model, and how.
#[derive(Args)]
pub struct DeviceArgs {
    /// What runs the model
    #[arg(long, value_enum, default_value_t, help_heading = "Device")]
    device: DeviceKind,
    /// f32 is the reference, bf16 the fast one; each draws its own noise from a seed
    #[arg(long, value_enum, default_value_t, help_heading = "Device")]
    dtype: Dtype,
    /// Worker threads of the CPU [default: one per physical core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = "Device")]
    threads: Option<u16>,
}

impl DeviceArgs {
    /// The device to open.
    pub fn choice(&self) -> DeviceChoice {
        match self.device {
            DeviceKind::Cpu => DeviceChoice::Cpu { threads: self.threads.map(usize::from) },
        }
    }

    /// Its precision.
    pub fn precision(&self) -> Precision {
        match self.dtype {
            Dtype::F32 => Precision::F32,
            Dtype::Bf16 => Precision::Bf16,
        }
    }
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum DeviceKind {
    #[default]
    Cpu,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Dtype {
    F32,
    #[default]
    Bf16,
}

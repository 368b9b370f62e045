// SPDX-License-Identifier: Apache-2.0
//! One file a command: its flags and what it does.

pub mod bench;
pub mod check;
pub mod config;
pub mod doctor;
pub mod generate;
pub mod plan;
pub mod serve;

use serde::Serialize;

use crate::{failure::Failure, stdout::line};

/// Prints a command's answer for machines: one JSON object on one line.
fn print_json(answer: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(answer).map_err(|error| Failure::Other(error.to_string()))?;
    line(format_args!("{text}"))
}

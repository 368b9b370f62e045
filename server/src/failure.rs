// SPDX-License-Identifier: Apache-2.0
//! How a command fails: one sentence, and the exit code of its class.

use std::{fmt, path::PathBuf};

use flux2::{Error, RequestError};
use server::exit::StartError;

/// A failed command. Shown as one sentence that says what was wrong, where, and what to do.
#[derive(Debug)]
pub enum Failure {
    /// The command line asks for something that cannot be done. Nothing was run.
    Usage(String),
    /// A checkpoint or an image that was given cannot be used.
    Unusable(String),
    /// Interrupted by a signal. Nothing was written.
    Interrupted,
    /// The server could not start, or ended because its device was lost.
    Start(StartError),
    /// Anything else.
    Other(String),
}

impl Failure {
    /// Exit code of the process.
    pub const fn code(&self) -> u8 {
        match self {
            Self::Other(_) => 1,
            Self::Usage(_) => 2,
            Self::Unusable(_) => 3,
            Self::Interrupted => 130,
            Self::Start(error) => error.exit as u8,
        }
    }

    /// A refused request; `images` are the files behind the parameters `images[0]`, `images[1]`, ...
    pub fn request(error: &RequestError, images: &[PathBuf]) -> Self {
        let index =
            error.parameter.strip_prefix("images[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
        match index.and_then(|index: usize| images.get(index)) {
            Some(file) => Self::Unusable(format!("image {}: {}", file.display(), error.message)),
            None => Self::Usage(error.to_string()),
        }
    }

    /// A checkpoint that could not be opened.
    pub fn checkpoint(error: Error) -> Self {
        match error {
            Error::Io { .. } => Self::Unusable(format!("checkpoint {error}")),
            other => Self::from(other),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Request(error) => Self::request(&error, &[]),
            Error::Checkpoint { .. } | Error::NonFinite { .. } => Self::Unusable(error.to_string()),
            Error::Stopped => Self::Interrupted,
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        Self::Start(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(sentence) | Self::Unusable(sentence) | Self::Other(sentence) => f.write_str(sentence),
            Self::Start(error) => error.fmt(f),
            Self::Interrupted => f.write_str("interrupted, nothing was written"),
        }
    }
}

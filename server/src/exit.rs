// SPDX-License-Identifier: Apache-2.0
//! Exit codes of `flux2-server`, so that a supervisor can tell a full disk from a dead device.

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Stopped as asked.
    Clean = 0,
    /// Something else went wrong.
    Failure = 1,
    /// A wrong flag or value.
    Usage = 2,
    /// The checkpoint is missing, incomplete or of another model.
    Checkpoint = 3,
    /// The device could not be opened, died or stopped answering: restart the process.
    Device = 4,
    /// The address cannot be listened on, or the Hub does not do its part.
    Address = 5,
    /// The Hub wants a token, or another one.
    Auth = 6,
    /// A directory or file cannot be read or written.
    Storage = 7,
    /// What was downloaded is not what it should be.
    Verification = 8,
    /// Interrupted by a second signal, or while downloading.
    Interrupted = 130,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A start that failed: the exit code and one sentence.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StartError {
    /// Exit code of its class.
    pub exit: Exit,
    /// What was wrong, where, and what to do.
    pub message: String,
}

impl StartError {
    /// A failure of class `exit`.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}

impl From<flux2::Error> for StartError {
    fn from(error: flux2::Error) -> Self {
        let exit = match &error {
            flux2::Error::Checkpoint { .. } => Exit::Checkpoint,
            flux2::Error::Device { .. } | flux2::Error::NonFinite { .. } => Exit::Device,
            flux2::Error::Io { .. } => Exit::Storage,
            _ => Exit::Failure,
        };
        Self::new(exit, error.to_string())
    }
}

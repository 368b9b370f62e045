// SPDX-License-Identifier: Apache-2.0
//! What can go wrong, in classes that a caller can act on.
//!
//! Every message is one sentence that says what was wrong, where, and what to do.

use std::path::PathBuf;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of the model port.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request asks for something the model cannot do. Nothing was run.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The checkpoint is incomplete, damaged or of another model.
    #[error("checkpoint {}: {what}", path.display())]
    Checkpoint {
        /// File or directory at fault.
        path: PathBuf,
        /// What is wrong there and what to do.
        what: String,
    },
    /// A device could not do an operation.
    #[error("{device} device, {operation}: {what}")]
    Device {
        /// Device name, as in [`crate::device::Device::name`].
        device: String,
        /// Operation that failed.
        operation: &'static str,
        /// The device's own sentence.
        what: String,
    },
    /// An operation was called with shapes that do not fit. A bug of the caller.
    #[error("{operation}: got {got}, wanted {wanted}")]
    Shape {
        /// Operation that was called.
        operation: &'static str,
        /// Shapes given.
        got: String,
        /// Shapes that would fit.
        wanted: String,
    },
    /// NaN or infinity where a picture was being made.
    #[error(
        "{stage}: {bad} of {total} values are not finite; the weights or the device are at fault, no image was made"
    )]
    NonFinite {
        /// Stage of the pipeline, as in [`crate::pipeline::Stage`].
        stage: String,
        /// How many values are NaN or infinite.
        bad: usize,
        /// How many values there are.
        total: usize,
    },
    /// [`crate::pipeline::Progress::stopped`] said so.
    #[error("stopped")]
    Stopped,
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// File at fault.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

impl Error {
    /// A checkpoint error at `path`.
    pub fn checkpoint(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.into(), what: what.into() }
    }
}

/// A request that breaks the model's contract: which parameter, the value got, and the range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{parameter}: {message}")]
pub struct RequestError {
    /// The parameter at fault: `prompt`, `width`, `height`, `seed`, `steps`, `guidance`, `images[i]`.
    pub parameter: String,
    /// One sentence with the value got and the range allowed.
    pub message: String,
}

impl RequestError {
    /// A refusal of `parameter`.
    pub fn new(parameter: impl Into<String>, message: impl Into<String>) -> Self {
        Self { parameter: parameter.into(), message: message.into() }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The one error of the packager: what went wrong, why, and what to do next, with the exit code of
//! its class. Manifest mistakes travel inside as a list, so that all of them can be shown at once.

use std::{io, path::Path};

use serde::Serialize;

use crate::manifest::Problem;

/// Shorthand for what nearly every function here returns.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// What kind of failure it is: decides the exit code, so that scripts can tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Anything that has no class of its own.
    Failure,
    /// The command line asks for something impossible.
    Usage,
    /// The manifest (or the lock) breaks a rule.
    Manifest,
    /// The container engine is absent, too old, or failed.
    Engine,
    /// A network, registry or hub did not do its part.
    Network,
    /// Credentials are missing or not enough.
    Auth,
    /// A disk is full or may not be written.
    Disk,
    /// A package does not agree with itself.
    Verify,
    /// The user stopped it.
    Interrupted,
}

impl Class {
    /// The exit code, as `packager help` documents them.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Failure => 1,
            Self::Usage => 2,
            Self::Manifest => 3,
            Self::Engine => 4,
            Self::Network => 5,
            Self::Auth => 6,
            Self::Disk => 7,
            Self::Verify => 8,
            Self::Interrupted => 130,
        }
    }
}

/// A failed command.
#[derive(Debug, Clone, Serialize, thiserror::Error)]
#[error("{what}{}", if why.is_empty() { String::new() } else { format!(": {why}") })]
pub struct Failure {
    /// Decides the exit code.
    pub class: Class,
    /// What was attempted and did not work, with the file, field or step.
    pub what: String,
    /// The cause, in the words of whoever reported it. May be empty.
    pub why: String,
    /// The next action for the user. May be empty.
    pub next: String,
    /// The single mistakes, when there is a list of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<Problem>,
}

impl Failure {
    /// A failure of `class`: say what was attempted.
    pub fn new(class: Class, what: impl Into<String>) -> Self {
        Self { class, what: what.into(), why: String::new(), next: String::new(), problems: Vec::new() }
    }

    /// Adds the cause.
    #[must_use]
    pub fn why(mut self, why: impl std::fmt::Display) -> Self {
        self.why = why.to_string();
        self
    }

    /// Adds the next action for the user.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = next.into();
        self
    }

    /// A file operation that failed: `verb` as in "cannot read FILE".
    pub fn io(verb: &str, path: &Path, error: &io::Error) -> Self {
        let failure = |class| Self::new(class, format!("cannot {verb} {}", path.display())).why(error);
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                failure(Class::Disk).next("free some space, then run the command again; nothing was replaced")
            }
            io::ErrorKind::ReadOnlyFilesystem => {
                failure(Class::Disk).next("choose a place that can be written")
            }
            io::ErrorKind::PermissionDenied => {
                failure(Class::Disk).next("check who owns the path and its mode")
            }
            _ => failure(Class::Failure),
        }
    }
}

/// Adds the path to an I/O error.
pub trait At<T> {
    /// `verb` as in "cannot read FILE".
    fn at(self, verb: &str, path: &Path) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, verb: &str, path: &Path) -> Result<T> {
        self.map_err(|error| Failure::io(verb, path, &error))
    }
}

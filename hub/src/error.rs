// SPDX-License-Identifier: Apache-2.0
//! How a transfer fails: what was attempted, why it did not work, what to do next.

use std::{io, path::Path};

/// Shorthand for what nearly every function here returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure it is; programs give each its own exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A name or pattern that cannot be meant.
    Usage,
    /// The Hub, or the way to it, did not do its part.
    Network,
    /// No token, or one that is not enough: gated or private.
    Auth,
    /// A disk is full or may not be written.
    Disk,
    /// Bytes are not what they should be.
    Verification,
    /// Anything else.
    Other,
}

/// A failed transfer.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}{}{why}", if why.is_empty() { "" } else { ": " })]
pub struct Error {
    /// Its kind.
    pub kind: Kind,
    /// What was attempted and did not work.
    pub what: String,
    /// The cause. May be empty.
    pub why: String,
    /// The next action for the user. May be empty.
    pub next: String,
}

impl Error {
    /// A failure of `kind`: say what was attempted.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), why: String::new(), next: String::new() }
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
        let failure = |kind| Self::new(kind, format!("cannot {verb} {}", path.display())).why(error);
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => failure(Kind::Disk)
                .next("free some space and run the command again: it goes on where it stopped"),
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => failure(Kind::Disk).next(
                "name a cache that this user may write to with HF_HUB_CACHE, or mount this one writable",
            ),
            _ => failure(Kind::Other),
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
        self.map_err(|error| Error::io(verb, path, &error))
    }
}

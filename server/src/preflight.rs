// SPDX-License-Identifier: Apache-2.0
//! What can be known to be wrong before anything is opened: one sentence and an exit code, in well under two seconds.

use std::path::{Path, PathBuf};

use crate::{
    config::Config,
    exit::{Exit, StartError},
    sizes::Sizes,
};

/// Variables that name directories which are written to.
pub const DIRECTORIES: [&str; 3] = ["TT_DIT_CACHE_DIR", "TT_METAL_CACHE", "TT_METAL_LOGS_PATH"];

/// Checks the settings, the directories and the checkpoint; returns the checkpoint's directory.
///
/// # Errors
/// The first thing that is wrong.
pub fn run(config: &Config) -> Result<PathBuf, StartError> {
    settings(config)?;
    directories()?;
    let checkpoint = checkpoint(config)?;
    Sizes::of_checkpoint(config, &checkpoint).map_err(|why| StartError::new(Exit::Usage, why))?;
    Ok(checkpoint)
}

/// Every setting is in its range.
pub fn settings(config: &Config) -> Result<(), StartError> {
    config.check().map_err(|error| StartError::new(Exit::Usage, error.to_string()))
}

/// Every directory that a variable names can be written to.
pub fn directories() -> Result<(), StartError> {
    for name in DIRECTORIES {
        if let Some(path) = std::env::var_os(name).filter(|value| !value.is_empty()) {
            writable(Path::new(&path))
                .map_err(|why| StartError::new(Exit::Storage, format!("{name}={}: {why}", path.display())))?;
        }
    }
    Ok(())
}

/// The checkpoint is there and complete.
pub fn checkpoint(config: &Config) -> Result<PathBuf, StartError> {
    let checkpoint = config.checkpoint().map_err(|error| unusable(&error.to_string(), 0))?;
    let problems = flux2::pipeline::check(&checkpoint, config.text_encoder().as_deref());
    match problems.split_first() {
        None => Ok(checkpoint),
        Some((first, rest)) => Err(unusable(&first.to_string(), rest.len())),
    }
}

fn unusable(problem: &str, more: usize) -> StartError {
    let rest = match more {
        0 => String::new(),
        more => format!(" (and {more} more: flux2-server check lists them)"),
    };
    StartError::new(Exit::Checkpoint, format!("{problem}{rest}"))
}

/// Whether files can be made in a directory, which is made if it is not there. The error is a sentence.
pub fn writable(directory: &Path) -> Result<(), String> {
    std::fs::create_dir_all(directory)
        .and_then(|()| tempfile::Builder::new().prefix(".flux2-").tempfile_in(directory))
        .map(drop)
        .map_err(|error| {
            format!("files cannot be written there by this user ({error}); mount it writable, or unset it")
        })
}

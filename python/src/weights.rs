// SPDX-License-Identifier: Apache-2.0
//! Where the checkpoint is; the pinned weights are downloaded if they are not on this computer.

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use pyo3::{exceptions::PyValueError, prelude::*};
use server::{config::Config, download};

use crate::{errors, follow::raised_by_signal};

/// How often a download looks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

/// The server's settings, from its variables alone.
#[derive(Parser)]
#[command(name = "tt_flux2_klein")]
struct Environment {
    #[command(flatten)]
    config: Config,
}

/// The server's settings as the environment has them. The pinned weights may be downloaded.
///
/// # Errors
/// `ValueError` with the variable at fault.
pub fn settings() -> PyResult<Config> {
    let parsed = Environment::try_parse_from(["tt_flux2_klein"]);
    let mut config = parsed.map_err(|error| PyValueError::new_err(error.to_string()))?.config;
    config.download = true;
    Ok(config)
}

/// The directories of the checkpoint and, where it is not the checkpoint's own, of the text encoder: those given, else
/// `KLEIN_SNAPSHOT` and `KLEIN_TEXT_ENCODER`, else the pinned revision in the Hugging Face cache, downloaded with a progress
/// bar if it is not complete there.
#[pyfunction]
pub fn find_weights(
    py: Python<'_>,
    snapshot: Option<PathBuf>,
    te_dir: Option<PathBuf>,
) -> PyResult<(PathBuf, Option<PathBuf>)> {
    let mut config = settings()?;
    if snapshot.is_some() {
        config.checkpoint = snapshot;
    }
    if te_dir.is_some() {
        config.text_encoder = te_dir;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| errors::pipeline(py, &flux2::Error::Io { path: "runtime".into(), source: error }))?;
    let downloaded = py.detach(|| {
        runtime.block_on(async {
            tokio::select! {
                result = download::weights(&config) => Ok(result),
                signal = interrupted() => Err(signal),
            }
        })
    });
    // What arrived is kept: the next call goes on from there.
    downloaded?.map_err(|error| errors::download(py, &error))?;
    let found = config.checkpoint();
    Ok((found.map_err(|error| errors::pipeline(py, &error))?, config.text_encoder()))
}

/// Returns when a signal's handler raises.
async fn interrupted() -> PyErr {
    loop {
        tokio::time::sleep(SIGNALS).await;
        if let Some(raised) = raised_by_signal() {
            return raised;
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Failures as Python's exceptions, which `tt_flux2_klein/errors.py` declares.

use flux2::{Error, RequestError};
use pyo3::{call::PyCallArgs, prelude::*};
use server::{
    errors::ApiError,
    exit::{Exit, StartError},
};

/// An exception of the class `name`.
fn exception<'py>(py: Python<'py>, name: &str, arguments: impl PyCallArgs<'py>) -> PyErr {
    let make = || -> PyResult<Bound<'py, PyAny>> {
        py.import("tt_flux2_klein.errors")?.getattr(name)?.call1(arguments)
    };
    make().map_or_else(|error| error, PyErr::from_value)
}

/// A refusal: the sentence of the server's 422, and the parameter at fault.
pub fn request(py: Python<'_>, error: &RequestError) -> PyErr {
    exception(py, "RequestError", (error.to_string(), error.parameter.clone()))
}

/// A refusal by the server's own reader of requests.
pub fn refused(py: Python<'_>, error: &ApiError) -> PyErr {
    exception(py, "RequestError", (error.message.clone(), error.param.clone()))
}

/// A device that cannot be used.
pub fn device(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "DeviceError", (message,))
}

/// A run that its callback ended.
pub fn stopped(py: Python<'_>) -> PyErr {
    exception(py, "Stopped", ("the callback stopped the run",))
}

/// A failure of the pipeline.
pub fn pipeline(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::Request(error) => return request(py, error),
        Error::Shape { .. } => return exception(py, "RequestError", (error.to_string(), py.None())),
        Error::Checkpoint { .. } | Error::Io { .. } => "CheckpointError",
        Error::Device { .. } => "DeviceError",
        Error::NonFinite { .. } => "NonFiniteError",
        Error::Stopped => return stopped(py),
        _ => "KleinError",
    };
    exception(py, class, (error.to_string(),))
}

/// A failure of the download.
pub fn download(py: Python<'_>, error: &StartError) -> PyErr {
    let class = match error.exit {
        Exit::Address | Exit::Auth | Exit::Storage | Exit::Verification => "DownloadError",
        Exit::Checkpoint => "CheckpointError",
        _ => "KleinError",
    };
    exception(py, class, (error.message.clone(),))
}

/// A server that did not start, or ended: the sentence and the exit code that `flux2-server` would have.
pub fn serve(py: Python<'_>, error: &StartError) -> PyErr {
    exception(py, "ServeError", (error.message.clone(), error.exit as u8))
}

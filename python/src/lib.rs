// SPDX-License-Identifier: Apache-2.0
//! The native part of the Python package `tt_flux2_klein`.
//!
//! [`model`] is a pipeline that Python's threads share, [`follow`] carries progress, stops and signals, [`weights`] finds or
//! downloads the checkpoint, [`serve`] hands an ASGI server's requests to the Rust server's own router. What Python
//! programmers see is written in Python, in `tt_flux2_klein/`; arrays and pictures cross as bytes.

mod errors;
mod follow;
mod model;
mod serve;
mod turn;
mod weights;

/// Devices, models, weights and the server.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::{
        model::Model,
        serve::{Exchange, Server},
        weights::find_weights,
    };

    /// Devices that this build can open.
    #[pymodule_export]
    const DEVICES: &str = "cpu";

    /// Encodings of reference images that a model keeps.
    #[pymodule_export]
    const REF_CACHE_SIZE: usize = flux2::pipeline::REFERENCE_CACHE_SIZE;
}

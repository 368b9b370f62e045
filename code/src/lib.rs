// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 \[klein\] in Rust: text to image, editing, and one to three reference images.
//!
//! A request flows one way: [`request`] → [`pipeline`] (prompt → text encoder → references → denoise → decode) → [`device`]
//! → pixels. The model in [`model`] is written once over the [`device::Device`] trait. This crate knows images, prompts,
//! seeds and pixels; it knows no HTTP, no queue and no Hub.
//!
//! Start at [`open`], which loads a checkpoint onto a device and returns a [`pipeline::Pipeline`].

pub mod checkpoint;
pub mod device;
pub mod error;
pub mod latents;
pub mod model;
pub mod noise;
pub mod pipeline;
pub mod pixels;
pub mod plan;
pub mod prompt;
pub mod reference;
pub mod request;
pub mod rope;
pub mod schedule;
pub mod snapshot;
pub mod spec;
pub mod weight;

pub use error::{Error, RequestError, Result};
pub use image::RgbImage;
pub use pipeline::{DeviceChoice, OpenOptions, Pipeline, Progress, open};
pub use request::Request;

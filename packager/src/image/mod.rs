// SPDX-License-Identifier: Apache-2.0
//! The image: the engine, what is sent to it, the build, the check of what came out.

pub mod build;
pub mod check;
pub mod context;
pub mod dockerfile;
pub mod engine;
pub mod events;
pub mod stream;

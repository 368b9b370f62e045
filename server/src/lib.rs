// SPDX-License-Identifier: Apache-2.0
//! The HTTP server of `flux2-server`.
//!
//! A request flows one way: [`routes`] → [`ask`] (checks, references) → [`queue`] → [`worker`] (the thread that owns the
//! device) → [`encoder`] → back to the route that waits for the job. Everything that can change a pixel is in `flux2`;
//! everything that can change only when or to whom is here.

pub mod app;
pub mod ask;
pub mod auth;
pub mod body;
pub mod config;
pub mod download;
pub mod encoder;
pub mod engine;
pub mod errors;
pub mod exit;
pub mod fields;
pub mod form;
pub mod images;
pub mod lifecycle;
pub mod listener;
pub mod logging;
pub mod metrics;
pub mod middleware;
pub mod openapi;
pub mod picture;
pub mod preflight;
pub mod queue;
pub mod routes;
pub mod serve;
pub mod sizes;
pub mod strangers;
pub mod telemetry;
pub mod worker;

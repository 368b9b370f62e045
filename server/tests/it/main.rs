// SPDX-License-Identifier: Apache-2.0
//! The server over real sockets. The model is the real one on the small checkpoint; [`scripted`] stands in for faults
//! that a healthy device does not have. A test that holds a case from the field carries its number in its name.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod contract;
mod dev;
mod inputs;
mod jobs;
mod life;
mod load;
mod openai;
mod page;
mod process;
mod queue;
mod scripted;
mod strangers;
mod support;
mod telemetry;

// SPDX-License-Identifier: Apache-2.0
//! Tests of the packager across its modules, in one binary. Field cases carry their number.

mod archive;
mod build;
mod cli;
mod consumer;
mod digest;
mod engine;
mod faults;
mod manifest;
mod ours;
mod serve;
mod stage;
mod support;
mod verify;
mod wire;

// SPDX-License-Identifier: Apache-2.0
//! Tests of the packager across its modules, in one binary. Field cases carry their number.

mod archive;
mod build;
mod cli;
mod consumer;
mod dev;
mod digest;
mod engine;
mod faults;
mod fetch;
mod json;
mod manifest;
mod ours;
mod ours_consumers;
mod proxy;
mod push;
mod registry;
mod registry_faults;
mod registry_server;
mod serve;
mod stage;
#[allow(dead_code, reason = "the tests of hub use the rest")]
#[path = "../../../hub/tests/it/stand_in.rs"]
mod stand_in;
mod support;
mod verify;
mod wire;

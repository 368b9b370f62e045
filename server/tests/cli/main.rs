// SPDX-License-Identifier: Apache-2.0
//! `flux2-server` as a person calls it: what it prints, what it writes, how it ends. Runs the small checkpoints of this
//! repository. A number in a test's name is that of the field report it answers.

mod bench;
mod checkpoints;
mod download;
mod images;
mod interrupt;
mod outputs;
mod pictures;
mod plan;
#[allow(dead_code, reason = "the tests of hub use the rest")]
#[path = "../../../hub/tests/it/stand_in.rs"]
mod stand_in;
mod support;
mod usage;

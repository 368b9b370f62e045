// SPDX-License-Identifier: Apache-2.0
//! Every operation on every device that this host can run, against a plain f64 implementation of its definition.
//!
//! Sizes are odd on purpose: tails in every dimension, one row, none. Instruction sets that the host lacks are printed.

#![allow(clippy::unwrap_used, clippy::float_cmp, reason = "tests")]

mod cases;
mod images;
mod reference;
mod rows;
mod sequences;
mod whole;
mod wrong;

// SPDX-License-Identifier: Apache-2.0
//! Transfers against a hub that misbehaves, over real sockets. Field cases carry their number.

mod faults;
mod good;
mod push;
mod stand_in;
mod support;

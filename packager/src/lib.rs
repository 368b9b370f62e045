// SPDX-License-Identifier: Apache-2.0
//! From a manifest to a container package: manifest → pins → stage + digest → image → layout + wire
//! manifest + card → `build/<name>/`. Every module is one step of that line, or what a step needs.

pub mod card;
pub mod cli;
pub mod digest;
pub mod error;
pub mod evidence;
pub mod fetch;
pub mod files;
pub mod git;
pub mod image;
pub mod layout;
pub mod manifest;
pub mod package;
pub mod pins;
pub mod push;
pub mod registry;
pub mod secret;
pub mod serve;
pub mod stage;
pub mod verify;
pub mod wire;

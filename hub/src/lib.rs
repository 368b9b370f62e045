// SPDX-License-Identifier: Apache-2.0
//! The Hugging Face Hub for `packager` and `flux2-server`: what is fetched or pushed is whole and right, or
//! an error says why not.
//!
//! A fetch flows one way: [`settings`] (environment) → [`listing`] (revision, files, sizes, hashes) → [`cache`] (what is
//! there already) → disk check → [`transfer`] (ranges into a [`partial`] file) → verification → rename → link.
//! All of it is in [`mod@fetch`]; the servers it meets are met in [`http`]. The way out is [`push`].
//!
//! Nothing here takes a lock. A download writes to a file whose name holds its process, so that a dead one's work can
//! be taken over at once and a living one's is left alone; blobs are named by their content, so that two processes
//! that finish the same one put the same bytes in the same place.

pub mod bar;
pub mod cache;
pub mod call;
pub mod error;
pub mod fetch;
pub mod http;
pub mod listing;
pub mod partial;
pub mod pattern;
pub mod progress;
pub mod proxy;
pub mod push;
pub mod repo;
pub mod settings;
pub mod tls;
pub mod transfer;

pub use error::{Error, Kind, Result};
pub use fetch::{Fetched, Pin, Want, fetch};
pub use progress::{Progress, Silent};
pub use settings::Settings;

// SPDX-License-Identifier: Apache-2.0
//! The image as files: what the engine exports, normalised, as an OCI layout that `skopeo` and
//! `docker load` both accept, with an identity that is the same whichever store the engine uses.

pub mod archive;
mod compress;
pub mod config;
pub mod normalize;
pub mod read;
pub mod write;

use serde::{Deserialize, Serialize};

/// What an image is: the digest of its configuration and of its uncompressed layers. The digests of
/// compressed blobs are transport: another compressor gives others for the same image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// `sha256:` and 64 digits: the image id of the classic store.
    pub config: String,
    /// Digest of the OCI manifest: the image id of the containerd store.
    pub manifest: String,
    /// Digests of the uncompressed layers, base first.
    pub diff_ids: Vec<String>,
    /// Bytes of each uncompressed layer.
    pub sizes: Vec<u64>,
    /// How many of them are the base image's.
    pub base_layers: usize,
}

impl Identity {
    /// First 12 digits of the config digest: the tag.
    pub fn short(&self) -> &str {
        &self.config["sha256:".len()..][..12]
    }

    /// What consumers get it by: its id when it lies in the package, its manifest when it lies in a registry.
    pub fn pulled_by(&self, registry: &str) -> &str {
        if registry == "hf" { &self.config } else { &self.manifest }
    }

    /// The image's name in engines: `tt-model/<name>:<12 digits>`.
    pub fn tag(&self, name: &str) -> String {
        format!("tt-model/{name}:{}", self.short())
    }
}

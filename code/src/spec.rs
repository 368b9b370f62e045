// SPDX-License-Identifier: Apache-2.0
//! What a checkpoint's own files do not say about a model: one table, one entry a model.

use std::path::Path;

use serde::Deserialize;

use crate::{
    checkpoint::read_json,
    error::{Error, Result},
    prompt::{self, Layout},
    request::Limits,
};

/// Facts of a model that are not in its configuration files.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Name of the published model.
    pub name: &'static str,
    /// `_class_name` of its `model_index.json`.
    pub pipeline_class: &'static str,
    /// Hub repository of the published weights.
    pub repository: &'static str,
    /// Pinned revision of the published weights.
    pub revision: &'static str,
    /// Files of that repository, below the diffusers layout's directories, in which no tensor is read.
    pub unneeded_files: &'static [&'static str],
    /// Width of the published transformer: a checkpoint of another width is another model of the same kind.
    pub published_width: usize,
    /// Licence of the published weights, SPDX.
    pub license: &'static str,
    /// How prompts are laid out, cut and padded.
    pub prompt: &'static Layout,
    /// What is taken from which language model.
    pub text_encoder: TextEncoderSpec,
    /// Denoising steps when none are asked for.
    pub steps: usize,
    /// Guidance scale when none is asked for; `None` for a distilled model, which takes none.
    pub guidance: Option<f32>,
    /// Whether the published package serves one size, fixed at start.
    pub one_size: bool,
    /// Ranges that requests are checked against.
    pub limits: Limits,
}

/// What FLUX.2 takes from a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct TextEncoderSpec {
    /// Layers, counted from 1, after which the residual stream is taken (diffusers `hidden_states[9, 18, 27]`). Later
    /// layers are never run.
    pub taps: &'static [usize],
    /// Prefix of the language model's tensors in the files.
    pub prefix: &'static str,
    /// Whether queries and keys have a per-head RMS norm.
    pub query_key_norm: bool,
    /// Prefixes of tensors that the files may hold and nothing here needs, besides later layers and the final norm.
    pub unneeded: &'static [&'static str],
}

impl TextEncoderSpec {
    /// Layers that are run.
    pub fn depth(&self) -> usize {
        self.taps.last().copied().unwrap_or(0)
    }

    /// Whether the tensor is read: the embedding and the layers up to the last tap.
    pub fn needs(&self, tensor: &str) -> bool {
        let Some(name) = tensor.strip_prefix(self.prefix) else { return false };
        match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, _)) => layer.parse::<usize>().is_ok_and(|layer| layer < self.depth()),
            None => name.starts_with("embed_tokens."),
        }
    }

    /// Whether the tensor is known and not read: later layers, the final norm, and [`TextEncoderSpec::unneeded`].
    pub fn knows_unneeded(&self, tensor: &str) -> bool {
        let later = tensor.strip_prefix(self.prefix).is_some_and(|name| {
            let layer =
                name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            name == "norm.weight" || layer.is_some_and(|layer| layer >= self.depth())
        });
        later || self.unneeded.iter().any(|prefix| tensor.starts_with(prefix))
    }
}

/// FLUX.2 \[klein\]: distilled to four steps, no guidance.
pub const KLEIN: ModelSpec = ModelSpec {
    name: "FLUX.2-klein-4B",
    pipeline_class: "Flux2KleinPipeline",
    repository: "black-forest-labs/FLUX.2-klein-4B",
    revision: "e7b7dc27f91deacad38e78976d1f2b499d76a294",
    unneeded_files: &[],
    published_width: 3072,
    license: "Apache-2.0",
    prompt: &prompt::QWEN3,
    text_encoder: TextEncoderSpec {
        taps: &[9, 18, 27],
        prefix: "model.",
        query_key_norm: true,
        unneeded: &["lm_head."],
    },
    steps: 4,
    guidance: None,
    one_size: false,
    limits: Limits::KLEIN,
};

/// FLUX.2 \[dev\]: guided, fifty steps.
pub const DEV: ModelSpec = ModelSpec {
    name: "FLUX.2-dev",
    pipeline_class: "Flux2Pipeline",
    repository: "black-forest-labs/FLUX.2-dev",
    revision: "26afe3a78bb242c0a8bb181dcc8937bb16e5c66c",
    // Layer 32, from its down projection, to the LM head. Shard 8 ends before and holds the last tensors of layer 29.
    unneeded_files: &[
        "text_encoder/model-00009-of-00010.safetensors",
        "text_encoder/model-00010-of-00010.safetensors",
    ],
    published_width: 6144,
    license: "LicenseRef-FLUX-Non-Commercial",
    prompt: &prompt::MISTRAL,
    text_encoder: TextEncoderSpec {
        taps: &[10, 20, 30],
        prefix: "language_model.model.",
        query_key_norm: false,
        unneeded: &["language_model.lm_head.", "vision_tower.", "multi_modal_projector."],
    },
    steps: 50,
    guidance: Some(4.0),
    one_size: true,
    limits: Limits::DEV,
};

/// All models.
pub const ALL: &[&ModelSpec] = &[&KLEIN, &DEV];

#[derive(Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
}

/// The spec of a checkpoint, by the pipeline class in its `model_index.json`.
pub fn of_checkpoint(checkpoint: &Path) -> Result<&'static ModelSpec> {
    let path = checkpoint.join("model_index.json");
    let index: ModelIndex = read_json(&path)?;
    ALL.iter().copied().find(|spec| spec.pipeline_class == index.class_name).ok_or_else(|| {
        let known: Vec<_> = ALL.iter().map(|spec| spec.pipeline_class).collect();
        Error::checkpoint(
            &path,
            format!("_class_name is {}, this version runs {}", index.class_name, known.join(" and ")),
        )
    })
}

// SPDX-License-Identifier: Apache-2.0
//! What a checkpoint's own files do not say about a model: one table, one entry a model.

use std::path::Path;

use serde::Deserialize;

use crate::{
    error::{Error, Result},
    model::read_json,
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
    /// Licence of the published weights, SPDX.
    pub license: &'static str,
    /// Text rows that the DiT sees; shorter prompts are padded, longer ones cut.
    pub text_tokens: usize,
    /// Text-encoder layers, counted from 1, after which the residual stream is taken (diffusers
    /// `hidden_states[9, 18, 27]`). Later layers are never run.
    pub taps: &'static [usize],
    /// Prefix of the language model's tensors in the text-encoder files.
    pub text_prefix: &'static str,
    /// Denoising steps when none are asked for.
    pub steps: usize,
    /// Ranges that requests are checked against.
    pub limits: Limits,
}

/// FLUX.2 [klein]: distilled to four steps, no guidance.
pub const KLEIN: ModelSpec = ModelSpec {
    name: "FLUX.2-klein-4B",
    pipeline_class: "Flux2KleinPipeline",
    repository: "black-forest-labs/FLUX.2-klein-4B",
    revision: "e7b7dc27f91deacad38e78976d1f2b499d76a294",
    license: "Apache-2.0",
    text_tokens: 512,
    taps: &[9, 18, 27],
    text_prefix: "model.",
    steps: 4,
    limits: Limits::KLEIN,
};

/// All models.
pub const ALL: &[&ModelSpec] = &[&KLEIN];

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

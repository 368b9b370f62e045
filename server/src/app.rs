// SPDX-License-Identifier: Apache-2.0
//! What every handler sees, and the router.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use flux2::{pipeline::ModelInfo, prompt::PromptTokenizer, request::Limits};
use tokio::sync::Semaphore;

use crate::{
    auth::Keys,
    config::Config,
    errors::ApiError,
    lifecycle::Lifecycle,
    metrics::Metrics,
    picture::{self, Metadata},
    queue::{Queue, job::Params},
};

/// Threads that decode strangers' images and encode results at the same time.
const CODEC_THREADS: usize = 2;

/// The loaded model as the routes know it.
pub struct Model {
    /// What was loaded.
    pub info: ModelInfo,
    /// Counts a prompt's tokens before it is queued.
    pub tokenizer: Arc<PromptTokenizer>,
}

/// State of the process.
pub struct App {
    /// Settings.
    pub config: Config,
    /// Phase.
    pub life: Lifecycle,
    /// Queue and jobs.
    pub queue: Arc<Queue>,
    /// Counters.
    pub metrics: Metrics,
    /// API keys.
    pub keys: Keys,
    /// KiB of request bodies that may yet be held.
    pub body_budget: Arc<Semaphore>,
    /// Slots for decoding.
    pub codec_slots: Arc<Semaphore>,
    /// The checkpoint's directory.
    checkpoint: PathBuf,
    model: OnceLock<Model>,
}

impl App {
    /// The state before loading.
    pub fn new(config: Config, checkpoint: PathBuf, keys: Keys) -> Self {
        Self {
            life: Lifecycle::default(),
            queue: Arc::new(Queue::new((&config).into())),
            metrics: Metrics::new(),
            keys,
            body_budget: Arc::new(Semaphore::new(config.body_memory << 10)),
            codec_slots: Arc::new(Semaphore::new(CODEC_THREADS)),
            checkpoint,
            model: OnceLock::new(),
            config,
        }
    }

    /// The model is loaded.
    pub fn set_model(&self, model: Model) {
        // A second call would mean a second load, which does not exist.
        let _ = self.model.set(model);
    }

    /// The model, once it is loaded.
    pub fn model(&self) -> Option<&Model> {
        self.model.get()
    }

    /// The model, if work is taken.
    ///
    /// # Errors
    /// 503 with the phase.
    pub fn ready(&self) -> Result<&Model, ApiError> {
        match self.model.get() {
            Some(model) if self.life.warm() => Ok(model),
            _ => Err(ApiError::not_ready(&self.life.phase())),
        }
    }

    /// Ranges that requests are checked against.
    pub fn limits(&self) -> Limits {
        self.model.get().map_or_else(|| self.config.limits(), |model| model.info.limits.clone())
    }

    /// Largest request body in bytes.
    pub fn body_bytes(&self) -> usize {
        self.config.body_bytes(self.limits().max_references)
    }

    /// Name of the model, before loading too.
    pub fn model_name(&self) -> String {
        self.model.get().map_or_else(|| flux2::spec::KLEIN.name.to_owned(), |model| model.info.model.clone())
    }

    /// Licence of the weights.
    pub fn license(&self) -> String {
        let spec = self.model.get().map_or(&flux2::spec::KLEIN, |model| model.info.spec);
        self.config.model_license.clone().unwrap_or_else(|| spec.license.to_owned())
    }

    /// Revision of the weights: as configured, else the name of the snapshot directory if it looks like one.
    pub fn revision(&self) -> String {
        let from_directory = || {
            let name = self.checkpoint.file_name()?.to_str()?;
            (name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| name.to_owned())
        };
        self.config.model_revision.clone().or_else(from_directory).unwrap_or_else(|| "unknown".into())
    }

    /// Metadata of a picture.
    pub fn metadata(&self, params: &Params) -> Metadata {
        let package = self.config.package_digest.as_deref();
        picture::metadata(params, &self.model_name(), &self.revision(), package, !self.config.omit_prompt)
    }
}

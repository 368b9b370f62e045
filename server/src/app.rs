// SPDX-License-Identifier: Apache-2.0
//! What every handler sees, and the router.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};

use flux2::{
    Request, RgbImage, model::Configs, pipeline::ModelInfo, plan, prompt::PromptTokenizer, snapshot,
    spec::ModelSpec,
};
use tokio::sync::Semaphore;

use crate::{
    auth::Keys,
    config::Config,
    errors::ApiError,
    exit::{Exit, StartError},
    lifecycle::Lifecycle,
    metrics::Metrics,
    picture::{self, Metadata},
    queue::{
        Queue,
        job::{Params, lock},
        rates::Work,
    },
    sizes::Sizes,
    telemetry::Telemetry,
};

/// Threads that decode strangers' images and encode results at the same time.
const CODEC_THREADS: usize = 2;
/// Shapes whose operations are remembered.
const MAX_SHAPES: usize = 1024;
/// Reference sides are cropped to multiples of this.
const GRID: usize = 16;

/// Width, height, steps, and `[height, width]` of each reference.
type Shape = (usize, usize, usize, Vec<[usize; 2]>);

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
    /// Export of spans, if it was asked for.
    pub telemetry: Option<Telemetry>,
    /// API keys.
    pub keys: Keys,
    /// KiB of request bodies that may yet be held.
    pub body_budget: Arc<Semaphore>,
    /// Slots for decoding.
    pub codec_slots: Arc<Semaphore>,
    /// What the checkpoint's own files do not say about its model.
    pub spec: &'static ModelSpec,
    /// Sizes that are served, with all other ranges of a request.
    pub sizes: Sizes,
    /// The model's name before it is loaded.
    name: String,
    checkpoint: PathBuf,
    configs: Option<Configs>,
    flops: Mutex<HashMap<Shape, u64>>,
    model: OnceLock<Model>,
}

impl App {
    /// The state before loading; called within the runtime.
    ///
    /// # Errors
    /// A key file that cannot be read, an endpoint that is no URL, a size that the model cannot make.
    pub fn new(config: Config, checkpoint: PathBuf) -> Result<Self, StartError> {
        // Preflight has read these files already; without them estimates are less good, and that is all.
        let spec = flux2::spec::of_checkpoint(&checkpoint).unwrap_or(&flux2::spec::KLEIN);
        let text_encoder = snapshot::text_encoder_directory(&checkpoint, config.text_encoder().as_deref());
        let configs = Configs::read(&checkpoint, &text_encoder).ok();
        let name = configs.as_ref().map_or_else(
            || spec.name.to_owned(),
            |configs| snapshot::model_name(&checkpoint, spec, configs.transformer.width()),
        );
        let sizes = Sizes::of(&config, spec, &config.device())
            .map_err(|error| StartError::new(Exit::Usage, error.to_string()))?;
        Ok(Self {
            sizes,
            name,
            life: Lifecycle::default(),
            queue: Arc::new(Queue::new((&config).into())),
            metrics: Metrics::new(),
            telemetry: config.otlp_endpoint.as_deref().map(Telemetry::new).transpose()?,
            keys: Keys::load(&config)?,
            body_budget: Arc::new(Semaphore::new(config.body_memory << 10)),
            codec_slots: Arc::new(Semaphore::new(CODEC_THREADS)),
            spec,
            configs,
            flops: Mutex::default(),
            checkpoint,
            model: OnceLock::new(),
            config,
        })
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

    /// A request with nothing given: the model's defaults, of a size that is served.
    pub fn default_request(&self, prompt: String) -> Request {
        let [width, height] = self.sizes.default;
        let (steps, guidance) = (self.spec.steps, self.spec.guidance);
        Request { width, height, steps, guidance, ..Request::new(prompt) }
    }

    /// What the time of a run depends on.
    pub fn work(&self, request: &Request) -> Work {
        let sides = |image: &RgbImage| [image.height() as usize, image.width() as usize];
        let references: Vec<[usize; 2]> = request.references.iter().map(sides).collect();
        let (width, height, steps) = (request.width, request.height, request.steps);
        let shape = (width, height, steps, references.clone());
        let known = lock(&self.flops).get(&shape).copied();
        let flops = known.unwrap_or_else(|| {
            let prepared = references.iter().map(|sides| sides.map(|side| side / GRID * GRID)).collect();
            let prompt = 0..self.spec.prompt.tokens;
            let run = plan::Run { size: [height, width], references: prepared, steps, prompt };
            let flops = self.configs.as_ref().and_then(|configs| plan::plan(configs, self.spec, &run).ok());
            let flops = flops.map_or(0, |plan| plan.flops());
            let mut counted = lock(&self.flops);
            if counted.len() >= MAX_SHAPES {
                counted.clear();
            }
            counted.insert(shape, flops);
            flops
        });
        let reference_pixels = references.iter().map(|[height, width]| height * width).sum();
        Work { width, height, reference_pixels, steps, flops }
    }

    /// Largest request body in bytes.
    pub fn body_bytes(&self) -> usize {
        self.config.body_bytes(self.sizes.limits.max_references)
    }

    /// Name of the model, before loading too.
    pub fn model_name(&self) -> String {
        self.model.get().map_or_else(|| self.name.clone(), |model| model.info.model.clone())
    }

    /// Licence of the weights.
    pub fn license(&self) -> String {
        self.config.model_license.clone().unwrap_or_else(|| self.spec.license.to_owned())
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

// SPDX-License-Identifier: Apache-2.0
//! Opens a checkpoint: which files, which model, and that every tensor is there and used.

use std::{
    cell::{Cell, RefCell},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use super::{DeviceChoice, Flux2, OpenOptions, Pipeline};
use crate::{
    checkpoint::{Component, read_json},
    device::{
        Device, Ops, Precision,
        cpu::{CpuDevice, CpuOptions},
        record::RecordDevice,
    },
    error::{Error, Result},
    model::{Configs, Loader, Model, Weights, text_encoder::TextEncoder, transformer::Transformer, vae::Vae},
    prompt::PromptTokenizer,
    request::Limits,
    snapshot::text_encoder_directory,
    spec::{self, ModelSpec},
    weight::Weight,
};

/// Everything of a checkpoint but the device.
pub(super) struct Checkpoint {
    pub path: PathBuf,
    pub spec: &'static ModelSpec,
    pub configs: Configs,
    pub tokenizer: Arc<PromptTokenizer>,
    /// Text encoder, transformer, VAE.
    pub components: [Component; 3],
}

impl Checkpoint {
    /// Opens all parts; reads headers and configurations, maps the weights.
    pub fn open(path: &Path, text_encoder: Option<&Path>) -> Result<Self> {
        if !path.is_dir() {
            let what = "is not a directory; give a checkpoint in diffusers layout (model_index.json, transformer/, …)";
            return Err(Error::checkpoint(path, what));
        }
        let spec = spec::of_checkpoint(path)?;
        check_scheduler(path)?;
        let text_encoder = text_encoder_directory(path, text_encoder);
        Ok(Self {
            path: path.to_path_buf(),
            spec,
            configs: Configs::read(path, &text_encoder)?,
            tokenizer: Arc::new(PromptTokenizer::load(&path.join("tokenizer"), spec.prompt)?),
            components: [
                open_text_encoder(&text_encoder, spec)?,
                Component::open(&path.join("transformer"), "diffusion_pytorch_model")?,
                Component::open(&path.join("vae"), "diffusion_pytorch_model")?,
            ],
        })
    }

    /// Loads the model onto a device and checks that no tensor is left over.
    pub fn load<D: Device>(&self, device: &D, progress: OnLoad<'_>) -> Result<Model<D>> {
        let [text_encoder, transformer, vae] = &self.components;
        let needed = text_encoder.bytes(|name| self.spec.text_encoder.needs(name));
        let counter = Counter {
            done: Cell::new(0),
            total: needed + transformer.bytes(|_| true) + vae.bytes(|_| true),
            progress: RefCell::new(progress),
        };
        let counted =
            [text_encoder, transformer, vae].map(|component| Counted { component, counter: &counter });
        let weights = counted.each_ref().map(|counted| counted as &dyn Weights);
        let model = Model::load(device, weights, &self.configs, self.spec)?;
        for component in &self.components {
            component.finish()?;
        }
        (counter.progress.borrow_mut())(counter.total, counter.total);
        Ok(model)
    }
}

/// Told while weights are loaded: bytes of them that are on the device, and of all.
pub type OnLoad<'a> = &'a mut dyn FnMut(u64, u64);

struct Counter<'a> {
    done: Cell<u64>,
    total: u64,
    progress: RefCell<OnLoad<'a>>,
}

/// A component whose weights are counted as they are asked for: each is on the device before the next one is.
struct Counted<'a> {
    component: &'a Component,
    counter: &'a Counter<'a>,
}

impl Weights for Counted<'_> {
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let Counter { done, total, progress } = self.counter;
        (progress.borrow_mut())(done.get(), *total);
        let weight = self.component.weight(name, shape)?;
        done.set(done.get() + weight.stored_bytes() as u64);
        Ok(weight)
    }

    fn ignore(&self, unneeded: &dyn Fn(&str) -> bool) {
        self.component.ignore(unneeded);
    }
}

/// Shards of layers after the last tap may be absent.
fn open_text_encoder(directory: &Path, spec: &ModelSpec) -> Result<Component> {
    Component::open_needed(directory, "model", |name| spec.text_encoder.needs(name))
}

#[derive(Deserialize)]
struct SchedulerConfig {
    #[serde(default)]
    use_dynamic_shifting: bool,
    #[serde(default = "exponential")]
    time_shift_type: String,
}

fn exponential() -> String {
    "exponential".into()
}

/// The schedule of [`crate::schedule`] holds for dynamic, exponential shifting only.
fn check_scheduler(checkpoint: &Path) -> Result<()> {
    let path = checkpoint.join("scheduler/scheduler_config.json");
    let config: SchedulerConfig = read_json(&path)?;
    if !config.use_dynamic_shifting || config.time_shift_type != "exponential" {
        return Err(Error::checkpoint(
            path,
            format!(
                "use_dynamic_shifting is {} and time_shift_type is {}; FLUX.2 has true and exponential",
                config.use_dynamic_shifting, config.time_shift_type
            ),
        ));
    }
    Ok(())
}

/// Loads a checkpoint onto a device of the caller's. [`open`] is the same with the device by choice.
///
/// # Errors
/// As [`open`].
pub fn load<D: Device>(
    checkpoint: &Path,
    text_encoder: Option<&Path>,
    device: D,
    limits: Option<Limits>,
) -> Result<Flux2<D>> {
    load_following(checkpoint, text_encoder, device, limits, &mut |_, _| ())
}

fn load_following<D: Device>(
    checkpoint: &Path,
    text_encoder: Option<&Path>,
    device: D,
    limits: Option<Limits>,
    progress: OnLoad<'_>,
) -> Result<Flux2<D>> {
    Flux2::new(Checkpoint::open(checkpoint, text_encoder)?, device, limits, progress)
}

/// Loads a checkpoint onto a device; `progress` is told how far it is.
///
/// # Errors
/// [`Error::Checkpoint`] for anything missing, extra, mis-shaped or damaged; [`Error::Device`] if the device cannot be
/// opened.
pub fn open(options: &OpenOptions, progress: OnLoad<'_>) -> Result<Box<dyn Pipeline>> {
    let (checkpoint, text_encoder) = (options.checkpoint.as_path(), options.text_encoder.as_deref());
    let limits = options.limits.clone();
    match options.device {
        DeviceChoice::Cpu { threads } => {
            let device = CpuDevice::new(CpuOptions { precision: options.precision, threads })?;
            Ok(Box::new(load_following(checkpoint, text_encoder, device, limits, progress)?))
        }
    }
}

/// Everything that is wrong with a checkpoint, found without reading the weights: files, configurations, tensor names,
/// shapes and types. Empty if it is complete.
pub fn check(checkpoint: &Path, text_encoder: Option<&Path>) -> Vec<Error> {
    let mut problems = Vec::new();
    if !checkpoint.is_dir() {
        return Checkpoint::open(checkpoint, None).err().into_iter().collect();
    }
    let mut note = |problem: Option<Error>| problems.extend(problem);
    let spec = match spec::of_checkpoint(checkpoint) {
        Ok(spec) => spec,
        Err(error) => {
            note(Some(error));
            &spec::KLEIN
        }
    };
    note(check_scheduler(checkpoint).err());
    note(PromptTokenizer::load(&checkpoint.join("tokenizer"), spec.prompt).err());
    // In bf16 it would read and round what is stored as F32.
    let device = RecordDevice::new(Precision::F32);
    let text_encoder = text_encoder_directory(checkpoint, text_encoder);
    let whole = |part: &str| Component::open(&checkpoint.join(part), "diffusion_pytorch_model");
    note(check_part(open_text_encoder(&text_encoder, spec), device, |loader, component| {
        TextEncoder::load(loader, &component.config()?, spec).map(drop)
    }));
    note(check_part(whole("transformer"), device, |loader, component| {
        Transformer::load(loader, &component.config()?).map(drop)
    }));
    note(check_part(whole("vae"), device, |loader, component| {
        Vae::load(loader, &component.config()?).map(drop)
    }));
    problems
}

/// What is wrong with one part, found by loading it onto a device without numbers.
fn check_part(
    component: Result<Component>,
    device: RecordDevice,
    load: impl FnOnce(&Loader<'_, RecordDevice>, &Component) -> Result<()>,
) -> Option<Error> {
    let check = |component: Component| {
        let ops = Ops::new(&device);
        load(&Loader { ops: &ops, weights: &component }, &component)?;
        component.finish()
    };
    component.and_then(check).err()
}

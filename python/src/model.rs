// SPDX-License-Identifier: Apache-2.0
//! A loaded model that Python's threads share.

use std::{
    path::PathBuf,
    process,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use flux2::{
    DeviceChoice, OpenOptions, Pipeline, Request, RgbImage,
    device::Precision,
    pipeline::{Latents, PromptEmbeds, References, Stage},
    reference,
    request::Limits,
    spec,
};
use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    pybacked::PyBackedBytes,
    types::{PyByteArray, PyBytes},
};
use server::{ask, routes::predict};

use crate::{
    errors,
    follow::Follow,
    turn::{Turn, lock},
};

/// Channels of a latent token.
const CHANNELS: usize = flux2::latents::CHANNELS;
/// Pixels of a latent token's side.
const TOKEN: usize = 16;

/// Seconds by stage, under the card's keys.
type Seconds = Vec<(&'static str, f64)>;
/// Pixels, (width, height), seconds by stage and by step, references found in the cache.
type Picture<'py> = (Bound<'py, PyBytes>, (u32, u32), Seconds, Vec<f64>, usize);
/// f32 latents, (height, width) in tokens, seconds by stage and by step.
type Denoised<'py> = (Bound<'py, PyByteArray>, (usize, usize), Seconds, Vec<f64>);
/// f32 tokens, and (height, width) in tokens of each reference.
type Encoded<'py> = (Bound<'py, PyByteArray>, Vec<(usize, usize)>);

/// A model on a device.
#[pyclass(frozen, weakref, module = "tt_flux2_klein._native")]
pub struct Model {
    pipeline: Mutex<Option<Box<dyn Pipeline>>>,
    turn: Turn,
    closing: AtomicBool,
    process: u32,
    limits: Limits,
    steps: usize,
    /// Name of the model.
    #[pyo3(get)]
    name: String,
    /// Name of the device.
    #[pyo3(get)]
    device: String,
    /// `f32` or `bf16`.
    #[pyo3(get)]
    dtype: &'static str,
    /// Rows and columns of prompt embeds.
    #[pyo3(get)]
    embeds_shape: (usize, usize),
}

#[pymethods]
impl Model {
    /// Loads the checkpoint.
    #[new]
    fn new(
        py: Python<'_>,
        checkpoint: PathBuf,
        text_encoder: Option<PathBuf>,
        dtype: &str,
        threads: Option<usize>,
        small_sizes: bool,
    ) -> PyResult<Self> {
        let precision = if dtype == Precision::F32.name() { Precision::F32 } else { Precision::Bf16 };
        let loaded = py.detach(|| {
            let spec = spec::of_checkpoint(&checkpoint)?;
            let limits = spec.limits.clone();
            let limits = if small_sizes { limits.with_small_sizes() } else { limits };
            let options = OpenOptions {
                checkpoint,
                text_encoder,
                device: DeviceChoice::Cpu { threads },
                precision,
                limits: Some(limits),
            };
            flux2::open(&options, &mut |_, _| ())
        });
        let pipeline = loaded.map_err(|error| errors::pipeline(py, &error))?;
        py.check_signals()?;
        let info = pipeline.info();
        Ok(Self {
            turn: Turn::default(),
            closing: AtomicBool::new(false),
            process: process::id(),
            limits: info.limits.clone(),
            steps: info.spec.steps,
            name: info.model.clone(),
            device: info.device.clone(),
            dtype: info.precision.name(),
            embeds_shape: (info.spec.prompt.tokens, info.prompt_embeds_width),
            pipeline: Mutex::new(Some(pipeline)),
        })
    }

    /// Makes a picture. Numbers come as their digits: the server's own reader checks them. Images are files.
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &str,
        width: &str,
        height: &str,
        seed: &str,
        images: Vec<PyBackedBytes>,
        callback: Option<Py<PyAny>>,
    ) -> PyResult<Picture<'py>> {
        let mut request = self.request(py, prompt, width, height, seed)?;
        self.check(py, &request)?;
        request.references = self.decode_images(py, &images)?;
        self.check(py, &request)?;
        let run = |pipeline: &mut dyn Pipeline, follow: &mut Follow<'_>| pipeline.generate(&request, follow);
        let ((image, timing), _) = self.run(py, callback, run)?;
        let seconds = Stage::ALL.map(Stage::timing_key);
        let seconds =
            seconds.map(|key| (key, timing.values.get(key).copied().unwrap_or(0.0))).into_iter().collect();
        let pixels = PyBytes::new(py, image.as_raw());
        Ok((pixels, image.dimensions(), seconds, timing.step_s, timing.cached_references))
    }

    /// Prompt embeds of the shape `embeds_shape`, f32.
    fn encode<'py>(
        &self,
        py: Python<'py>,
        prompt: &str,
        callback: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        self.check_prompt(py, prompt)?;
        let run = |pipeline: &mut dyn Pipeline, follow: &mut Follow<'_>| pipeline.encode(prompt, follow);
        let (embeds, _) = self.run(py, callback, run)?;
        Ok(floats(py, &embeds.values))
    }

    /// Latent tokens of reference images.
    fn references<'py>(
        &self,
        py: Python<'py>,
        images: Vec<PyBackedBytes>,
        callback: Option<Py<PyAny>>,
    ) -> PyResult<Encoded<'py>> {
        let images = self.decode_images(py, &images)?;
        let run = |pipeline: &mut dyn Pipeline, follow: &mut Follow<'_>| pipeline.references(&images, follow);
        let (references, _) = self.run(py, callback, run)?;
        let grids = references.grids.iter().map(|&[height, width]| (height, width)).collect();
        Ok((floats(py, &references.tokens), grids))
    }

    /// All denoising steps.
    fn denoise<'py>(
        &self,
        py: Python<'py>,
        embeds: &[u8],
        width: &str,
        height: &str,
        seed: &str,
        tokens: &[u8],
        grids: Vec<(usize, usize)>,
        callback: Option<Py<PyAny>>,
    ) -> PyResult<Denoised<'py>> {
        let request = self.request(py, "-", width, height, seed)?;
        let whole = Limits { grid: TOKEN, ..self.limits.clone() };
        whole.check(&request).map_err(|error| errors::request(py, &error))?;
        let (rows, columns) = self.embeds_shape;
        let embeds =
            PromptEmbeds { tokens: rows, width: columns, values: bytemuck::pod_collect_to_vec(embeds) };
        let grids = grids.into_iter().map(|(height, width)| [height, width]).collect();
        let references = References { tokens: bytemuck::pod_collect_to_vec(tokens), grids };
        let run = |pipeline: &mut dyn Pipeline, follow: &mut Follow<'_>| {
            let Request { width, height, seed, .. } = request;
            let latents = pipeline.denoise(&embeds, &references, width, height, seed, follow)?;
            Ok((latents, follow.stage_seconds()))
        };
        let ((latents, seconds), steps) = self.run(py, callback, run)?;
        Ok((floats(py, &latents.values), (latents.grid_height, latents.grid_width), seconds, steps))
    }

    /// Pixels of latents, and (width, height).
    fn decode<'py>(
        &self,
        py: Python<'py>,
        latents: &[u8],
        grid_height: usize,
        grid_width: usize,
        callback: Option<Py<PyAny>>,
    ) -> PyResult<(Bound<'py, PyByteArray>, (u32, u32))> {
        let latents = Latents { values: bytemuck::pod_collect_to_vec(latents), grid_height, grid_width };
        let run = |pipeline: &mut dyn Pipeline, follow: &mut Follow<'_>| pipeline.decode(&latents, follow);
        let (image, _) = self.run(py, callback, run)?;
        Ok((PyByteArray::new(py, image.as_raw()), image.dimensions()))
    }

    /// Ends a run that is going on, then frees the weights.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.closing.store(true, Ordering::Release);
        // Of another process: its memory is not ours to wait for. In a callback: the run ends after it.
        if self.process == process::id() && !self.turn.mine() {
            let _turn = self.turn.take(py)?;
            py.detach(|| drop(lock(&self.pipeline).take()));
        }
        Ok(())
    }
}

impl Model {
    /// Runs `body` in this thread's turn and without the GIL; its result, and the seconds of its steps.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        callback: Option<Py<PyAny>>,
        body: impl FnOnce(&mut dyn Pipeline, &mut Follow<'_>) -> flux2::Result<T> + Send,
    ) -> PyResult<(T, Vec<f64>)> {
        if self.process != process::id() {
            let what = format!(
                "this model was loaded in process {} and its threads stayed there; load it in each process, or start \
                 processes with the method \"spawn\"",
                self.process
            );
            return Err(PyRuntimeError::new_err(what));
        }
        let _turn = self.turn.take(py)?;
        let mut follow = Follow::new(callback, &self.closing, self.steps);
        let result = py.detach(|| {
            let mut held = lock(&self.pipeline);
            held.as_deref_mut().map(|pipeline| body(pipeline, &mut follow))
        });
        if let Some(failure) = follow.failure.take() {
            return Err(failure);
        }
        let result = result.ok_or_else(|| {
            errors::device(py, "the device is closed; open it again and load the model again")
        })?;
        Ok((result.map_err(|error| errors::pipeline(py, &error))?, follow.step_s))
    }

    /// A request as `POST /predict` reads it.
    fn request(
        &self,
        py: Python<'_>,
        prompt: &str,
        width: &str,
        height: &str,
        seed: &str,
    ) -> PyResult<Request> {
        let prompt = serde_json::Value::from(prompt);
        let body = format!(r#"{{"prompt":{prompt},"width":{width},"height":{height},"seed":{seed}}}"#);
        let asked = predict::parse(body.as_bytes()).map_err(|error| errors::refused(py, &error))?;
        let defaults = Request::new(asked.prompt);
        Ok(Request {
            width: asked.width.map_or(defaults.width, |width| width as usize),
            height: asked.height.map_or(defaults.height, |height| height as usize),
            seed: asked.seed.unwrap_or(defaults.seed),
            steps: self.steps,
            ..defaults
        })
    }

    fn check(&self, py: Python<'_>, request: &Request) -> PyResult<()> {
        self.limits.check(request).map_err(|error| errors::request(py, &error))
    }

    /// Checks a prompt by the rule for requests, whose other fields are right.
    fn check_prompt(&self, py: Python<'_>, prompt: &str) -> PyResult<()> {
        let side = self.limits.min_side.next_multiple_of(self.limits.grid);
        let request = Request { width: side, height: side, steps: self.steps, ..Request::new(prompt) };
        self.check(py, &request)
    }

    fn decode_images(&self, py: Python<'_>, images: &[PyBackedBytes]) -> PyResult<Vec<RgbImage>> {
        ask::check_number(images.len(), &self.limits).map_err(|error| errors::request(py, &error))?;
        let decode =
            || images.iter().enumerate().map(|(index, file)| reference::decode(file, index)).collect();
        let decoded: Result<Vec<_>, _> = py.detach(decode);
        decoded.map_err(|error| errors::request(py, &error))
    }
}

/// Values as the bytes of a writable array.
fn floats<'py>(py: Python<'py>, values: &[f32]) -> Bound<'py, PyByteArray> {
    debug_assert!(values.len().is_multiple_of(CHANNELS));
    PyByteArray::new(py, bytemuck::cast_slice(values))
}

// SPDX-License-Identifier: Apache-2.0
//! Makes pictures: the host's side of every stage, and the order of the stages.

use std::{ops::Range, sync::Arc, time::Instant};

use image::RgbImage;

use super::{
    Event, Latents, ModelInfo, Pipeline, Progress, PromptEmbeds, References, Stage, Timing,
    load::{Checkpoint, OnLoad},
    reference_cache::{Key, ReferenceCache},
};
use crate::{
    checkpoint::Component,
    device::{Device, Observer, Operation, Ops, Precision, Shape},
    error::{Error, Result},
    latents,
    model::{Configs, Model, text_encoder::TappedStreams},
    noise, pixels,
    plan::{self, Plan},
    prompt::{PromptTokenizer, PromptTokens},
    reference::{self, ReferencePixels},
    request::{Limits, Request},
    schedule::Schedule,
    snapshot,
};

/// Pixels of a latent token's side.
pub(crate) const TOKEN_PIXELS: usize = 16;

/// A FLUX.2 model on a device.
pub struct Flux2<D: Device> {
    device: D,
    model: Model<D>,
    configs: Configs,
    /// Kept for the diagnosis of a run that went non-finite.
    components: [Component; 3],
    tokenizer: Arc<PromptTokenizer>,
    cache: ReferenceCache,
    info: ModelInfo,
    noise: Precision,
}

/// Carries a run's operations to the caller's [`Progress`].
struct Bridge<'a> {
    progress: &'a mut dyn Progress,
    done: u64,
    total: u64,
    /// Work done when a stage ends, as planned. A cached reference or a preview makes the run differ from its plan; the
    /// count is set right at the end of each stage.
    stage_ends: Vec<(Stage, u64)>,
}

impl Observer for Bridge<'_> {
    fn before(&mut self, _: &Operation) -> Result<()> {
        if self.progress.stopped() { Err(Error::Stopped) } else { Ok(()) }
    }
    fn after(&mut self, operation: &Operation) {
        self.done = (self.done + operation.flops).min(self.total);
        self.progress.event(Event::Work { done: self.done, total: self.total });
    }
    fn wants(&self, stage: &str) -> bool {
        self.progress.wants_value(stage)
    }
    fn value(&mut self, stage: &str, shape: Shape, values: &[f32]) {
        self.progress.value(stage, shape, values);
    }
}

impl<'a> Bridge<'a> {
    /// Shows a value that the host made, rows of `columns`.
    fn show(&mut self, stage: &str, columns: usize, values: &[f32]) {
        if self.progress.wants_value(stage) {
            self.progress.value(stage, Shape::Rows(values.len() / columns, columns), values);
        }
    }

    /// Follows a run that is not planned: no totals are reported.
    fn unplanned(progress: &'a mut dyn Progress) -> Self {
        Self { progress, done: 0, total: 0, stage_ends: Vec::new() }
    }

    fn planned(progress: &'a mut dyn Progress, plan: &Plan) -> Self {
        let mut total = 0;
        let ends = plan.stages.iter().map(|stage| {
            total += stage.flops();
            (stage.stage, total)
        });
        let stage_ends = ends.collect();
        Self { progress, done: 0, total, stage_ends }
    }

    /// Runs one stage, and times it.
    fn stage<T>(
        &mut self,
        stage: Stage,
        timing: &mut Timing,
        body: impl FnOnce(&mut Self, &mut Timing) -> Result<T>,
    ) -> Result<T> {
        self.progress.event(Event::Stage { stage });
        let start = Instant::now();
        let result = body(self, timing)?;
        timing.values.insert(stage.timing_key(), start.elapsed().as_secs_f64());
        if let Some(&(_, done)) = self.stage_ends.iter().find(|(ended, _)| *ended == stage) {
            self.done = done;
            self.progress.event(Event::Work { done, total: self.total });
        }
        Ok(result)
    }
}

impl<D: Device> Flux2<D> {
    /// Loads an opened checkpoint onto a device.
    pub(super) fn new(
        checkpoint: Checkpoint,
        device: D,
        limits: Option<Limits>,
        progress: OnLoad<'_>,
    ) -> Result<Self> {
        let model = checkpoint.load(&device, progress)?;
        let Checkpoint { path, spec, configs, tokenizer, components } = checkpoint;
        let info = ModelInfo {
            model: snapshot::model_name(&path, spec, configs.transformer.width()),
            spec,
            device: device.name(),
            mesh: device.mesh(),
            precision: device.precision(),
            limits: limits.unwrap_or_else(|| spec.limits.clone()),
            prompt_embeds_width: configs.transformer.joint_attention_dim,
            memory: device.memory(),
        };
        let noise = device.precision();
        Ok(Self {
            device,
            model,
            configs,
            components,
            tokenizer,
            cache: ReferenceCache::default(),
            info,
            noise,
        })
    }

    /// The model, for tests and comparisons stage by stage.
    pub fn model(&self) -> &Model<D> {
        &self.model
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Draws the noise of another precision than the device's: torch gives a seed other noise in f32 and in bf16, so this is
    /// how runs of both precisions are compared on one picture.
    pub fn set_noise(&mut self, precision: Precision) {
        self.noise = precision;
    }

    /// Non-finite values in `values` end the run; if a weight is to blame it is named.
    fn ensure_finite(&self, stage: &str, values: &[f32]) -> Result<()> {
        let bad = values.iter().filter(|value| !value.is_finite()).count();
        if bad == 0 {
            return Ok(());
        }
        if let Some((name, path)) = self.components.iter().find_map(Component::first_non_finite) {
            let what = format!(
                "tensor {name} holds NaN or infinity; download the file again (found at stage {stage})"
            );
            return Err(Error::checkpoint(path, what));
        }
        Err(Error::NonFinite { stage: stage.into(), bad, total: values.len() })
    }

    fn encode_prompt(&self, tokens: PromptTokens, bridge: &mut Bridge<'_>) -> Result<PromptEmbeds> {
        let ops = Ops::observed(&self.device, bridge);
        let embeds = encode_tokens(&self.model, &ops, &tokens.ids, tokens.real)?;
        self.ensure_finite("text encoder", &embeds.values)?;
        bridge.show("prompt_embeds", embeds.width, &embeds.values);
        Ok(embeds)
    }

    fn encode_references(
        &mut self,
        images: &[ReferencePixels],
        bridge: &mut Bridge<'_>,
    ) -> Result<(References, usize)> {
        let mut references = References::default();
        let mut cached = 0;
        for (index, pixels) in images.iter().enumerate() {
            let key = Key::of(pixels);
            let tokens = if let Some(tokens) = self.cache.get(&key) {
                cached += 1;
                tokens
            } else {
                let ops = Ops::observed(&self.device, bridge);
                let tokens = Arc::new(encode_pixels(&self.model, &ops, pixels)?);
                self.ensure_finite(&format!("reference {index}"), &tokens)?;
                bridge.show(&format!("reference{index}.tokens"), latents::CHANNELS, &tokens);
                self.cache.insert(key, Arc::clone(&tokens));
                tokens
            };
            references.tokens.extend_from_slice(&tokens);
            references.grids.push([pixels.height / TOKEN_PIXELS, pixels.width / TOKEN_PIXELS]);
        }
        Ok((references, cached))
    }

    /// Context and denoising; both are timed.
    fn denoise_from(
        &self,
        embeds: &PromptEmbeds,
        references: &References,
        run: &Denoise,
        bridge: &mut Bridge<'_>,
        timing: &mut Timing,
    ) -> Result<Latents> {
        let sequence = Sequence::new(run.grid, references, embeds.tokens);
        let (context, rotary) = bridge.stage(Stage::Context, timing, |bridge, _| {
            let ops = Ops::observed(&self.device, bridge);
            let context = self.model.transformer.context(&ops, &embeds.values)?;
            let rotary = self.model.transformer.rotary(&ops, &sequence.ids)?;
            self.device.synchronize()?;
            Ok((context, rotary))
        })?;
        bridge.stage(Stage::Dit, timing, |bridge, timing| {
            let [grid_height, grid_width] = run.grid;
            let schedule = Schedule::new(grid_height * grid_width, run.steps);
            let z =
                noise::standard_normal(run.seed, latents::CHANNELS * grid_height * grid_width, self.noise);
            let mut x = latents::pack(&z, grid_height, grid_width);
            bridge.show("noise", latents::CHANNELS, &x);
            for step in 0..run.steps {
                let start = Instant::now();
                let ops = Ops::observed(&self.device, bridge);
                let mut tokens = x.clone();
                tokens.extend_from_slice(&references.tokens);
                let tokens = ops.upload_rows(&tokens, sequence.tokens, latents::CHANNELS)?;
                // As the f32 pipeline sees it: σ · 1000 / 1000 · 1000. A bf16 diffusers rounds it to bf16; we do not.
                let timestep = schedule.timesteps[step] / 1000.0 * 1000.0;
                let guidance = run.guidance.map(|guidance| guidance * 1000.0);
                let modulation = self.model.transformer.modulation(&ops, timestep, guidance)?;
                let velocity = self.model.transformer.velocity(
                    &ops,
                    &tokens,
                    grid_height * grid_width,
                    &context,
                    &modulation,
                    &rotary,
                )?;
                let velocity = ops.download(&velocity)?;
                self.ensure_finite(&format!("denoising step {} of {}", step + 1, run.steps), &velocity)?;
                schedule.step(step, &mut x, &velocity);
                bridge.show(&format!("step{step}.velocity"), latents::CHANNELS, &velocity);
                bridge.show(&format!("step{step}.latents"), latents::CHANNELS, &x);
                let seconds = start.elapsed().as_secs_f64();
                timing.step_s.push(seconds);
                let done = step + 1;
                bridge.progress.event(Event::Step { step: done, steps: run.steps, seconds });
                if done < run.steps && bridge.progress.wants_preview(done, run.steps) {
                    // The model's estimate of the end: x0 = x - σ v.
                    let sigma = schedule.sigmas[done];
                    let values = x.iter().zip(&velocity).map(|(x, v)| x - sigma * v).collect();
                    let image = self.decode_latents(&Latents { values, grid_height, grid_width }, bridge)?;
                    let image = pixels::centre_crop(&image, run.width as u32, run.height as u32);
                    bridge.progress.event(Event::Preview { step: done, image: &image });
                }
            }
            Ok(Latents { values: x, grid_height, grid_width })
        })
    }

    fn decode_latents(&self, latents: &Latents, bridge: &mut Bridge<'_>) -> Result<RgbImage> {
        let ops = Ops::observed(&self.device, bridge);
        let values = decode_to_values(&self.model, &ops, latents)?;
        self.ensure_finite("VAE decode", &values)?;
        Ok(pixels::to_rgb(&values, latents.grid_height * TOKEN_PIXELS, latents.grid_width * TOKEN_PIXELS))
    }
}

/// What to denoise.
struct Denoise {
    /// Size asked for; the grid may be larger by less than a token.
    width: usize,
    height: usize,
    grid: [usize; 2],
    seed: u64,
    steps: usize,
    guidance: Option<f32>,
}

/// The joint sequence `[text; image; references]`.
pub(crate) struct Sequence {
    /// `(t, h, w, l)` of every row.
    pub ids: Vec<[i32; 4]>,
    /// Image and reference rows.
    pub tokens: usize,
}

impl Sequence {
    /// The sequence of a picture of `grid` tokens with these references.
    pub fn new([grid_height, grid_width]: [usize; 2], references: &References, text_tokens: usize) -> Self {
        let mut ids = latents::text_ids(text_tokens);
        ids.extend(latents::image_ids(grid_height, grid_width));
        for (index, &[height, width]) in references.grids.iter().enumerate() {
            ids.extend(latents::reference_ids(index, height, width));
        }
        let tokens = ids.len() - text_tokens;
        Self { ids, tokens }
    }
}

/// Prompt embeds `[tokens, taps · hidden]`: the tapped streams side by side.
pub(crate) fn encode_tokens<D: Device>(
    model: &Model<D>,
    ops: &Ops<'_, D>,
    ids: &[u32],
    real: Range<usize>,
) -> Result<PromptEmbeds> {
    let TappedStreams { taps, first_row_repeats } = model.text_encoder.forward(ops, ids, real)?;
    let hidden = taps.first().map_or(0, crate::device::Tensor::columns);
    let width = taps.len() * hidden;
    let mut values = vec![0.0; ids.len() * width];
    for (index, tap) in taps.iter().enumerate() {
        let stream = ops.download(tap)?;
        let mut rows = stream.chunks_exact(hidden);
        let first = rows.next().into_iter().flat_map(|row| std::iter::repeat_n(row, first_row_repeats));
        for (to, from) in values.chunks_exact_mut(width).zip(first.chain(rows)) {
            to[index * hidden..(index + 1) * hidden].copy_from_slice(from);
        }
    }
    Ok(PromptEmbeds { tokens: ids.len(), width, values })
}

/// Latent tokens of a prepared reference: the posterior's mean, patchified and normalised.
pub(crate) fn encode_pixels<D: Device>(
    model: &Model<D>,
    ops: &Ops<'_, D>,
    pixels: &ReferencePixels,
) -> Result<Vec<f32>> {
    let image = ops.upload_image(&pixels.values, pixels.height, pixels.width, 3)?;
    let moments = model.vae.encode(ops, &image)?;
    let channels = moments.columns();
    let moments = ops.download(&moments)?;
    let mean: Vec<f32> =
        moments.chunks_exact(channels).flat_map(|pixel| &pixel[..channels / 2]).copied().collect();
    Ok(latents::from_vae(&mean, pixels.height / 8, pixels.width / 8, &model.vae.statistics))
}

/// Pixels `[height, width, 3]`, about -1..1, of latents.
pub(crate) fn decode_to_values<D: Device>(
    model: &Model<D>,
    ops: &Ops<'_, D>,
    latents: &Latents,
) -> Result<Vec<f32>> {
    let Latents { values, grid_height, grid_width } = latents;
    let z = latents::to_vae(values, *grid_height, *grid_width, &model.vae.statistics);
    let z = ops.upload_image(&z, 2 * grid_height, 2 * grid_width, latents::CHANNELS / 4)?;
    ops.download(&model.vae.decode(ops, &z)?)
}

impl<D: Device> Pipeline for Flux2<D> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenizer(&self) -> Arc<PromptTokenizer> {
        Arc::clone(&self.tokenizer)
    }

    fn generate(&mut self, request: &Request, progress: &mut dyn Progress) -> Result<(RgbImage, Timing)> {
        self.info.limits.check(request)?;
        let references = prepare_all(&request.references)?;
        let grid = [request.height.div_ceil(TOKEN_PIXELS), request.width.div_ceil(TOKEN_PIXELS)];
        let tokens = self.tokenizer.encode(&request.prompt)?;
        let run = plan::Run {
            size: [request.height, request.width],
            references: references.iter().map(|pixels| [pixels.height, pixels.width]).collect(),
            steps: request.steps,
            prompt: tokens.real.clone(),
        };
        let plan = plan::plan(&self.configs, self.info.spec, &run)?;
        let mut bridge = Bridge::planned(progress, &plan);
        let mut timing = Timing::default();
        let embeds =
            bridge.stage(Stage::TextEncoder, &mut timing, |bridge, _| self.encode_prompt(tokens, bridge))?;
        let references = if references.is_empty() {
            References::default()
        } else {
            let (encoded, cached) = bridge.stage(Stage::ReferenceEncode, &mut timing, |bridge, _| {
                self.encode_references(&references, bridge)
            })?;
            timing.cached_references = cached;
            encoded
        };
        let run = Denoise {
            width: request.width,
            height: request.height,
            grid,
            seed: request.seed,
            steps: request.steps,
            guidance: request.guidance.or(self.info.spec.guidance),
        };
        let latents = self.denoise_from(&embeds, &references, &run, &mut bridge, &mut timing)?;
        let image =
            bridge.stage(Stage::VaeDecode, &mut timing, |bridge, _| self.decode_latents(&latents, bridge))?;
        Ok((pixels::centre_crop(&image, request.width as u32, request.height as u32), timing))
    }

    fn encode(&mut self, prompt: &str, progress: &mut dyn Progress) -> Result<PromptEmbeds> {
        self.encode_prompt(self.tokenizer.encode(prompt)?, &mut Bridge::unplanned(progress))
    }

    fn references(&mut self, images: &[RgbImage], progress: &mut dyn Progress) -> Result<References> {
        let images = prepare_all(images)?;
        Ok(self.encode_references(&images, &mut Bridge::unplanned(progress))?.0)
    }

    fn denoise(
        &mut self,
        embeds: &PromptEmbeds,
        references: &References,
        width: usize,
        height: usize,
        seed: u64,
        progress: &mut dyn Progress,
    ) -> Result<Latents> {
        let grid = [height / TOKEN_PIXELS, width / TOKEN_PIXELS];
        let spec = self.info.spec;
        let run = Denoise { width, height, grid, seed, steps: spec.steps, guidance: spec.guidance };
        let mut timing = Timing::default();
        self.denoise_from(embeds, references, &run, &mut Bridge::unplanned(progress), &mut timing)
    }

    fn decode(&mut self, latents: &Latents, progress: &mut dyn Progress) -> Result<RgbImage> {
        self.decode_latents(latents, &mut Bridge::unplanned(progress))
    }
}

fn prepare_all(images: &[RgbImage]) -> Result<Vec<ReferencePixels>> {
    images.iter().enumerate().map(|(index, image)| Ok(reference::prepare(image, index)?)).collect()
}

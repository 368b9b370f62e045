// SPDX-License-Identifier: Apache-2.0
//! The one thread that owns the device: it loads, warms up, and runs one job after the other.
//!
//! A failure stays with its job. After one that may have touched the device (a device error, a panic) the warm-up picture
//! is made again: if that fails too, the device is lost and the process ends with its own exit code.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use flux2::{
    OpenOptions, Pipeline, Progress, Request, RgbImage,
    pipeline::{Event, OnLoad, Stage, Timing},
};
use tokio::sync::mpsc;

use crate::{
    app::{App, Model},
    errors::ApiError,
    exit::{Exit, StartError},
    lifecycle::Phase,
    queue::{
        self,
        job::{Job, State, StopReason, TimingMs},
    },
    telemetry::PictureSpans,
};

/// Opens the pipeline: [`flux2::open`], or a test's own.
pub type Opener = Box<dyn FnOnce(&OpenOptions, OnLoad<'_>) -> flux2::Result<Box<dyn Pipeline>> + Send>;

/// What the worker hands on to be encoded, in order.
pub enum Raster {
    /// An estimate of the finished picture.
    Preview {
        /// Whose.
        job: Arc<Job>,
        /// Steps done.
        step: usize,
        /// Pixels.
        image: RgbImage,
    },
    /// The finished picture.
    Final {
        /// Whose.
        job: Arc<Job>,
        /// Pixels.
        image: RgbImage,
        /// Stage times.
        timing_ms: TimingMs,
        /// References taken from the cache.
        cached_references: usize,
    },
}

/// Runs the worker until the queue is closed or the device is lost. `ready` is called once warm.
pub fn run(
    app: &Arc<App>,
    options: &OpenOptions,
    opener: Opener,
    rasters: &mpsc::UnboundedSender<Raster>,
    ready: impl FnOnce(),
) -> Result<(), StartError> {
    app.life.go(Phase::Loading { step: "load", progress: None });
    let mut loading = |done: u64, total: u64| {
        let progress = Some(done as f64 / total.max(1) as f64);
        app.life.go(Phase::Loading { step: "load", progress });
    };
    let opened = catch_unwind(AssertUnwindSafe(|| opener(options, &mut loading)))
        .unwrap_or_else(|panic| Err(lost_in("load", &panic)));
    let mut pipeline = opened.inspect_err(|_| count_load(app, "failure"))?;
    let info = pipeline.info().clone();
    app.metrics.device_memory.set(info.memory.weights as i64);
    app.set_model(Model { info, tokenizer: pipeline.tokenizer() });
    count_load(app, "success");
    if let Err(error) = warm_up(app, pipeline.as_mut(), true) {
        return if matches!(error, flux2::Error::Stopped) { Ok(()) } else { Err(error.into()) };
    }
    if app.life.go(Phase::Warm) {
        ready();
    }
    while let Some(job) = app.queue.next() {
        app.metrics.queue_wait.observe(job.queued_at.elapsed().as_secs_f64());
        let suspect = run_job(app, pipeline.as_mut(), &job, rasters);
        if suspect && let Err(error) = warm_up(app, pipeline.as_mut(), false) {
            let why = format!("after a failed run the warm-up picture failed too: {error}");
            app.life.go(Phase::Lost(why.clone()));
            return Err(StartError::new(Exit::Device, why));
        }
    }
    Ok(())
}

fn count_load(app: &App, status: &'static str) {
    app.metrics.model_load.get_or_create(&crate::metrics::OutcomeLabel { status }).inc();
}

/// Options of the device and the checkpoint.
pub fn open_options(
    config: &crate::config::Config,
    checkpoint: std::path::PathBuf,
    limits: flux2::request::Limits,
) -> OpenOptions {
    OpenOptions {
        checkpoint,
        text_encoder: config.text_encoder(),
        device: config.device(),
        precision: config.dtype.into(),
        limits: Some(limits),
    }
}

/// Makes one picture that nobody sees, of the size that is served where that is one: kernels, caches and the first measured rate. Also the proof that a device lives.
fn warm_up(app: &App, pipeline: &mut dyn Pipeline, starting: bool) -> flux2::Result<()> {
    let side = app.config.warm_up;
    if side == 0 {
        return Ok(());
    }
    let mut request = app.default_request("warm-up".into());
    if app.sizes.limits.only_size.is_none() {
        (request.width, request.height) = (side, side);
    }
    // Every step does the same.
    request.steps = *app.sizes.limits.steps.start();
    if starting {
        app.life.go(Phase::Loading { step: "warm_up", progress: Some(0.0) });
    }
    let start = Instant::now();
    let mut progress = WarmUp { app, deadline: start + app.config.execution_limit(), starting };
    let result = catch_unwind(AssertUnwindSafe(|| pipeline.generate(&request, &mut progress)));
    result.unwrap_or_else(|panic| Err(lost_in("warm-up", &panic)))?;
    let seconds = start.elapsed().as_secs_f64();
    app.queue.measured(app.work(&request), seconds);
    if starting {
        app.metrics.warm_up.set(seconds);
    }
    Ok(())
}

fn lost_in(operation: &'static str, panic: &Box<dyn Any + Send>) -> flux2::Error {
    flux2::Error::Device { device: "worker".into(), operation, what: panic_text(panic.as_ref()) }
}

struct WarmUp<'a> {
    app: &'a App,
    deadline: Instant,
    starting: bool,
}

impl Progress for WarmUp<'_> {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Work { done, total } = event
            && self.starting
        {
            let progress = Some(done as f64 / total.max(1) as f64);
            self.app.life.go(Phase::Loading { step: "warm_up", progress });
        }
    }

    fn stopped(&mut self) -> bool {
        Instant::now() > self.deadline || self.app.life.phase_if_ended().is_some()
    }
}

/// Follows a job's run for its client.
struct Run<'a> {
    app: &'a App,
    job: &'a Arc<Job>,
    deadline: Instant,
    rasters: &'a mpsc::UnboundedSender<Raster>,
    spans: Option<PictureSpans>,
}

impl Progress for Run<'_> {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Stage { stage } => {
                self.job.set_stage(stage);
                if let Some(spans) = &mut self.spans {
                    spans.stage(stage);
                }
            }
            Event::Work { done, total } => self.job.set_work(done, total),
            Event::Step { step, steps, seconds } => {
                self.app.metrics.denoise_step.observe(seconds);
                self.job.step(step, steps, seconds);
            }
            Event::Preview { step, image } => {
                let preview = Raster::Preview { job: self.job.clone(), step, image: image.clone() };
                // The encoder lives as long as this thread.
                let _ = self.rasters.send(preview);
            }
            _ => {}
        }
    }

    fn stopped(&mut self) -> bool {
        if Instant::now() >= self.deadline {
            self.job.stop(StopReason::Deadline);
        }
        self.job.stopped().is_some()
    }

    fn wants_preview(&mut self, step: usize, _steps: usize) -> bool {
        self.job.params.previews.contains(&step)
    }
}

/// Runs one job to its end. Returns whether the device is suspect.
fn run_job(
    app: &Arc<App>,
    pipeline: &mut dyn Pipeline,
    job: &Arc<Job>,
    rasters: &mpsc::UnboundedSender<Raster>,
) -> bool {
    app.metrics.in_progress.inc();
    let request = Request {
        prompt: job.params.prompt.clone(),
        width: job.params.width,
        height: job.params.height,
        seed: job.params.seed,
        steps: job.params.num_steps,
        guidance: job.params.guidance_scale,
        references: job.take_references(),
    };
    let start = Instant::now();
    let spans = app.telemetry.as_ref().map(|telemetry| telemetry.picture(job));
    let mut run = Run { app, job, deadline: start + app.config.execution_limit(), rasters, spans };
    let result = catch_unwind(AssertUnwindSafe(|| pipeline.generate(&request, &mut run)));
    let seconds = start.elapsed();
    let spans = run.spans.take();
    let end_spans = |error: Option<&str>| spans.map(|spans| spans.end(error));
    app.queue.off_device(job, matches!(result, Ok(Ok(_))).then_some(seconds.as_secs_f64()));
    let (suspect, error) = match result {
        Ok(Ok((image, timing))) => {
            end_spans(None);
            app.metrics.reference_cache_hits.inc_by(timing.cached_references as u64);
            if let Some(seconds) = timing.values.get(Stage::VaeDecode.timing_key()) {
                app.metrics.vae_decode.observe(*seconds);
            }
            let timing_ms = timing_ms(&timing, seconds);
            let cached_references = timing.cached_references;
            let _ = rasters.send(Raster::Final { job: job.clone(), image, timing_ms, cached_references });
            return false;
        }
        Ok(Err(error)) => failure(app, job, &error),
        Err(panic) => {
            let message =
                format!("the run panicked in stage {}: {}", job.stage_name(), panic_text(panic.as_ref()));
            (true, ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "panic", message))
        }
    };
    end_spans(Some(&error.message));
    let state = match job.stopped() {
        Some(StopReason::Cancelled | StopReason::ClientGone) => State::Cancelled,
        _ => State::Error,
    };
    end(app, job, state, Err(error));
    suspect
}

/// Ends a job that was on the device, and says so in the log and the counters.
pub fn end(app: &App, job: &Arc<Job>, state: State, outcome: Result<queue::job::Picture, ApiError>) {
    app.metrics.in_progress.dec();
    if outcome.is_ok() {
        app.metrics.images.inc();
    }
    if job.finish(state, outcome) {
        crate::logging::job_ended(app, job);
    }
    app.queue.settle(job);
}

fn failure(app: &App, job: &Job, error: &flux2::Error) -> (bool, ApiError) {
    let server_error = |code, message| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, code, message);
    match error {
        flux2::Error::Stopped => match job.stopped() {
            Some(StopReason::Deadline) => (false, over_time(app, job)),
            Some(reason) => (false, queue::stopped(job, reason)),
            None => (false, ApiError::internal("the run stopped for no reason that is known")),
        },
        flux2::Error::Request(error) => (false, ApiError::field(error.parameter.clone(), &error.message)),
        flux2::Error::NonFinite { .. } => (false, server_error("non_finite", error.to_string())),
        flux2::Error::Device { .. } => {
            (true, server_error("device", format!("in stage {}: {error}", job.stage_name())))
        }
        _ => (false, server_error("internal", format!("in stage {}: {error}", job.stage_name()))),
    }
}

/// 504 with the request, the stage reached and the limit.
pub fn over_time(app: &App, job: &Job) -> ApiError {
    let message = format!(
        "request {} ran over the execution limit of {} s, in stage {} at step {} of {}",
        job.request_id,
        app.config.execution_limit,
        job.stage_name(),
        job.snapshot().step,
        job.params.num_steps
    );
    ApiError::new(StatusCode::GATEWAY_TIMEOUT, "execution_limit", message)
}

/// The card's keys in milliseconds, a stage that did not run as 0, and the total.
fn timing_ms(timing: &Timing, total: Duration) -> TimingMs {
    let round = |seconds: f64| (seconds * 1e6).round() / 1e3;
    let stages = Stage::ALL.iter().map(|stage| {
        let key = stage.timing_key();
        (key.to_owned(), round(timing.values.get(key).copied().unwrap_or(0.0)))
    });
    stages.chain([("total_ms".to_owned(), round(total.as_secs_f64()))]).collect()
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}

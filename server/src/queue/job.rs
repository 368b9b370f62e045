// SPDX-License-Identifier: Apache-2.0
//! One picture to make, and everything that is known about it: the record behind every route.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use flux2::{RgbImage, pipeline::Stage};
use opentelemetry::trace::SpanContext;
use serde::Serialize;
use tokio::sync::watch;
use utoipa::ToSchema;

use super::rates::Work;
use crate::{ask::Caller, errors::ApiError, picture::OutputFormat};

/// Who asks, for taking turns: the name of an API key, or the peer's address.
pub type Client = Arc<str>;

/// What a picture was asked to be.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Params {
    /// Prompt as given.
    pub prompt: String,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Seed of the noise.
    pub seed: u64,
    /// Denoising steps.
    pub num_steps: usize,
    /// Guidance scale, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guidance_scale: Option<f32>,
    /// Number of reference images.
    pub reference_count: usize,
    /// Tokens of the prompt with its chat layout.
    pub prompt_tokens: usize,
    /// Whether tokens beyond the model's length were cut.
    pub prompt_truncated: bool,
    /// File format of the result.
    pub output_format: OutputFormat,
    /// JPEG quality, 0 to 100.
    #[serde(skip)]
    pub quality: u8,
    /// Whether the size was given, not the default.
    #[serde(skip)]
    pub sized: bool,
    /// Steps after which a preview is made.
    #[serde(skip)]
    pub previews: Vec<usize>,
}

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Waiting its turn.
    Queued,
    /// On the device, or being encoded.
    Running,
    /// Finished with a picture.
    Done,
    /// Finished without one.
    Error,
    /// Taken back by its client.
    Cancelled,
}

/// Why a run was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum StopReason {
    /// Its client said so.
    Cancelled = 1,
    /// Nobody waits for it any more.
    ClientGone = 2,
    /// It ran over the execution limit.
    Deadline = 3,
    /// The server is shutting down.
    Draining = 4,
}

/// Milliseconds by the card's stage keys, and `total_ms`.
pub type TimingMs = std::collections::BTreeMap<String, f64>;

/// A finished picture.
#[derive(Debug)]
pub struct Picture {
    /// The encoded file.
    pub file: Bytes,
    /// Stage times.
    pub timing_ms: TimingMs,
    /// References taken from the cache.
    pub cached_references: usize,
}

/// Something that happened to a job, in order.
#[derive(Clone, Debug)]
pub enum JobEvent {
    /// It is on the device.
    Started,
    /// A denoising step is done.
    Step {
        /// Steps done, from 1.
        step: usize,
        /// Steps of the run.
        steps: usize,
        /// Seconds of this step.
        seconds: f64,
    },
    /// A preview, in the job's output format.
    Preview {
        /// Steps done, from 1.
        step: usize,
        /// The encoded file.
        file: Bytes,
    },
    /// It ended; the outcome says how.
    Ended,
}

#[derive(Debug)]
struct Record {
    state: State,
    stage: Option<Stage>,
    step: usize,
    started: Option<SystemTime>,
    finished: Option<(SystemTime, Instant)>,
    events: Vec<JobEvent>,
    outcome: Option<Result<Arc<Picture>, ApiError>>,
}

/// One picture to make.
#[derive(Debug)]
pub struct Job {
    /// Its id.
    pub id: String,
    /// Id of the request that created it.
    pub request_id: String,
    /// Who asked.
    pub client: Client,
    /// Span of that request.
    pub trace: SpanContext,
    /// What was asked.
    pub params: Params,
    /// What its time depends on.
    pub work: Work,
    /// When it was created.
    pub created: SystemTime,
    /// The same, for measuring the wait.
    pub queued_at: Instant,
    /// Whether it goes on when nobody waits (job API).
    pub detached: bool,
    /// Whether it is kept for a while when it has ended: job API, or an idempotency key.
    pub kept: bool,
    /// Synchronous requests that wait for it.
    pub waiters: AtomicUsize,
    references: Mutex<Vec<RgbImage>>,
    record: Mutex<Record>,
    stop: AtomicU8,
    work_done: AtomicU64,
    work_total: AtomicU64,
    version: watch::Sender<usize>,
}

/// A panic elsewhere leaves plain data behind: going on with it is right.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `GET /jobs/{id}` needs of the changing part.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// State.
    pub state: State,
    /// Stage that is running.
    pub stage: Option<Stage>,
    /// Denoising steps done.
    pub step: usize,
    /// When it came onto the device.
    pub started: Option<SystemTime>,
    /// When it ended.
    pub finished: Option<SystemTime>,
    /// How it ended.
    pub outcome: Option<Result<Arc<Picture>, ApiError>>,
}

impl Job {
    /// A new job that waits.
    pub fn new(
        caller: &Caller,
        params: Params,
        references: Vec<RgbImage>,
        work: Work,
        detached: bool,
        kept: bool,
    ) -> Self {
        Self {
            id: uuid::Uuid::new_v4().simple().to_string(),
            request_id: caller.request_id.clone(),
            client: caller.client.clone(),
            trace: caller.trace.clone(),
            work,
            params,
            created: SystemTime::now(),
            queued_at: Instant::now(),
            detached,
            kept: kept || detached,
            waiters: AtomicUsize::new(0),
            references: Mutex::new(references),
            record: Mutex::new(Record {
                state: State::Queued,
                stage: None,
                step: 0,
                started: None,
                finished: None,
                events: Vec::new(),
                outcome: None,
            }),
            stop: AtomicU8::new(0),
            work_done: AtomicU64::new(0),
            work_total: AtomicU64::new(0),
            version: watch::Sender::new(0),
        }
    }

    /// The changing part, as it is now.
    pub fn snapshot(&self) -> Snapshot {
        let record = lock(&self.record);
        Snapshot {
            state: record.state,
            stage: record.stage,
            step: record.step,
            started: record.started,
            finished: record.finished.map(|(time, _)| time),
            outcome: record.outcome.clone(),
        }
    }

    /// State.
    pub fn state(&self) -> State {
        lock(&self.record).state
    }

    /// How it ended, once it has.
    pub fn outcome(&self) -> Option<Result<Arc<Picture>, ApiError>> {
        lock(&self.record).outcome.clone()
    }

    /// Time since it ended.
    pub fn finished_for(&self) -> Option<Duration> {
        lock(&self.record).finished.map(|(_, at)| at.elapsed())
    }

    /// Bytes of pictures that it holds.
    pub fn memory(&self) -> usize {
        let record = lock(&self.record);
        let result = match &record.outcome {
            Some(Ok(picture)) => picture.file.len(),
            _ => 0,
        };
        let previews = record.events.iter().map(|event| match event {
            JobEvent::Preview { file, .. } => file.len(),
            _ => 0,
        });
        result + previews.sum::<usize>()
    }

    /// Events from number `from` on.
    pub fn events_from(&self, from: usize) -> Vec<JobEvent> {
        lock(&self.record).events.get(from..).map(<[JobEvent]>::to_vec).unwrap_or_default()
    }

    /// Number of events so far, watched.
    pub fn watch(&self) -> watch::Receiver<usize> {
        self.version.subscribe()
    }

    /// Waits until the job has ended.
    pub async fn ended(&self) -> Result<Arc<Picture>, ApiError> {
        let mut version = self.watch();
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            if version.changed().await.is_err() {
                return Err(ApiError::internal("the job was dropped without an outcome"));
            }
        }
    }

    /// Takes the references for the run.
    pub fn take_references(&self) -> Vec<RgbImage> {
        std::mem::take(&mut lock(&self.references))
    }

    /// The job comes onto the device.
    pub fn start(&self) {
        let mut record = lock(&self.record);
        record.state = State::Running;
        record.started = Some(SystemTime::now());
        self.push(&mut record, JobEvent::Started);
    }

    /// A stage begins.
    pub fn set_stage(&self, stage: Stage) {
        lock(&self.record).stage = Some(stage);
    }

    /// Stage that is running, by the card's key without its unit.
    pub fn stage_name(&self) -> &'static str {
        lock(&self.record).stage.map_or("start", stage_name)
    }

    /// Work done of the whole run.
    pub fn set_work(&self, done: u64, total: u64) {
        self.work_done.store(done, Ordering::Relaxed);
        self.work_total.store(total, Ordering::Relaxed);
    }

    /// Part of the run that is done, 0 to 1.
    pub fn progress(&self) -> f64 {
        let total = self.work_total.load(Ordering::Relaxed);
        if total == 0 { 0.0 } else { self.work_done.load(Ordering::Relaxed) as f64 / total as f64 }
    }

    /// A denoising step is done.
    pub fn step(&self, step: usize, steps: usize, seconds: f64) {
        let mut record = lock(&self.record);
        record.step = step;
        self.push(&mut record, JobEvent::Step { step, steps, seconds });
    }

    /// A preview is encoded. Comes to nothing when the job has ended meanwhile.
    pub fn preview(&self, step: usize, file: Bytes) {
        let mut record = lock(&self.record);
        if record.outcome.is_none() {
            self.push(&mut record, JobEvent::Preview { step, file });
        }
    }

    /// The job ends; the first outcome stands. Returns whether this was it.
    pub fn finish(&self, state: State, outcome: Result<Picture, ApiError>) -> bool {
        let mut record = lock(&self.record);
        if record.outcome.is_some() {
            return false;
        }
        record.state = state;
        record.stage = None;
        record.finished = Some((SystemTime::now(), Instant::now()));
        record.outcome = Some(outcome.map(Arc::new));
        self.push(&mut record, JobEvent::Ended);
        drop(record);
        self.take_references();
        true
    }

    /// Asks the run to stop; the first reason stands.
    pub fn stop(&self, reason: StopReason) {
        let _ = self.stop.compare_exchange(0, reason as u8, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Why the run is to stop.
    pub fn stopped(&self) -> Option<StopReason> {
        match self.stop.load(Ordering::Relaxed) {
            1 => Some(StopReason::Cancelled),
            2 => Some(StopReason::ClientGone),
            3 => Some(StopReason::Deadline),
            4 => Some(StopReason::Draining),
            _ => None,
        }
    }

    fn push(&self, record: &mut Record, event: JobEvent) {
        record.events.push(event);
        self.version.send_replace(record.events.len());
    }
}

/// Name of a stage: the card's key without its unit.
pub fn stage_name(stage: Stage) -> &'static str {
    stage.timing_key().trim_end_matches("_s")
}

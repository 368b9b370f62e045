// SPDX-License-Identifier: Apache-2.0
//! The bounded queue between the routes and the worker, and the register of jobs.
//!
//! Clients take turns ([`fair`]). A request is taken only if there is room and its estimated wait is within the limit;
//! otherwise the answer is 429 at once, with the time after which a try makes sense. One mutex guards it all: every
//! operation is short, and none waits for the device.

pub mod fair;
pub mod job;
pub mod rates;
mod register;

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use tokio::sync::watch;

pub use self::register::{Found, IdempotencyKey};
use self::{
    fair::FairQueue,
    job::{Job, State, StopReason, lock},
    rates::{Rates, Work},
    register::Register,
};
use crate::{config::Config, errors::ApiError, lifecycle::Phase};

/// Room and limits.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Jobs that may wait.
    pub size: usize,
    /// Jobs of one client that may wait.
    pub per_client: usize,
    /// Longest estimated wait in seconds.
    pub max_wait: f64,
    /// How long ended jobs are kept.
    pub ttl: Duration,
    /// Bytes of pictures that are kept.
    pub memory: usize,
    /// Ended jobs that are kept.
    pub count: usize,
}

impl From<&Config> for QueueLimits {
    fn from(config: &Config) -> Self {
        Self {
            size: config.queue_size,
            per_client: config.queue_per_client,
            max_wait: config.max_wait as f64,
            ttl: Duration::from_secs_f64(config.job_ttl),
            memory: config.job_memory << 20,
            count: config.job_count,
        }
    }
}

struct Running {
    job: Arc<Job>,
    since: Instant,
    expected: Option<f64>,
}

impl Running {
    /// Seconds that are left, by the part of the work that is done, else by the estimate.
    fn remaining(&self) -> Option<f64> {
        let elapsed = self.since.elapsed().as_secs_f64();
        let done = self.job.progress();
        if done > 0.1 {
            return Some(elapsed * (1.0 - done) / done);
        }
        self.expected.map(|expected| (expected - elapsed).max(0.0))
    }
}

#[derive(Default)]
struct Inner {
    waiting: FairQueue<Arc<Job>>,
    running: Option<Running>,
    register: Register,
    rates: Rates,
    closed: bool,
}

impl Inner {
    /// Seconds until the running job and then `ahead` are done; `None` while nothing was measured.
    fn wait_behind<'a>(&self, ahead: impl Iterator<Item = &'a Arc<Job>>) -> Option<f64> {
        let running = self.running.as_ref().map_or(Some(0.0), Running::remaining)?;
        ahead.map(|job| self.rates.estimate(job.work)).try_fold(running, |sum, next| Some(sum + next?))
    }

    fn place(&self, id: &str) -> Option<Place> {
        let position = self.waiting.order().position(|job| job.id == id)?;
        Some(Place { position, wait: self.wait_behind(self.waiting.order().take(position)) })
    }

    /// Takes a job back: out of the line at once, off the device at its next operation.
    fn withdraw(&mut self, job: &Arc<Job>, reason: StopReason) {
        job.stop(reason);
        if self.waiting.remove(|waiting| waiting.id == job.id).is_some() {
            job.finish(State::Cancelled, Err(stopped(job, reason)));
            self.settle(job);
        }
    }

    /// Forgets an ended job that nobody can ask for.
    fn settle(&mut self, job: &Arc<Job>) {
        if !job.kept && job.outcome().is_some() && job.waiters.load(Ordering::Relaxed) == 0 {
            self.register.remove(&job.id);
        }
    }
}

/// Where a waiting job stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Jobs that wait before it; the running one is not counted.
    pub position: usize,
    /// Seconds until its turn; `None` before anything was measured.
    pub wait: Option<f64>,
}

/// The queue.
pub struct Queue {
    inner: Mutex<Inner>,
    available: Condvar,
    changed: watch::Sender<u64>,
    limits: QueueLimits,
}

impl Queue {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        let (inner, changed) = (Mutex::default(), watch::Sender::new(0));
        Self { inner, available: Condvar::new(), changed, limits }
    }

    /// Takes `jobs` in, all or none. With an idempotency key that is known, the earlier jobs are returned instead.
    ///
    /// # Errors
    /// 422 for a key used with another content, 429 when there is no room, 503 when closed.
    pub fn submit(
        self: &Arc<Self>,
        jobs: Vec<Job>,
        key: Option<&IdempotencyKey>,
    ) -> Result<Vec<Waiter>, ApiError> {
        let mut inner = lock(&self.inner);
        if let Some(known) = key.map(|key| inner.register.find_key(key)).transpose()?.flatten() {
            return Ok(self.attach(known));
        }
        if inner.closed {
            return Err(ApiError::not_ready(&Phase::Draining));
        }
        self.admit(&inner, &jobs)?;
        let jobs: Vec<Arc<Job>> = jobs.into_iter().map(Arc::new).collect();
        for job in &jobs {
            inner.waiting.push(job.client.clone(), job.clone());
            inner.register.insert(job.clone());
        }
        if let Some(key) = key {
            inner.register.insert_key(key.clone(), jobs.clone());
        }
        let waiters = self.attach(jobs);
        drop(inner);
        self.available.notify_one();
        self.bump();
        Ok(waiters)
    }

    /// The jobs of an idempotency key, if it is known.
    ///
    /// # Errors
    /// 422 if it is known with another content.
    pub fn find_key(self: &Arc<Self>, key: &IdempotencyKey) -> Result<Option<Vec<Waiter>>, ApiError> {
        let mut inner = lock(&self.inner);
        Ok(inner.register.find_key(key)?.map(|jobs| self.attach(jobs)))
    }

    fn attach(self: &Arc<Self>, jobs: Vec<Arc<Job>>) -> Vec<Waiter> {
        let waiter = |job: Arc<Job>| {
            job.waiters.fetch_add(1, Ordering::Relaxed);
            Waiter { queue: self.clone(), job }
        };
        jobs.into_iter().map(waiter).collect()
    }

    fn admit(&self, inner: &Inner, jobs: &[Job]) -> Result<(), ApiError> {
        let Some(first) = jobs.first() else { return Ok(()) };
        let refuse = |code, message: String, retry: f64| {
            let retry = if retry.is_finite() { retry.ceil().clamp(1.0, 3600.0) as u64 } else { 5 };
            Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, code, message).retry_after(retry))
        };
        // A place is free when the running job is done; in a full line of one client, when it had its next turn.
        let next_place = inner.running.as_ref().and_then(Running::remaining).unwrap_or(f64::NAN);
        let waiting = inner.waiting.len();
        if waiting + jobs.len() > self.limits.size {
            let message = format!("the queue is full: {waiting} of {} requests wait", self.limits.size);
            return refuse("queue_full", message, next_place);
        }
        let own = inner.waiting.len_of(&first.client);
        if own + jobs.len() > self.limits.per_client {
            let limit = self.limits.per_client;
            let message = format!("{own} requests of this client wait already; at most {limit} may");
            return refuse("client_queue_full", message, next_place);
        }
        if let Some(wait) = inner.wait_behind(inner.waiting.ahead_of_next(&first.client))
            && wait > self.limits.max_wait
        {
            let message = format!(
                "the estimated wait of {wait:.0} s is over the limit of {:.0} s",
                self.limits.max_wait
            );
            return refuse("wait_too_long", message, wait - self.limits.max_wait);
        }
        Ok(())
    }

    /// The next job, for the worker; waits for one. `None` when the queue is closed.
    pub fn next(&self) -> Option<Arc<Job>> {
        let mut inner = lock(&self.inner);
        loop {
            if inner.closed {
                return None;
            }
            if let Some(job) = inner.waiting.pop() {
                let expected = inner.rates.estimate(job.work);
                inner.running = Some(Running { job: job.clone(), since: Instant::now(), expected });
                job.start();
                drop(inner);
                self.bump();
                return Some(job);
            }
            inner = self.available.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The device is free again; `seconds` if the run went to its end.
    pub fn off_device(&self, job: &Job, seconds: Option<f64>) {
        let mut inner = lock(&self.inner);
        inner.running = None;
        if let Some(seconds) = seconds {
            inner.rates.record(job.work, seconds);
        }
        drop(inner);
        self.bump();
    }

    /// A picture of `work` took `seconds`, outside the queue (warm-up).
    pub fn measured(&self, work: Work, seconds: f64) {
        lock(&self.inner).rates.record(work, seconds);
    }

    /// A job has ended: forget it if nobody can ask for it.
    pub fn settle(&self, job: &Arc<Job>) {
        lock(&self.inner).settle(job);
    }

    /// Takes a job back for its client. `false` if it has ended already.
    pub fn cancel(&self, job: &Arc<Job>) -> bool {
        let mut inner = lock(&self.inner);
        if job.outcome().is_some() {
            return false;
        }
        inner.withdraw(job, StopReason::Cancelled);
        drop(inner);
        self.bump();
        true
    }

    fn release(&self, job: &Arc<Job>) {
        let mut inner = lock(&self.inner);
        if job.waiters.fetch_sub(1, Ordering::Relaxed) == 1 && !job.detached {
            if job.outcome().is_none() {
                inner.withdraw(job, StopReason::ClientGone);
            }
            inner.settle(job);
            drop(inner);
            self.bump();
        }
    }

    /// Takes no more work and fails what waits.
    pub fn close(&self, phase: &Phase) {
        let mut inner = lock(&self.inner);
        inner.closed = true;
        while let Some(job) = inner.waiting.pop() {
            job.finish(State::Error, Err(ApiError::not_ready(phase)));
            inner.settle(&job);
        }
        drop(inner);
        self.available.notify_all();
        self.bump();
    }

    /// The job on the device, with the time since it started.
    pub fn running(&self) -> Option<(Arc<Job>, Duration)> {
        lock(&self.inner).running.as_ref().map(|running| (running.job.clone(), running.since.elapsed()))
    }

    /// Where a waiting job stands; `None` if it does not wait.
    pub fn place(&self, id: &str) -> Option<Place> {
        lock(&self.inner).place(id)
    }

    /// Jobs that wait.
    pub fn depth(&self) -> usize {
        lock(&self.inner).waiting.len()
    }

    /// Seconds that a picture takes, and that a new client would wait for its turn.
    pub fn estimates(&self, work: Work) -> (Option<f64>, Option<f64>) {
        let inner = lock(&self.inner);
        (inner.rates.estimate(work), inner.wait_behind(inner.waiting.ahead_of_next(&"".into())))
    }

    /// What is known about an id.
    pub fn find(&self, id: &str) -> Found {
        lock(&self.inner).register.find(id)
    }

    /// All jobs that are known, oldest first.
    pub fn all(&self) -> Vec<Arc<Job>> {
        lock(&self.inner).register.all()
    }

    /// Removes ended jobs that are over age, count or memory; returns how many.
    pub fn reap(&self) -> usize {
        let QueueLimits { ttl, count, memory, .. } = self.limits;
        lock(&self.inner).register.reap(ttl, count, memory)
    }

    /// Changes of the line, watched.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn bump(&self) {
        self.changed.send_modify(|version| *version = version.wrapping_add(1));
    }
}

/// Somebody who waits for a job. When the last one goes, a synchronous job goes with him.
pub struct Waiter {
    queue: Arc<Queue>,
    /// The job.
    pub job: Arc<Job>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.queue.release(&self.job);
    }
}

/// What a stopped job answers.
pub fn stopped(job: &Job, reason: StopReason) -> ApiError {
    match reason {
        StopReason::Cancelled => {
            ApiError::new(StatusCode::CONFLICT, "cancelled", "the job was cancelled by its client")
        }
        StopReason::ClientGone => ApiError::new(
            StatusCode::CONFLICT,
            "client_gone",
            "the client went away before the picture was made",
        ),
        StopReason::Deadline => ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            "execution_limit",
            format!("request {} ran over its execution limit in stage {}", job.request_id, job.stage_name()),
        ),
        StopReason::Draining => ApiError::not_ready(&Phase::Draining),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The server without a socket: queue, worker, encoder and what ends them.
//!
//! [`crate::serve`] puts a listener before it; the Python package's ASGI application hands it requests of its own.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    app::App,
    config::Config,
    encoder,
    exit::{Exit, StartError},
    lifecycle::Phase,
    queue::job::{State, StopReason},
    telemetry::Telemetry,
    worker::{self, Opener},
};

/// How long a load that cannot be interrupted may go on after SIGTERM. The CPU device has nothing to close; a card would
/// be waited for.
const LOAD_GRACE: Duration = Duration::from_secs(2);
/// How long the running picture may take to notice that it was stopped.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How long finished pictures may take to be encoded.
const ENCODE_GRACE: Duration = Duration::from_secs(10);
/// How often a device that does not answer is looked for.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);
/// How often old jobs are looked for.
const REAP_INTERVAL: Duration = Duration::from_secs(1);

/// A running engine.
pub struct Engine {
    /// Its state, with the routes' view of it.
    pub app: Arc<App>,
    worker: oneshot::Receiver<Result<(), StartError>>,
    encoder: JoinHandle<()>,
    reaper: JoinHandle<()>,
}

impl Engine {
    /// Starts to load `checkpoint`; called within the runtime. `ready` is called from the worker's thread once warm.
    ///
    /// # Errors
    /// A key file that cannot be read, a thread that cannot be made.
    pub fn start(
        config: &Config,
        checkpoint: PathBuf,
        opener: Opener,
        ready: impl FnOnce() + Send + 'static,
    ) -> Result<Self, StartError> {
        let app = Arc::new(App::new(config.clone(), checkpoint.clone())?);
        let (rasters, received) = mpsc::unbounded_channel();
        let encoder = tokio::spawn(encoder::run(app.clone(), received));
        let (report, worker) = oneshot::channel();
        let for_worker = app.clone();
        let run = move || {
            let options =
                worker::open_options(&for_worker.config, checkpoint, for_worker.sizes.limits.clone());
            let result = worker::run(&for_worker, &options, opener, &rasters, ready);
            // Nobody listens when the process has given up waiting.
            let _ = report.send(result);
        };
        std::thread::Builder::new()
            .name("worker".into())
            .spawn(run)
            .map_err(|error| StartError::new(Exit::Failure, error.to_string()))?;
        let reaping = app.clone();
        let reaper = tokio::spawn(async move {
            loop {
                sleep(REAP_INTERVAL).await;
                reaping.queue.reap();
            }
        });
        Ok(Self { app, worker, encoder, reaper })
    }

    /// Waits for the end of all work: after [`drain`], or because loading failed or the device was lost. Answers may still
    /// be on their way out; [`Self::end`] comes after them.
    ///
    /// # Errors
    /// What went wrong, with its exit code.
    pub async fn wait(&mut self) -> Result<(), StartError> {
        let draining = draining(self.app.clone());
        let result = tokio::select! {
            done = &mut self.worker => done.unwrap_or_else(|_| {
                Err(StartError::new(Exit::Failure, "the worker thread ended without a word"))
            }),
            error = stalled(self.app.clone()) => Err(error),
            () = draining => self.drained().await,
        };
        if let Err(error) = &result {
            self.app.life.go(Phase::Lost(error.message.clone()));
            self.app.queue.close(&self.app.life.phase());
        }
        self.reaper.abort();
        let grace = if result.is_ok() { ENCODE_GRACE } else { Duration::from_secs(1) };
        let _ = timeout(grace, &mut self.encoder).await;
        result
    }

    /// Sends what telemetry still holds.
    pub async fn end(self) {
        if self.app.telemetry.is_some() {
            let app = self.app;
            let _ = tokio::task::spawn_blocking(move || app.telemetry.as_ref().map(Telemetry::end)).await;
        }
    }

    async fn drained(&mut self) -> Result<(), StartError> {
        let limit = if self.app.model().is_none() {
            LOAD_GRACE
        } else {
            Duration::from_secs_f64(self.app.config.drain_limit)
        };
        if let Ok(done) = timeout(limit, &mut self.worker).await {
            return done.unwrap_or(Ok(()));
        }
        let Some((job, _)) = self.app.queue.running() else { return Ok(()) };
        tracing::warn!(job = job.id, "the running picture is over the drain limit and is stopped");
        job.stop(StopReason::Draining);
        if timeout(STOP_GRACE, &mut self.worker).await.is_err() {
            job.finish(State::Error, Err(crate::queue::stopped(&job, StopReason::Draining)));
        }
        Ok(())
    }
}

/// See [`crate::serve::Server::drain`]; for the signal handler, which has no server.
pub fn drain(app: &App) {
    if app.life.go(Phase::Draining) {
        tracing::info!(waiting = app.queue.depth(), "draining: no new work, the running picture may finish");
    }
    app.queue.close(&Phase::Draining);
}

/// Returns when the process has been asked to stop.
async fn draining(app: Arc<App>) {
    // The sender lives in `app`.
    let _ = app.life.watch().wait_for(|phase| *phase == Phase::Draining).await;
}

/// Returns when the device has not answered for longer than the limits allow; its job gets its 504.
async fn stalled(app: Arc<App>) -> StartError {
    let limit = app.config.execution_limit() + Duration::from_secs_f64(app.config.stall_limit);
    loop {
        sleep(WATCH_INTERVAL).await;
        let Some((job, since)) = app.queue.running() else { continue };
        if since < limit {
            continue;
        }
        job.stop(StopReason::Deadline);
        job.finish(State::Error, Err(worker::over_time(&app, &job)));
        let why = format!(
            "the device has not answered for {:.0} s in stage {}",
            since.as_secs_f64(),
            job.stage_name()
        );
        return StartError::new(Exit::Device, why);
    }
}

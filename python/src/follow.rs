// SPDX-License-Identifier: Apache-2.0
//! Follows a run for Python: calls the callback, looks for Ctrl-C before every operation, keeps the stages' times.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use flux2::{
    Progress,
    pipeline::{Event, Stage},
};
use pyo3::prelude::*;

use crate::errors;

/// Least time between two looks for a signal: each takes the GIL, for which another thread may make us wait.
const SIGNALS: Duration = Duration::from_millis(10);
/// Least time between two calls that tell of work within a step.
const WORK: Duration = Duration::from_millis(100);

/// What a run tells, and what ends it.
pub struct Follow<'a> {
    callback: Option<Py<PyAny>>,
    closing: &'a AtomicBool,
    /// Why the run has to end: raised in place of its result.
    pub failure: Option<PyErr>,
    stages: Vec<(Stage, Instant)>,
    /// Seconds of each denoising step.
    pub step_s: Vec<f64>,
    step: usize,
    steps: usize,
    fraction: f64,
    looked: Instant,
    told: Instant,
}

impl<'a> Follow<'a> {
    /// Follows a run of `steps` steps that ends when `closing` is set.
    pub fn new(callback: Option<Py<PyAny>>, closing: &'a AtomicBool, steps: usize) -> Self {
        let now = Instant::now();
        Self {
            callback,
            closing,
            failure: None,
            stages: Vec::new(),
            step_s: Vec::new(),
            step: 0,
            steps,
            fraction: 0.0,
            looked: now,
            told: now,
        }
    }

    /// Seconds of each stage that ran, for a run that ends now.
    pub fn stage_seconds(&self) -> Vec<(&'static str, f64)> {
        let ends = self.stages.iter().skip(1).map(|(_, at)| *at).chain([Instant::now()]);
        self.stages
            .iter()
            .zip(ends)
            .map(|((stage, start), end)| (stage.timing_key(), (end - *start).as_secs_f64()))
            .collect()
    }

    /// Calls the callback; `False` stops the run, an exception ends it.
    fn tell(&mut self) {
        let (Some(callback), None) = (&self.callback, &self.failure) else { return };
        self.told = Instant::now();
        let stage = self.stages.last().map_or("", |(stage, _)| stage.timing_key().trim_end_matches("_s"));
        let said = Python::attach(|py| {
            let answer = callback.bind(py).call1((stage, self.step, self.steps, self.fraction))?;
            let stop = answer.is(pyo3::types::PyBool::new(py, false));
            if stop { Err(errors::stopped(py)) } else { Ok(()) }
        });
        self.failure = said.err();
    }
}

impl Progress for Follow<'_> {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Stage { stage } => {
                self.stages.push((stage, Instant::now()));
                self.tell();
            }
            Event::Work { done, total } => {
                self.fraction = if total == 0 { 0.0 } else { done as f64 / total as f64 };
                if self.told.elapsed() >= WORK || done == total {
                    self.tell();
                }
            }
            Event::Step { step, steps, seconds } => {
                (self.step, self.steps) = (step, steps);
                self.step_s.push(seconds);
                self.tell();
            }
            _ => {}
        }
    }

    fn stopped(&mut self) -> bool {
        if self.failure.is_none() && self.closing.load(Ordering::Acquire) {
            self.failure =
                Some(Python::attach(|py| errors::device(py, "the device was closed during the run")));
        }
        if self.failure.is_none() && self.looked.elapsed() >= SIGNALS {
            self.failure = raised_by_signal();
            self.looked = Instant::now();
        }
        self.failure.is_some()
    }
}

/// What Python's handler of a signal that came in the meantime raises: `KeyboardInterrupt` for Ctrl-C.
#[expect(clippy::redundant_closure_for_method_calls, reason = "the method itself is for one lifetime alone")]
pub fn raised_by_signal() -> Option<PyErr> {
    Python::attach(|py| py.check_signals()).err()
}

// SPDX-License-Identifier: Apache-2.0
//! Where the process is in its life: starting → loading → warm → draining, or lost.
//!
//! Readiness (`/health`) is a function of this alone. Nothing leaves `Draining` or `Lost`.

use std::time::{Duration, Instant};

use tokio::sync::watch;

/// A state of the process.
#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    /// Preflight and binding.
    Starting,
    /// Opening the device, reading weights, warming up.
    Loading {
        /// What is being done: `load` or `warm_up`.
        step: &'static str,
        /// Part of it that is done, 0 to 1; `None` where that is not known.
        progress: Option<f64>,
    },
    /// Ready for work.
    Warm,
    /// Asked to stop: no new work.
    Draining,
    /// The device is gone: the process is about to exit.
    Lost(String),
}

impl Phase {
    /// Its name in `/health`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Loading { .. } => "loading",
            Self::Warm => "warm",
            Self::Draining => "draining",
            Self::Lost(_) => "lost",
        }
    }

    /// Seconds after which a client may try again.
    pub const fn retry_after(&self) -> u64 {
        match self {
            Self::Starting | Self::Loading { .. } => 5,
            Self::Warm => 1,
            Self::Draining | Self::Lost(_) => 30,
        }
    }
}

/// The phase, watched by whoever needs it.
#[derive(Debug)]
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    started: Instant,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { phase: watch::Sender::new(Phase::Starting), started: Instant::now() }
    }
}

impl Lifecycle {
    /// The phase now.
    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// Whether work is taken.
    pub fn warm(&self) -> bool {
        *self.phase.borrow() == Phase::Warm
    }

    /// The phase, if it is one of those that no work survives.
    pub fn phase_if_ended(&self) -> Option<Phase> {
        let phase = self.phase.borrow();
        matches!(*phase, Phase::Draining | Phase::Lost(_)).then(|| phase.clone())
    }

    /// Time since the process started.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Goes to `next`, unless the process is already draining or lost; returns whether it went.
    pub fn go(&self, next: Phase) -> bool {
        self.phase.send_if_modified(|phase| {
            let last = match phase {
                Phase::Lost(_) => true,
                Phase::Draining => !matches!(next, Phase::Lost(_)),
                _ => false,
            };
            if last || *phase == next {
                return false;
            }
            *phase = next;
            true
        })
    }

    /// Changes of the phase.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C and SIGTERM: a run stops between two operations; loading, which cannot, ends at once. Nothing is half written.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::failure::Failure;

static RUNNING: AtomicBool = AtomicBool::new(false);
static STOPPED: AtomicBool = AtomicBool::new(false);
static WRITING: AtomicBool = AtomicBool::new(false);

/// Takes over the signals for the rest of the process.
pub fn install() -> Result<(), Failure> {
    ctrlc::set_handler(|| {
        if (!RUNNING.load(Relaxed) || STOPPED.swap(true, Relaxed)) && !WRITING.load(Relaxed) {
            std::process::exit(i32::from(Failure::Interrupted.code()));
        }
    })
    .map_err(|error| Failure::Other(format!("signals cannot be handled: {error}")))
}

/// From now on the work looks at [`stopped`], and the first signal is left to it.
pub fn running() {
    RUNNING.store(true, Relaxed);
}

/// From now on signals are ignored: the picture is written in less time than it takes to stop.
pub fn writing() {
    WRITING.store(true, Relaxed);
}

/// Whether to stop.
pub fn stopped() -> bool {
    STOPPED.load(Relaxed)
}

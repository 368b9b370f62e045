// SPDX-License-Identifier: Apache-2.0
//! Progress on standard error: a bar on a terminal, a line now and then elsewhere, nothing if unwanted.

use std::{
    io::{IsTerminal as _, Write as _},
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::progress::{Progress, size};

/// Least time between two lines where there is no terminal.
const LINES: Duration = Duration::from_secs(5);

/// A bar over all files of a transfer.
#[derive(Debug)]
pub struct Bar {
    drawn: ProgressBar,
    terminal: bool,
    wanted: bool,
    last: Mutex<Instant>,
}

impl Bar {
    /// A bar; `wanted` is false for `--json` and for `HF_HUB_DISABLE_PROGRESS_BARS`. Notes are shown all the same.
    pub fn new(wanted: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style =
            "[{bar:32}] {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template").progress_chars("=> "));
        Self { drawn: bar, terminal, wanted, last: Mutex::new(Instant::now()) }
    }

    fn line(&self, text: &str) {
        // Standard error that went away is no reason to stop a download.
        self.drawn.suspend(|| drop(writeln!(std::io::stderr(), "{text}")));
    }
}

impl Progress for Bar {
    fn start(&self, bytes: u64, there: u64, files: usize) {
        if !self.wanted {
            return;
        }
        self.line(&format!(
            "{files} files, {}, of which {} are to be transferred",
            size(bytes),
            size(bytes - there)
        ));
        // A push has two parts: sending and reading back.
        self.drawn.reset();
        self.drawn.set_length(bytes);
        self.drawn.set_position(there);
        self.drawn.reset_eta();
        if self.terminal {
            self.drawn.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    fn add(&self, bytes: i64) {
        if bytes < 0 {
            self.drawn.dec(bytes.unsigned_abs());
        } else {
            self.drawn.inc(bytes.unsigned_abs());
        }
        if !self.wanted || self.terminal {
            return;
        }
        let Ok(mut last) = self.last.try_lock() else { return };
        if last.elapsed() >= LINES {
            *last = Instant::now();
            let total = self.drawn.length().unwrap_or_default();
            let done = self.drawn.position();
            self.line(&format!("{} of {} ({} %)", size(done), size(total), 100 * done / total.max(1)));
        }
    }

    fn note(&self, text: &str) {
        self.line(text);
    }

    fn finish(&self) {
        self.drawn.finish_and_clear();
    }
}

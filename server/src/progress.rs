// SPDX-License-Identifier: Apache-2.0
//! What a run shows on standard error: a bar on a terminal, lines otherwise, nothing with `--json`.

use std::{io::IsTerminal, path::Path, time::Instant};

use flux2::{
    Progress,
    pipeline::{Event, Stage},
};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{interrupt, stdout::tell};

/// How progress is shown.
#[derive(Clone, Copy, Debug)]
pub enum Display {
    /// A bar that is drawn again and again.
    Bar,
    /// A line when a part is done.
    Lines,
    /// Not at all.
    Quiet,
}

impl Display {
    /// A bar where somebody sees it.
    pub fn of_terminal() -> Self {
        if std::io::stderr().is_terminal() { Self::Bar } else { Self::Lines }
    }

    /// Shows that a checkpoint is being read.
    pub fn loading(self, checkpoint: &Path) -> Loading {
        let bar = match self {
            Self::Bar => ProgressBar::no_length().with_message(format!("reading {}", checkpoint.display())),
            _ => ProgressBar::hidden(),
        };
        let style = "{msg} [{bar:32}] {bytes} of {total_bytes}";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template").progress_chars("=> "));
        Loading { display: self, bar }
    }
}

/// A checkpoint being read.
pub struct Loading {
    display: Display,
    bar: ProgressBar,
}

impl Loading {
    /// So many bytes of all are on the device.
    pub fn read(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    /// The checkpoint is read.
    pub fn finish(self, model: &str, seconds: f64) {
        self.bar.finish_and_clear();
        if !matches!(self.display, Display::Quiet) {
            print_part(&format!("{model} loaded"), seconds);
        }
    }
}

/// Follows a run.
pub struct Reporter {
    display: Display,
    bar: ProgressBar,
    stage: Option<(Stage, Instant)>,
}

impl Reporter {
    /// Follows a run on `display`.
    pub fn new(display: Display) -> Self {
        let bar = match display {
            Display::Bar => ProgressBar::no_length(),
            Display::Lines | Display::Quiet => ProgressBar::hidden(),
        };
        let style = "{msg:<20} [{bar:32}] {percent:>3} %  {elapsed} gone, {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template").progress_chars("=> "));
        Self { display, bar, stage: None }
    }

    /// The run is over, one way or the other.
    pub fn finish(&mut self) {
        self.end_stage();
        self.bar.finish_and_clear();
    }

    fn end_stage(&mut self) {
        let Some((stage, start)) = self.stage.take() else { return };
        if !matches!(self.display, Display::Quiet) && !interrupt::stopped() {
            self.bar.suspend(|| print_part(name(stage), start.elapsed().as_secs_f64()));
        }
    }
}

impl Progress for Reporter {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Stage { stage } => {
                self.end_stage();
                self.stage = Some((stage, Instant::now()));
                self.bar.set_message(name(stage));
            }
            Event::Work { done, total } => {
                self.bar.set_length(total);
                self.bar.set_position(done);
            }
            Event::Step { step, steps, seconds } => {
                if matches!(self.display, Display::Lines) {
                    print_part(&format!("  step {step} of {steps}"), seconds);
                }
                self.bar.set_message(format!("denoising {step}/{steps}"));
            }
            _ => {}
        }
    }

    fn stopped(&mut self) -> bool {
        interrupt::stopped()
    }
}

/// One line: a part of the run and how long it took.
pub fn print_part(part: &str, seconds: f64) {
    tell!("{part:<30} {seconds:>8.2} s");
}

fn name(stage: Stage) -> &'static str {
    match stage {
        Stage::TextEncoder => "text encoder",
        Stage::ReferenceEncode => "reference encode",
        Stage::Context => "context",
        Stage::Dit => "denoising",
        Stage::VaeDecode => "VAE decode",
    }
}

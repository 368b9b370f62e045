// SPDX-License-Identifier: Apache-2.0
//! A pipeline that does what a test tells it: be slow, die, stall, panic, or produce values that are not finite.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use flux2::{
    Error, Pipeline, Progress, Request, Result, RgbImage,
    device::{MemoryReport, Precision},
    pipeline::{Event, Latents, ModelInfo, PromptEmbeds, References, Stage, Timing},
    prompt::PromptTokenizer,
};

use crate::support::TINY;

/// What a run does, by its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// "die": a device error, and none of the following runs succeeds.
    Die,
    /// "hiccup": a device error; the next run is well.
    Hiccup,
    /// "panic": a panic.
    Panic,
    /// "nan": values that are not finite.
    NonFinite,
    /// "stall": an operation that never returns.
    Stall,
}

/// Holds runs back until it is opened.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    /// Runs that have begun.
    pub begun: AtomicUsize,
}

impl Gate {
    pub fn opened() -> Arc<Self> {
        let gate = Self::default();
        gate.open();
        Arc::new(gate)
    }

    pub fn closed() -> Arc<Self> {
        Arc::default()
    }

    pub fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn is_open(&self) -> bool {
        *self.open.lock().unwrap()
    }
}

/// See the module.
pub struct Scripted {
    info: ModelInfo,
    tokenizer: Arc<PromptTokenizer>,
    gate: Arc<Gate>,
    step: Duration,
    dead: bool,
}

impl Scripted {
    /// A pipeline whose steps take `step` each and wait for `gate` while that is closed.
    pub fn new(gate: Arc<Gate>, step: Duration) -> Self {
        let spec = &flux2::spec::KLEIN;
        Self {
            info: ModelInfo {
                model: "scripted".into(),
                spec,
                device: "scripted".into(),
                mesh: [1, 1],
                precision: Precision::F32,
                limits: spec.limits.clone().with_small_sizes(),
                prompt_embeds_width: 0,
                memory: MemoryReport::default(),
            },
            tokenizer: Arc::new(
                PromptTokenizer::load(&std::path::Path::new(TINY).join("tokenizer"), &flux2::prompt::QWEN3)
                    .unwrap(),
            ),
            gate,
            step,
            dead: false,
        }
    }

    fn fail(&mut self, fault: Fault) -> Error {
        match fault {
            Fault::Panic => panic!("scripted panic"),
            Fault::NonFinite => Error::NonFinite { stage: "dit".into(), bad: 3, total: 9 },
            Fault::Stall => loop {
                std::thread::park();
            },
            Fault::Die | Fault::Hiccup => {
                self.dead = fault == Fault::Die;
                Error::Device { device: "scripted".into(), operation: "linear", what: "bus error".into() }
            }
        }
    }
}

fn fault(prompt: &str) -> Option<Fault> {
    match prompt {
        "die" => Some(Fault::Die),
        "hiccup" => Some(Fault::Hiccup),
        "panic" => Some(Fault::Panic),
        "nan" => Some(Fault::NonFinite),
        "stall" => Some(Fault::Stall),
        _ => None,
    }
}

/// A picture that only this prompt and seed have.
pub fn picture(request: &Request) -> RgbImage {
    let mut hash = request.seed;
    for byte in request.prompt.bytes() {
        hash = hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte);
    }
    RgbImage::from_fn(request.width as u32, request.height as u32, |x, y| {
        let value = hash.rotate_left(x % 64).wrapping_add(u64::from(y));
        image::Rgb([value as u8, (value >> 8) as u8, (value >> 16) as u8])
    })
}

impl Pipeline for Scripted {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenizer(&self) -> Arc<PromptTokenizer> {
        self.tokenizer.clone()
    }

    fn generate(&mut self, request: &Request, progress: &mut dyn Progress) -> Result<(RgbImage, Timing)> {
        if self.dead {
            return Err(self.fail(Fault::Die));
        }
        let image = picture(request);
        let warm_up = request.prompt == "warm-up";
        if !warm_up {
            self.gate.begun.fetch_add(1, Ordering::SeqCst);
        }
        let total = request.steps as u64;
        for step in 1..=request.steps {
            if step == 1 {
                progress.event(Event::Stage { stage: Stage::Dit });
            }
            let start = Instant::now();
            loop {
                if progress.stopped() {
                    return Err(Error::Stopped);
                }
                if warm_up || (self.gate.is_open() && start.elapsed() >= self.step) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            if step == 2
                && let Some(fault) = fault(&request.prompt)
            {
                return Err(self.fail(fault));
            }
            progress.event(Event::Work { done: step as u64, total });
            progress.event(Event::Step {
                step,
                steps: request.steps,
                seconds: start.elapsed().as_secs_f64(),
            });
            if step < request.steps && progress.wants_preview(step, request.steps) {
                progress.event(Event::Preview { step, image: &image });
            }
        }
        Ok((image, Timing::default()))
    }

    fn encode(&mut self, _prompt: &str, _progress: &mut dyn Progress) -> Result<PromptEmbeds> {
        unreachable!("the server calls generate alone")
    }

    fn references(&mut self, _images: &[RgbImage], _progress: &mut dyn Progress) -> Result<References> {
        unreachable!("the server calls generate alone")
    }

    fn denoise(
        &mut self,
        _embeds: &PromptEmbeds,
        _references: &References,
        _width: usize,
        _height: usize,
        _seed: u64,
        _progress: &mut dyn Progress,
    ) -> Result<Latents> {
        unreachable!("the server calls generate alone")
    }

    fn decode(&mut self, _latents: &Latents, _progress: &mut dyn Progress) -> Result<RgbImage> {
        unreachable!("the server calls generate alone")
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `bench`: how fast this machine runs the model, stage by stage, against what its arithmetic units can do at most.

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use clap::Args;
use flux2::{
    DeviceChoice, OpenOptions, Request, RgbImage,
    device::cpu::{CpuDevice, CpuOptions},
    model::Configs,
    pipeline::Pipeline,
    plan::{self, Run},
    snapshot::text_encoder_directory,
};
use serde::Serialize;

use super::print_json;
use crate::{
    cli::{CheckpointArgs, DeviceArgs},
    failure::Failure,
    interrupt,
    progress::{Display, Reporter},
    stdout::print_line,
};

const PROMPT: &str = "A red fox standing in fresh snow at dawn, wildlife photography";
/// Side of the reference images: the largest that the model sees.
const REFERENCE: u32 = 1024;
/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Measure pictures: seconds, floating-point rate and memory
#[derive(Args)]
pub struct Bench {
    /// Size of the pictures; several for several measurements
    #[arg(long = "size", value_name = "WIDTHxHEIGHT", default_values = ["512x512", "1024x1024"], value_parser = size)]
    sizes: Vec<[usize; 2]>,
    /// Pictures of each size that are counted; one more is made before, to warm up
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    runs: u8,
    /// Reference images of 1024×1024, new for each picture
    #[arg(long, value_name = "N", default_value_t = 0)]
    references: u8,
    /// Print each stage, not only whole pictures
    #[arg(long)]
    stages: bool,
    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    json: bool,
    /// Accept sizes from 16 pixels, for tests and small checkpoints
    #[arg(long, hide = true)]
    allow_small: bool,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    cpu: String,
    device: String,
    dtype: &'static str,
    model: String,
    load_s: f64,
    /// What multiplies matrices, of all threads, in registers.
    peak_tflops: f64,
    sizes: Vec<SizeAnswer>,
}

#[derive(Serialize)]
struct SizeAnswer {
    width: usize,
    height: usize,
    references: usize,
    runs: usize,
    /// By stage, and `picture` for all of them.
    stages: BTreeMap<&'static str, StageAnswer>,
    /// Most anonymous memory at once; the weights are mapped and not in it.
    peak_anonymous_bytes: u64,
}

#[derive(Serialize)]
struct StageAnswer {
    min_s: f64,
    median_s: f64,
    max_s: f64,
    tflop: f64,
    /// At the median.
    tflops: f64,
}

impl Bench {
    /// Runs the command.
    pub fn run(&self) -> Result<(), Failure> {
        interrupt::install()?;
        let checkpoint = self.checkpoint.find()?;
        let text_encoder = self.checkpoint.text_encoder();
        let spec = flux2::spec::of_checkpoint(&checkpoint).map_err(Failure::checkpoint)?;
        let text_configs = text_encoder_directory(&checkpoint, text_encoder.as_deref());
        let configs = Configs::read(&checkpoint, &text_configs).map_err(Failure::checkpoint)?;
        let limits = spec.limits.clone();
        let limits = if self.allow_small { limits.with_small_sizes() } else { limits };
        for &[width, height] in &self.sizes {
            let references = vec![RgbImage::new(64, 64); usize::from(self.references)];
            let request = Request { width, height, references, steps: spec.steps, ..Request::new(PROMPT) };
            limits.check(&request).map_err(|error| Failure::request(&error, &[]))?;
        }

        let DeviceChoice::Cpu { threads } = self.device.choice();
        let cpu = CpuDevice::new(CpuOptions { precision: self.device.precision(), threads })?;
        let peak = cpu.peak_flops(Duration::from_secs(1));
        drop(cpu);
        let display = if self.json { Display::Quiet } else { Display::of_terminal() };
        let options = OpenOptions {
            checkpoint,
            text_encoder,
            device: self.device.choice(),
            precision: self.device.precision(),
            limits: Some(limits),
        };
        let start = Instant::now();
        let mut pipeline = flux2::open(&options, &mut |_, _| ()).map_err(Failure::checkpoint)?;
        let load_s = start.elapsed().as_secs_f64();
        let info = pipeline.info();
        let mut answer = Answer {
            cpu: cpu_model(),
            device: info.device.clone(),
            dtype: info.precision.name(),
            model: info.model.clone(),
            load_s,
            peak_tflops: peak / 1e12,
            sizes: Vec::new(),
        };
        if !self.json {
            print_line!("{}: {}, {}", answer.cpu, answer.device, answer.dtype);
            print_line!("{} loaded in {load_s:.2} s; peak {:.3} TFLOP/s", answer.model, answer.peak_tflops);
        }
        let prompt = spec.prompt.real(pipeline.tokenizer().encode(PROMPT)?.ids.len());
        interrupt::running();
        for &[width, height] in &self.sizes {
            let run = Run {
                size: [height, width],
                references: vec![[REFERENCE as usize; 2]; usize::from(self.references)],
                steps: spec.steps,
                prompt: prompt.clone(),
            };
            let flops = plan::plan(&configs, spec, &run)?
                .stages
                .iter()
                .map(|stage| (stage.stage.timing_key(), stage.flops()))
                .collect();
            let request = Request { width, height, steps: spec.steps, ..Request::new(PROMPT) };
            let measured = self.measure(pipeline.as_mut(), request, &flops, display)?;
            if !self.json {
                self.print(&measured, answer.peak_tflops)?;
            }
            answer.sizes.push(measured);
        }
        if self.json { print_json(&answer) } else { Ok(()) }
    }

    fn measure(
        &self,
        pipeline: &mut dyn Pipeline,
        mut request: Request,
        flops: &BTreeMap<&'static str, u64>,
        display: Display,
    ) -> Result<SizeAnswer, Failure> {
        let memory = AnonymousMemory::watch();
        let mut seconds = BTreeMap::<&'static str, Vec<f64>>::new();
        for run in 0..=self.runs {
            request.references = (0..self.references)
                .map(|i| RgbImage::from_pixel(REFERENCE, REFERENCE, image::Rgb([run, i, 128])))
                .collect();
            let mut reporter = Reporter::new(display);
            let start = Instant::now();
            let result = pipeline.generate(&request, &mut reporter);
            let total = start.elapsed().as_secs_f64();
            reporter.finish();
            let (_, timing) = result?;
            if run > 0 {
                seconds.entry("picture").or_default().push(total);
                for (stage, value) in timing.values {
                    seconds.entry(stage).or_default().push(value);
                }
            }
        }
        let all = flops.values().sum::<u64>();
        let stages = seconds
            .into_iter()
            .filter(|(stage, _)| *stage == "picture" || flops.contains_key(stage))
            .map(|(stage, mut seconds)| {
                seconds.sort_by(f64::total_cmp);
                let median_s = seconds[seconds.len() / 2];
                let tflop = flops.get(stage).copied().unwrap_or(all) as f64 / 1e12;
                let (min_s, max_s) = (seconds[0], seconds[seconds.len() - 1]);
                let answer = StageAnswer { min_s, median_s, max_s, tflop, tflops: tflop / median_s };
                (stage.trim_end_matches("_s"), answer)
            })
            .collect();
        Ok(SizeAnswer {
            width: request.width,
            height: request.height,
            references: request.references.len(),
            runs: usize::from(self.runs),
            stages,
            peak_anonymous_bytes: memory.peak(),
        })
    }

    fn print(&self, size: &SizeAnswer, peak: f64) -> Result<(), Failure> {
        print_line!(
            "\n{}×{}, references: {}; {:.2} GB of anonymous memory at most",
            size.width,
            size.height,
            size.references,
            size.peak_anonymous_bytes as f64 / 1e9
        );
        print_line!(
            "{:<18} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9}",
            "",
            "min s",
            "median s",
            "max s",
            "TFLOP",
            "TFLOP/s",
            "of peak"
        );
        for (stage, answer) in size.stages.iter().filter(|(stage, _)| self.stages || **stage == "picture") {
            print_line!(
                "{stage:<18} {:>9.2} {:>9.2} {:>9.2} {:>9.3} {:>10.3} {:>8.0}%",
                answer.min_s,
                answer.median_s,
                answer.max_s,
                answer.tflop,
                answer.tflops,
                100.0 * answer.tflops / peak
            );
        }
        Ok(())
    }
}

fn size(text: &str) -> Result<[usize; 2], String> {
    let parsed = text.split_once(['x', '×']).and_then(|(w, h)| Some([w.parse().ok()?, h.parse().ok()?]));
    parsed.ok_or_else(|| "a size is written as 512x512: width, x, height".to_owned())
}

fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown processor", |(_, name)| name.trim()).to_owned()
}

/// Watches how much anonymous memory this process holds.
struct AnonymousMemory {
    peak: Arc<AtomicU64>,
    done: Arc<AtomicBool>,
    watcher: JoinHandle<()>,
}

impl AnonymousMemory {
    fn watch() -> Self {
        let (peak, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let watcher = thread::spawn({
            let (peak, done) = (Arc::clone(&peak), Arc::clone(&done));
            move || {
                while !done.load(Ordering::Relaxed) {
                    peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
                    thread::sleep(LOOK);
                }
            }
        });
        Self { peak, done, watcher }
    }

    /// The most bytes so far; ends the watch.
    fn peak(self) -> u64 {
        self.done.store(true, Ordering::Relaxed);
        // A watcher that died has counted what it saw.
        let _ = self.watcher.join();
        self.peak.load(Ordering::Relaxed)
    }
}

/// `RssAnon`, 0 where the system does not tell.
fn anonymous_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(0, |kib| 1024 * kib)
}

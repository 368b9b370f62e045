// SPDX-License-Identifier: Apache-2.0
//! `plan`: what a run will compute, from the configuration files alone.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use flux2::{
    Request, RgbImage,
    model::Configs,
    pipeline::Stage,
    plan::{Run, StagePlan, plan},
    spec::{self, ModelSpec},
};
use serde::Serialize;
use server::config::Published;

use super::print_json;
use crate::{failure::Failure, stdout::print_line};

/// Height and width of the reference images that are counted: the largest that the model sees.
const REFERENCE: [usize; 2] = [1024, 1024];

/// Count the operations, floating-point operations and bytes of a run, without weights
#[derive(Args)]
pub struct Plan {
    /// Width in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 1024)]
    width: usize,
    /// Height in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 1024)]
    height: usize,
    /// Number of reference images, counted at 1024×1024
    #[arg(long, value_name = "N", default_value_t = 0)]
    references: u8,
    /// Denoising steps [default: the model's own]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Tokens of the prompt with the chat's own. Fewer cost less where the padding comes before the prompt (dev)
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Published model
    #[arg(long, value_enum, default_value_t, conflicts_with = "checkpoint")]
    model: Published,
    /// Checkpoint directory; only its configuration files are read
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Print one JSON object on standard output
    #[arg(long)]
    json: bool,
    /// Accept sizes from 16 pixels, for tests and small checkpoints
    #[arg(long, hide = true)]
    allow_small: bool,
}

#[derive(Serialize)]
struct Answer {
    model: String,
    width: usize,
    height: usize,
    steps: usize,
    references: usize,
    /// Rows of the joint sequence: text, picture and references.
    sequence: usize,
    parameters: Parameters,
    /// Bytes of these in bf16.
    weight_bytes: Parameters,
    /// Padding before the prompt, where one row stands for all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    padding: Option<Padding>,
    #[serde(flatten)]
    total: Count,
    peak_tensor_bytes: u64,
    stages: Vec<StageAnswer>,
}

#[derive(Serialize)]
struct Parameters {
    text_encoder: u64,
    transformer: u64,
    vae: u64,
}

#[derive(Serialize)]
struct Padding {
    /// Positions that one row stands for.
    positions: usize,
    /// Of the text encoder, with one row for them.
    flops: u64,
    /// Of the text encoder, with a row for each.
    flops_of_all_rows: u64,
}

#[derive(Serialize)]
struct StageAnswer {
    stage: &'static str,
    #[serde(flatten)]
    total: Count,
    by_operation: BTreeMap<&'static str, Count>,
}

#[derive(Default, Serialize)]
struct Count {
    operations: u64,
    flops: u64,
    /// Of the results, at four bytes a value.
    bytes: u64,
}

impl Count {
    fn add(&mut self, operations: u64, flops: u64, bytes: u64) {
        self.operations += operations;
        self.flops += flops;
        self.bytes += bytes;
    }
}

impl Plan {
    /// Runs the command.
    pub fn run(&self) -> Result<(), Failure> {
        let answer = self.answer()?;
        if self.json {
            return print_json(&answer);
        }
        print_table(&answer)
    }

    fn answer(&self) -> Result<Answer, Failure> {
        let (model, configs, spec) = self.model()?;
        let limits =
            if self.allow_small { spec.limits.clone().with_small_sizes() } else { spec.limits.clone() };
        let steps = self.steps.unwrap_or(spec.steps);
        let request = Request {
            width: self.width,
            height: self.height,
            steps,
            references: vec![RgbImage::new(64, 64); usize::from(self.references)],
            ..Request::new("a plan looks at no prompt")
        };
        limits.check(&request).map_err(|error| Failure::request(&error, &[]))?;
        let run = Run {
            size: [self.height, self.width],
            references: vec![REFERENCE; usize::from(self.references)],
            steps,
            prompt: spec.prompt.real(self.prompt_tokens),
        };
        let plan = plan(&configs, spec, &run)?;
        let parameters = |factor: u64| {
            let [text_encoder, transformer, vae] = plan.parameters.map(|count| factor * count);
            Parameters { text_encoder, transformer, vae }
        };
        let positions = run.prompt.start;
        let padding = (positions > 0)
            .then(|| -> Result<_, Failure> {
                let whole = Run { prompt: 0..spec.prompt.tokens, steps: 1, ..run.clone() };
                let flops_of_all_rows = text_encoder_flops(&flux2::plan::plan(&configs, spec, &whole)?);
                Ok(Padding { positions, flops: text_encoder_flops(&plan), flops_of_all_rows })
            })
            .transpose()?;
        let stages: Vec<_> = plan.stages.iter().map(stage_answer).collect();
        let mut total = Count::default();
        for stage in &stages {
            total.add(stage.total.operations, stage.total.flops, stage.total.bytes);
        }
        Ok(Answer {
            model,
            width: self.width,
            height: self.height,
            steps,
            references: run.references.len(),
            sequence: plan.sequence,
            parameters: parameters(1),
            weight_bytes: parameters(2),
            padding,
            total,
            peak_tensor_bytes: plan.peak_tensor_bytes,
            stages,
        })
    }

    fn model(&self) -> Result<(String, Configs, &'static ModelSpec), Failure> {
        let Some(checkpoint) = &self.checkpoint else {
            let spec = self.model.spec();
            let configs = match self.model {
                Published::Klein4b => Configs::klein_4b(),
                Published::Dev => Configs::dev(),
            };
            return Ok((spec.name.to_owned(), configs, spec));
        };
        let spec = spec::of_checkpoint(checkpoint).map_err(Failure::checkpoint)?;
        let configs =
            Configs::read(checkpoint, &checkpoint.join("text_encoder")).map_err(Failure::checkpoint)?;
        Ok((checkpoint.display().to_string(), configs, spec))
    }
}

fn text_encoder_flops(plan: &flux2::plan::Plan) -> u64 {
    plan.stages.iter().filter(|stage| stage.stage == Stage::TextEncoder).map(StagePlan::flops).sum()
}

fn stage_answer(stage: &StagePlan) -> StageAnswer {
    let mut total = Count::default();
    let mut by_operation = BTreeMap::<_, Count>::new();
    for operation in &stage.operations {
        total.add(1, operation.flops, operation.bytes);
        by_operation.entry(operation.name).or_default().add(1, operation.flops, operation.bytes);
    }
    StageAnswer { stage: stage.stage.timing_key().trim_end_matches("_s"), total, by_operation }
}

fn print_table(answer: &Answer) -> Result<(), Failure> {
    let Parameters { text_encoder, transformer, vae } = answer.parameters;
    print_line!(
        "{}: {}×{}, {} steps, references: {}, {} rows in the joint sequence",
        answer.model,
        answer.width,
        answer.height,
        answer.steps,
        answer.references,
        answer.sequence
    );
    let bytes = &answer.weight_bytes;
    print_line!(
        "parameters used: text encoder {:.3} G, transformer {:.3} G, VAE {:.3} G",
        giga(text_encoder),
        giga(transformer),
        giga(vae)
    );
    print_line!(
        "in bf16: text encoder {:.2} GB, transformer {:.2} GB, VAE {:.2} GB; {:.2} GB in all",
        giga(bytes.text_encoder),
        giga(bytes.transformer),
        giga(bytes.vae),
        giga(bytes.text_encoder + bytes.transformer + bytes.vae)
    );
    if let Some(Padding { positions, flops, flops_of_all_rows }) = &answer.padding {
        print_line!(
            "padding: one row of the text encoder stands for {positions} before the prompt; {:.2} TFLOP instead of {:.2}",
            giga(*flops) / 1e3,
            giga(*flops_of_all_rows) / 1e3
        );
    }
    print_line!("most f32 tensor memory alive at once: {:.2} GB", giga(answer.peak_tensor_bytes));
    print_line!("\n{:<18} {:>10} {:>12} {:>14}", "stage", "operations", "TFLOP", "GB of results");
    for stage in &answer.stages {
        print_row(stage.stage, &stage.total)?;
    }
    print_row("all", &answer.total)
}

fn print_row(name: &str, count: &Count) -> Result<(), Failure> {
    print_line!(
        "{name:<18} {:>10} {:>12.4} {:>14.3}",
        count.operations,
        giga(count.flops) / 1e3,
        giga(count.bytes)
    );
    Ok(())
}

fn giga(number: u64) -> f64 {
    number as f64 / 1e9
}

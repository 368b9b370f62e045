// SPDX-License-Identifier: Apache-2.0
//! What a run will do: every operation with its floating-point operations and bytes, from the configurations alone.

use std::{ops::Range, sync::Arc};

use crate::{
    device::{Ledger, Operation, Ops, Precision, Trace, record::RecordDevice},
    error::Result,
    latents,
    model::{Configs, Model, ShapesOnly, Weights},
    pipeline::{
        Latents, References, Stage, TOKEN_PIXELS,
        run::{Sequence, decode_to_values, encode_pixels, encode_tokens},
    },
    reference::ReferencePixels,
    spec::ModelSpec,
};

/// Operations of one stage.
#[derive(Clone, Debug)]
pub struct StagePlan {
    /// Stage.
    pub stage: Stage,
    /// Operations in order; all steps of the DiT.
    pub operations: Vec<Operation>,
}

impl StagePlan {
    /// Floating-point operations.
    pub fn flops(&self) -> u64 {
        self.operations.iter().map(|operation| operation.flops).sum()
    }
}

/// A run, counted.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Stages in order; reference encode only with references.
    pub stages: Vec<StagePlan>,
    /// Parameters that the run uses: text encoder, transformer, VAE.
    pub parameters: [u64; 3],
    /// Most bytes of f32 tensors alive at once; a view counts like a copy.
    pub peak_tensor_bytes: u64,
    /// Rows of the joint sequence: text, image and references.
    pub sequence: usize,
}

impl Plan {
    /// Floating-point operations of the whole run.
    pub fn flops(&self) -> u64 {
        self.stages.iter().map(StagePlan::flops).sum()
    }

    /// All operations in order.
    pub fn operations(&self) -> impl Iterator<Item = &Operation> {
        self.stages.iter().flat_map(|stage| &stage.operations)
    }
}

/// What to plan.
#[derive(Clone, Debug)]
pub struct Run {
    /// `[height, width]` of the picture.
    pub size: [usize; 2],
    /// `[height, width]` of each prepared reference, multiples of 16.
    pub references: Vec<[usize; 2]>,
    /// Denoising steps.
    pub steps: usize,
    /// Positions of the prompt among the text tokens ([`Layout::real`](crate::prompt::Layout::real)). They matter where
    /// padding comes before the prompt: one row then stands for all of it.
    pub prompt: Range<usize>,
}

/// Plans a run of the model with these configurations.
pub fn plan(configs: &Configs, spec: &ModelSpec, run: &Run) -> Result<Plan> {
    let device = RecordDevice::new(Precision::Bf16);
    let sources = [ShapesOnly::default(), ShapesOnly::default(), ShapesOnly::default()];
    let [text_encoder, transformer, vae] = &sources;
    let weights: [&dyn Weights; 3] = [text_encoder, transformer, vae];
    let model = Model::load(&device, weights, configs, spec)?;
    let ledger = Arc::new(Ledger::default());
    let mut stages = Vec::new();
    let mut stage = |stage, body: &mut dyn FnMut(&Ops<'_, RecordDevice>) -> Result<()>| -> Result<()> {
        let mut trace = Trace::default();
        body(&Ops::observed(&device, &mut trace).with_ledger(&ledger))?;
        stages.push(StagePlan { stage, operations: trace.operations });
        Ok(())
    };
    let [height, width] = run.size;
    let grid = [height.div_ceil(TOKEN_PIXELS), width.div_ceil(TOKEN_PIXELS)];
    let [grid_height, grid_width] = grid;

    let mut embeds = None;
    stage(Stage::TextEncoder, &mut |ops| {
        let ids = vec![0; spec.prompt.tokens];
        embeds = Some(encode_tokens(&model, ops, &ids, run.prompt.clone())?);
        Ok(())
    })?;
    let embeds = embeds.map(|embeds| embeds.values).unwrap_or_default();
    let mut encoded = References::default();
    if !run.references.is_empty() {
        stage(Stage::ReferenceEncode, &mut |ops| {
            for &[height, width] in &run.references {
                let pixels = ReferencePixels { height, width, values: vec![0.0; height * width * 3] };
                encoded.tokens.extend(encode_pixels(&model, ops, &pixels)?);
                encoded.grids.push([height / TOKEN_PIXELS, width / TOKEN_PIXELS]);
            }
            Ok(())
        })?;
    }
    let sequence = Sequence::new(grid, &encoded, spec.prompt.tokens);
    let mut context = None;
    stage(Stage::Context, &mut |ops| {
        context = Some(model.transformer.context(ops, &embeds)?);
        Ok(())
    })?;
    let rotary = model.transformer.rotary(&Ops::new(&device), &sequence.ids)?;
    let tokens = vec![0.0; sequence.tokens * latents::CHANNELS];
    stage(Stage::Dit, &mut |ops| {
        let Some(context) = &context else { return Ok(()) };
        for _ in 0..run.steps {
            let tokens = ops.upload_rows(&tokens, sequence.tokens, latents::CHANNELS)?;
            let modulation = model.transformer.modulation(ops, 0.0, None)?;
            model.transformer.velocity(
                ops,
                &tokens,
                grid_height * grid_width,
                context,
                &modulation,
                &rotary,
            )?;
        }
        Ok(())
    })?;
    drop(context);
    stage(Stage::VaeDecode, &mut |ops| {
        let values = vec![0.0; grid_height * grid_width * latents::CHANNELS];
        decode_to_values(&model, ops, &Latents { values, grid_height, grid_width })?;
        Ok(())
    })?;
    Ok(Plan {
        stages,
        parameters: sources.map(|source| source.parameters.get()),
        peak_tensor_bytes: ledger.peak(),
        sequence: sequence.ids.len(),
    })
}

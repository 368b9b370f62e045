// SPDX-License-Identifier: Apache-2.0
//! The diffusion transformer: dual-stream blocks, then single-stream blocks, over `[text; image; references]`.
//!
//! Mirrors diffusers 0.37.1 `Flux2Transformer2DModel`. Surprising:
//! - modulation is global per step, not per block: three projections of one vector serve all blocks;
//! - chunks come as shift, scale, gate in the blocks, but scale, shift in `norm_out`;
//! - all text rows go in unmasked, padding included;
//! - the first half of a SwiGLU is the gate;
//! - only the image rows are read at the end; reference rows are dropped.

use serde::Deserialize;

use super::Loader;
use crate::{
    device::{Device, GatedMatrix, HeadLayout, Mask, Matrix, Ops, QkvPart, Rotary, Row, Tensor},
    error::{Error, Result},
    latents, rope,
};

/// `transformer/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct TransformerConfig {
    /// Heads; the width is `num_attention_heads * attention_head_dim`.
    pub num_attention_heads: usize,
    /// Columns of one head.
    pub attention_head_dim: usize,
    /// Dual-stream blocks.
    pub num_layers: usize,
    /// Single-stream blocks.
    pub num_single_layers: usize,
    /// Columns of the latent tokens.
    pub in_channels: usize,
    /// Columns of the prompt embeds.
    pub joint_attention_dim: usize,
    /// MLP width over width.
    pub mlp_ratio: f64,
    /// Head columns that each of the four axes (t, h, w, l) rotates.
    pub axes_dims_rope: Vec<usize>,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Epsilon of every norm.
    pub eps: f32,
    /// Columns of the sinusoidal time embedding.
    pub timestep_guidance_channels: usize,
    /// Whether the guidance scale is embedded. Absent means yes (FLUX.2 \[dev\]).
    #[serde(default = "embeds_guidance")]
    pub guidance_embeds: bool,
}

fn embeds_guidance() -> bool {
    true
}

impl TransformerConfig {
    /// Width of the residual stream.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Width of the MLPs.
    pub fn mlp_width(&self) -> usize {
        (self.width() as f64 * self.mlp_ratio) as usize
    }

    fn check(&self) -> Result<()> {
        let axes: usize = self.axes_dims_rope.iter().sum();
        if self.axes_dims_rope.len() != 4 || axes != self.attention_head_dim {
            return Err(Error::checkpoint(
                "transformer/config.json",
                format!(
                    "axes_dims_rope {:?} should be four numbers whose sum is attention_head_dim {}",
                    self.axes_dims_rope, self.attention_head_dim
                ),
            ));
        }
        if self.in_channels != latents::CHANNELS {
            return Err(Error::checkpoint(
                "transformer/config.json",
                format!("in_channels is {}, FLUX.2 has {}", self.in_channels, latents::CHANNELS),
            ));
        }
        Ok(())
    }
}

/// The transformer on a device.
#[expect(clippy::struct_field_names, reason = "fields are named after the checkpoint's tensors")]
pub struct Transformer<D: Device> {
    x_embedder: Matrix<D>,
    context_embedder: Matrix<D>,
    timestep_embedder: Embedder<D>,
    guidance_embedder: Option<Embedder<D>>,
    double_stream_modulation_img: Matrix<D>,
    double_stream_modulation_txt: Matrix<D>,
    single_stream_modulation: Matrix<D>,
    transformer_blocks: Vec<DoubleBlock<D>>,
    single_transformer_blocks: Vec<SingleBlock<D>>,
    norm_out: Matrix<D>,
    proj_out: Matrix<D>,
    config: TransformerConfig,
}

/// `linear_2(silu(linear_1(sinusoids)))`.
struct Embedder<D: Device> {
    linear_1: Matrix<D>,
    linear_2: Matrix<D>,
}

struct DoubleBlock<D: Device> {
    image: Stream<D>,
    text: Stream<D>,
}

/// One stream (image or text) of a dual-stream block.
struct Stream<D: Device> {
    to_qkv: Matrix<D>,
    norm_q: Row<D>,
    norm_k: Row<D>,
    to_out: Matrix<D>,
    linear_in: GatedMatrix<D>,
    linear_out: Matrix<D>,
}

/// `to_qkv_mlp_proj` and `to_out` of the checkpoint, taken apart by rows and by columns: products of the attention half
/// and of the MLP half, so that nothing is concatenated.
struct SingleBlock<D: Device> {
    to_qkv: Matrix<D>,
    norm_q: Row<D>,
    norm_k: Row<D>,
    mlp_in: GatedMatrix<D>,
    attention_out: Matrix<D>,
    mlp_out: Matrix<D>,
}

/// Modulation of one stream and half block: `(1 + scale) · LN(x) + shift`, then `x + gate · y`.
struct Modulation<D: Device> {
    shift: Row<D>,
    one_plus_scale: Row<D>,
    gate: Row<D>,
}

/// All modulation of one step.
pub struct StepModulation<D: Device> {
    double_image: [Modulation<D>; 2],
    double_text: [Modulation<D>; 2],
    single: Modulation<D>,
    out_one_plus_scale: Row<D>,
    out_shift: Row<D>,
}

impl<D: Device> Transformer<D> {
    /// Takes all weights of the component.
    pub fn load(loader: &Loader<'_, D>, config: &TransformerConfig) -> Result<Self> {
        config.check()?;
        let (width, channels) = (config.width(), config.timestep_guidance_channels);
        let matrix = |name: &str, outputs: usize, inputs: usize| {
            loader.ops.matrix(&[loader.weight(&format!("{name}.weight"), &[outputs, inputs])?])
        };
        let embedder = |name: &str| -> Result<_> {
            let prefix = format!("time_guidance_embed.{name}");
            Ok(Embedder {
                linear_1: matrix(&format!("{prefix}.linear_1"), width, channels)?,
                linear_2: matrix(&format!("{prefix}.linear_2"), width, width)?,
            })
        };
        Ok(Self {
            x_embedder: matrix("x_embedder", width, config.in_channels)?,
            context_embedder: matrix("context_embedder", width, config.joint_attention_dim)?,
            timestep_embedder: embedder("timestep_embedder")?,
            guidance_embedder: config.guidance_embeds.then(|| embedder("guidance_embedder")).transpose()?,
            double_stream_modulation_img: matrix("double_stream_modulation_img.linear", 6 * width, width)?,
            double_stream_modulation_txt: matrix("double_stream_modulation_txt.linear", 6 * width, width)?,
            single_stream_modulation: matrix("single_stream_modulation.linear", 3 * width, width)?,
            transformer_blocks: (0..config.num_layers)
                .map(|index| DoubleBlock::load(loader, config, &format!("transformer_blocks.{index}.")))
                .collect::<Result<_>>()?,
            single_transformer_blocks: (0..config.num_single_layers)
                .map(|index| {
                    SingleBlock::load(loader, config, &format!("single_transformer_blocks.{index}.attn."))
                })
                .collect::<Result<_>>()?,
            norm_out: matrix("norm_out.linear", 2 * width, width)?,
            proj_out: matrix("proj_out", config.in_channels, width)?,
            config: config.clone(),
        })
    }

    fn layout(&self) -> HeadLayout {
        let heads = self.config.num_attention_heads;
        HeadLayout { query_heads: heads, key_value_heads: heads, head_dim: self.config.attention_head_dim }
    }

    /// The text rows of the residual stream, `[tokens, width]`: the same at every step.
    pub fn context(&self, ops: &Ops<'_, D>, embeds: &[f32]) -> Result<Tensor<D>> {
        let columns = self.config.joint_attention_dim;
        if !embeds.len().is_multiple_of(columns) {
            return Err(Error::checkpoint(
                "transformer/config.json",
                format!("joint_attention_dim is {columns}, but the text encoder gives rows of another width"),
            ));
        }
        let embeds = ops.upload_rows(embeds, embeds.len() / columns, columns)?;
        let context = ops.linear(&embeds, &self.context_embedder)?;
        ops.stage(&context, || "dit.context".into())?;
        Ok(context)
    }

    /// The rotary table of a joint sequence, from the `(t, h, w, l)` ids of all its rows.
    pub fn rotary(&self, ops: &Ops<'_, D>, ids: &[[i32; 4]]) -> Result<Rotary<D>> {
        ops.rotary(&rope::dit_table(ids, &self.config.axes_dims_rope, self.config.rope_theta))
    }

    /// Modulation of one step, from `timestep` = 1000 σ and, for a guided model, 1000 × the guidance scale.
    pub fn modulation(
        &self,
        ops: &Ops<'_, D>,
        timestep: f32,
        guidance: Option<f32>,
    ) -> Result<StepModulation<D>> {
        let mut temb =
            self.timestep_embedder.forward(ops, timestep, self.config.timestep_guidance_channels)?;
        if let Some(embedder) = &self.guidance_embedder {
            let guidance = guidance.unwrap_or(0.0);
            let embedded = embedder.forward(ops, guidance, self.config.timestep_guidance_channels)?;
            temb = ops.add(&temb, &embedded)?;
        }
        ops.stage(&temb, || "dit.temb".into())?;
        let s = ops.silu(&temb)?;
        let double = |linear, name: &str| -> Result<[Modulation<D>; 2]> {
            let rows = ops.linear(&s, linear)?;
            ops.stage(&rows, || format!("dit.modulation.{name}"))?;
            let mut rows = ops.split_row(&rows, 6)?.into_iter();
            Ok([Modulation::take(ops, &mut rows)?, Modulation::take(ops, &mut rows)?])
        };
        let double_image = double(&self.double_stream_modulation_img, "image")?;
        let double_text = double(&self.double_stream_modulation_txt, "text")?;
        let rows = ops.linear(&s, &self.single_stream_modulation)?;
        ops.stage(&rows, || "dit.modulation.single".into())?;
        let single = Modulation::take(ops, &mut ops.split_row(&rows, 3)?.into_iter())?;
        // Scale first here, shift first everywhere else.
        let rows = ops.split_row(&ops.linear(&s, &self.norm_out)?, 2)?;
        let [scale, out_shift] = exactly(rows)?;
        Ok(StepModulation {
            double_image,
            double_text,
            single,
            out_one_plus_scale: ops.one_plus(&scale)?,
            out_shift,
        })
    }

    /// The velocity of the first `image_tokens` of `tokens` (image, then references): `[image_tokens, channels]`.
    pub fn velocity(
        &self,
        ops: &Ops<'_, D>,
        tokens: &Tensor<D>,
        image_tokens: usize,
        context: &Tensor<D>,
        modulation: &StepModulation<D>,
        rotary: &Rotary<D>,
    ) -> Result<Tensor<D>> {
        let text_tokens = context.rows();
        let mut x = ops.linear(tokens, &self.x_embedder)?;
        ops.stage(&x, || "dit.image".into())?;
        // The context itself is kept for the next step; the first block makes the text stream from it.
        let mut text: Option<Tensor<D>> = None;
        for (index, block) in self.transformer_blocks.iter().enumerate() {
            let c = text.as_ref().unwrap_or(context);
            let (image, next) = self.double_block(ops, block, &x, c, modulation, rotary)?;
            (x, text) = (image, Some(next));
            ops.stage(&x, || format!("dit.double{index}.image"))?;
            if let Some(text) = &text {
                ops.stage(text, || format!("dit.double{index}.text"))?;
            }
        }
        x = ops.concat_rows(&[text.as_ref().unwrap_or(context), &x])?;
        drop(text);
        for (index, block) in self.single_transformer_blocks.iter().enumerate() {
            x = self.single_block(ops, block, &x, &modulation.single, rotary)?;
            ops.stage(&x, || format!("dit.single{index}"))?;
        }
        let x = ops.slice_rows(&x, text_tokens..text_tokens + image_tokens)?;
        let x = ops.layer_norm(&x, &modulation.out_one_plus_scale, &modulation.out_shift, self.config.eps)?;
        ops.stage(&x, || "dit.norm_out".into())?;
        ops.linear(&x, &self.proj_out)
    }

    fn double_block(
        &self,
        ops: &Ops<'_, D>,
        block: &DoubleBlock<D>,
        x: &Tensor<D>,
        c: &Tensor<D>,
        modulation: &StepModulation<D>,
        rotary: &Rotary<D>,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let text_tokens = c.rows();
        let text_qkv = block.text.qkv(ops, c, &modulation.double_text[0], self.config.eps)?;
        let image_qkv = block.image.qkv(ops, x, &modulation.double_image[0], self.config.eps)?;
        let parts = [block.text.part(&text_qkv), block.image.part(&image_qkv)];
        let heads = ops.qkv_heads(&parts, self.layout(), self.config.eps, Some(rotary))?;
        drop((text_qkv, image_qkv));
        let o = ops.attention(&heads, &Mask::None, self.scale())?; // [text + image, width]
        drop(heads);
        let o_text = ops.slice_rows(&o, 0..text_tokens)?;
        let o_image = ops.slice_rows(&o, text_tokens..o.rows())?;
        drop(o);
        let x = block.image.finish(ops, x, &o_image, &modulation.double_image, self.config.eps)?;
        let c = block.text.finish(ops, c, &o_text, &modulation.double_text, self.config.eps)?;
        Ok((x, c))
    }

    fn single_block(
        &self,
        ops: &Ops<'_, D>,
        block: &SingleBlock<D>,
        x: &Tensor<D>,
        modulation: &Modulation<D>,
        rotary: &Rotary<D>,
    ) -> Result<Tensor<D>> {
        let h = modulation.norm(ops, x, self.config.eps)?;
        let qkv = ops.linear(&h, &block.to_qkv)?; // [tokens, 3 · width]
        let part = QkvPart { qkv: &qkv, query_norm: Some(&block.norm_q), key_norm: Some(&block.norm_k) };
        let heads = ops.qkv_heads(&[part], self.layout(), self.config.eps, Some(rotary))?;
        drop(qkv);
        let o = ops.attention(&heads, &Mask::None, self.scale())?;
        drop(heads);
        let attended = ops.linear_add(&o, &block.attention_out, Some(&modulation.gate), x)?;
        drop(o);
        let h = ops.linear_swiglu(&h, &block.mlp_in)?; // [tokens, mlp width]
        ops.linear_add(&h, &block.mlp_out, Some(&modulation.gate), &attended)
    }

    fn scale(&self) -> f32 {
        (self.config.attention_head_dim as f32).powf(-0.5)
    }
}

impl<D: Device> Embedder<D> {
    fn forward(&self, ops: &Ops<'_, D>, value: f32, channels: usize) -> Result<Tensor<D>> {
        let sinusoids = ops.upload_rows(&sinusoids(value, channels), 1, channels)?;
        let h = ops.silu(&ops.linear(&sinusoids, &self.linear_1)?)?;
        ops.linear(&h, &self.linear_2)
    }
}

/// `[cos(value w_j) …, sin(value w_j) …]` with `w_j = exp(-ln(10000) j / half)`, in f32, cosines first
/// (diffusers `get_timestep_embedding` with `flip_sin_to_cos`).
pub fn sinusoids(value: f32, channels: usize) -> Vec<f32> {
    let half = channels / 2;
    let angle = |j: usize| value * (-(10_000_f64.ln() as f32) * j as f32 / half as f32).exp();
    (0..half).map(|j| angle(j).cos()).chain((0..half).map(|j| angle(j).sin())).collect()
}

impl<D: Device> Modulation<D> {
    /// The next three rows: shift, scale, gate.
    fn take(ops: &Ops<'_, D>, rows: &mut impl Iterator<Item = Row<D>>) -> Result<Self> {
        let [shift, scale, gate] = exactly(rows.take(3).collect())?;
        Ok(Self { shift, one_plus_scale: ops.one_plus(&scale)?, gate })
    }

    fn norm(&self, ops: &Ops<'_, D>, x: &Tensor<D>, epsilon: f32) -> Result<Tensor<D>> {
        ops.layer_norm(x, &self.one_plus_scale, &self.shift, epsilon)
    }
}

/// The rows as an array of the length that the caller knows they have.
fn exactly<D: Device, const N: usize>(rows: Vec<Row<D>>) -> Result<[Row<D>; N]> {
    let got = rows.len();
    rows.try_into().map_err(|_| Error::Shape {
        operation: "modulation",
        got: format!("{got} rows"),
        wanted: format!("{N} rows"),
    })
}

impl<D: Device> DoubleBlock<D> {
    fn load(loader: &Loader<'_, D>, config: &TransformerConfig, prefix: &str) -> Result<Self> {
        let image = StreamNames {
            qkv: ["attn.to_q", "attn.to_k", "attn.to_v"],
            norms: ["attn.norm_q", "attn.norm_k"],
            out: "attn.to_out.0",
            mlp: ["ff.linear_in", "ff.linear_out"],
        };
        let text = StreamNames {
            qkv: ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
            norms: ["attn.norm_added_q", "attn.norm_added_k"],
            out: "attn.to_add_out",
            mlp: ["ff_context.linear_in", "ff_context.linear_out"],
        };
        Ok(Self {
            image: Stream::load(loader, config, prefix, &image)?,
            text: Stream::load(loader, config, prefix, &text)?,
        })
    }
}

/// Names of one stream's tensors within a dual-stream block.
struct StreamNames {
    qkv: [&'static str; 3],
    norms: [&'static str; 2],
    out: &'static str,
    mlp: [&'static str; 2],
}

impl<D: Device> Stream<D> {
    fn load(
        loader: &Loader<'_, D>,
        config: &TransformerConfig,
        prefix: &str,
        names: &StreamNames,
    ) -> Result<Self> {
        let (width, mlp, head_dim) = (config.width(), config.mlp_width(), config.attention_head_dim);
        let weight = |name: &str, shape: &[usize]| loader.weight(&format!("{prefix}{name}.weight"), shape);
        let [q, k, v] = names.qkv.map(|name| weight(name, &[width, width]));
        let linear_in = weight(names.mlp[0], &[2 * mlp, width])?;
        Ok(Self {
            to_qkv: loader.ops.matrix(&[q?, k?, v?])?,
            norm_q: loader.row(&format!("{prefix}{}.weight", names.norms[0]), head_dim)?,
            norm_k: loader.row(&format!("{prefix}{}.weight", names.norms[1]), head_dim)?,
            to_out: loader.ops.matrix(&[weight(names.out, &[width, width])?])?,
            linear_in: loader
                .ops
                .gated_matrix(&linear_in.slice_rows(0..mlp), &linear_in.slice_rows(mlp..2 * mlp))?,
            linear_out: loader.ops.matrix(&[weight(names.mlp[1], &[width, mlp])?])?,
        })
    }

    fn qkv(
        &self,
        ops: &Ops<'_, D>,
        x: &Tensor<D>,
        modulation: &Modulation<D>,
        epsilon: f32,
    ) -> Result<Tensor<D>> {
        ops.linear(&modulation.norm(ops, x, epsilon)?, &self.to_qkv)
    }

    fn part<'a>(&'a self, qkv: &'a Tensor<D>) -> QkvPart<'a, D> {
        QkvPart { qkv, query_norm: Some(&self.norm_q), key_norm: Some(&self.norm_k) }
    }

    /// Attention output and MLP added to the stream.
    fn finish(
        &self,
        ops: &Ops<'_, D>,
        x: &Tensor<D>,
        o: &Tensor<D>,
        [attention, mlp]: &[Modulation<D>; 2],
        epsilon: f32,
    ) -> Result<Tensor<D>> {
        let x = ops.linear_add(o, &self.to_out, Some(&attention.gate), x)?;
        let h = ops.linear_swiglu(&mlp.norm(ops, &x, epsilon)?, &self.linear_in)?;
        ops.linear_add(&h, &self.linear_out, Some(&mlp.gate), &x)
    }
}

impl<D: Device> SingleBlock<D> {
    fn load(loader: &Loader<'_, D>, config: &TransformerConfig, prefix: &str) -> Result<Self> {
        let (width, mlp, head_dim) = (config.width(), config.mlp_width(), config.attention_head_dim);
        // Rows: q, k, v of `width` each, gate and up of `mlp` each. Columns: attention, then MLP.
        let rows = 3 * width + 2 * mlp;
        let fused = loader.weight(&format!("{prefix}to_qkv_mlp_proj.weight"), &[rows, width])?;
        let out = loader.weight(&format!("{prefix}to_out.weight"), &[width, width + mlp])?;
        let gate = fused.slice_rows(3 * width..3 * width + mlp);
        let up = fused.slice_rows(3 * width + mlp..rows);
        Ok(Self {
            to_qkv: loader.ops.matrix(&[fused.slice_rows(0..3 * width)])?,
            norm_q: loader.row(&format!("{prefix}norm_q.weight"), head_dim)?,
            norm_k: loader.row(&format!("{prefix}norm_k.weight"), head_dim)?,
            mlp_in: loader.ops.gated_matrix(&gate, &up)?,
            attention_out: loader.ops.matrix(&[out.slice_columns(0..width)])?,
            mlp_out: loader.ops.matrix(&[out.slice_columns(width..width + mlp)])?,
        })
    }
}

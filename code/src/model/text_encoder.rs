// SPDX-License-Identifier: Apache-2.0
//! The text encoder: the first layers of a Qwen3 language model, tapped three times.
//!
//! Mirrors transformers 5.3.0 `Qwen3Model`. Surprising: the residual stream is taken *between* layers (no final norm), so
//! everything after the last tap is never loaded; padding rows are computed like real ones, because the DiT reads them;
//! nobody may look at a padding row, so it is masked as a key.

use std::ops::Range;

use serde::Deserialize;

use super::Loader;
use crate::{
    device::{Device, GatedMatrix, HeadLayout, Mask, Matrix, Ops, QkvPart, Rotary, Row, Tensor},
    error::{Error, Result},
    rope,
    spec::ModelSpec,
    weight::{RowOrder, Weight},
};

/// `text_encoder/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct TextEncoderConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers in the checkpoint.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Columns of one head (`num_attention_heads * head_dim` need not be `hidden_size`).
    pub head_dim: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding, where transformers 4 writes it.
    pub rope_theta: Option<f64>,
    /// Where transformers 5 writes it.
    pub rope_parameters: Option<RopeParameters>,
}

/// `rope_parameters` of transformers 5.
#[derive(Clone, Debug, Deserialize)]
pub struct RopeParameters {
    /// Base of the rotary embedding.
    pub rope_theta: f64,
}

impl TextEncoderConfig {
    /// Base of the rotary embedding; Qwen3's when the file is silent.
    pub fn theta(&self) -> f64 {
        self.rope_parameters.as_ref().map(|p| p.rope_theta).or(self.rope_theta).unwrap_or(1e6)
    }

    fn layout(&self) -> HeadLayout {
        HeadLayout {
            query_heads: self.num_attention_heads,
            key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        }
    }
}

/// The layers up to the last tap, on a device.
pub struct TextEncoder<D: Device> {
    embed_tokens: Weight,
    layers: Vec<Layer<D>>,
    rotary: Rotary<D>,
    layout: HeadLayout,
    epsilon: f32,
    taps: &'static [usize],
}

struct Layer<D: Device> {
    input_layernorm: Row<D>,
    qkv_proj: Matrix<D>,
    q_norm: Row<D>,
    k_norm: Row<D>,
    o_proj: Matrix<D>,
    post_attention_layernorm: Row<D>,
    gate_up_proj: GatedMatrix<D>,
    down_proj: Matrix<D>,
}

impl<D: Device> TextEncoder<D> {
    /// Takes the weights it needs; layers after the last tap, the final norm and the LM head stay in the file.
    pub fn load(loader: &Loader<'_, D>, config: &TextEncoderConfig, spec: &ModelSpec) -> Result<Self> {
        let depth = *spec.taps.last().unwrap_or(&0);
        if config.num_hidden_layers <= depth {
            return Err(Error::checkpoint(
                "text_encoder/config.json",
                format!(
                    "num_hidden_layers is {}, but {} reads the residual stream after layer {depth} before the final \
                     norm; use the text encoder that belongs to the checkpoint",
                    config.num_hidden_layers, spec.name
                ),
            ));
        }
        let prefix = spec.text_prefix;
        let embed_tokens = loader
            .weight(&format!("{prefix}embed_tokens.weight"), &[config.vocab_size, config.hidden_size])?;
        let layers = (0..depth)
            .map(|index| Layer::load(loader, config, &format!("{prefix}layers.{index}.")))
            .collect::<Result<_>>()?;
        let layer_prefix = format!("{prefix}layers.");
        loader.weights.ignore(&|name| {
            let later_layer = name
                .strip_prefix(&layer_prefix)
                .and_then(|rest| rest.split('.').next()?.parse::<usize>().ok())
                .is_some_and(|layer| (depth..config.num_hidden_layers).contains(&layer));
            later_layer || name == "lm_head.weight" || name == format!("{prefix}norm.weight")
        });
        let table = rope::text_table(0..spec.text_tokens, config.head_dim, config.theta());
        Ok(Self {
            embed_tokens,
            layers,
            rotary: loader.ops.rotary(&table)?,
            layout: config.layout(),
            epsilon: config.rms_norm_eps,
            taps: spec.taps,
        })
    }

    /// The residual stream after each tapped layer, `[ids.len(), hidden]` each.
    ///
    /// `real` are the positions that are not padding.
    pub fn forward(&self, ops: &Ops<'_, D>, ids: &[u32], real: Range<usize>) -> Result<Vec<Tensor<D>>> {
        let hidden = self.embed_tokens.row_len();
        let mut embeds = Vec::with_capacity(ids.len() * hidden);
        for &id in ids {
            if id as usize >= self.embed_tokens.rows() {
                return Err(Error::checkpoint(
                    "tokenizer",
                    format!(
                        "token id {id} is outside the text encoder's vocabulary of {}; tokenizer and text encoder do \
                         not belong together",
                        self.embed_tokens.rows()
                    ),
                ));
            }
            embeds.extend(self.embed_tokens.row_f32(id as usize));
        }
        let mut x = ops.upload_rows(&embeds, ids.len(), hidden)?;
        ops.stage(&x, || "text.embed".into())?;
        let mask = Mask::CausalKeys(real);
        let mut tapped = Vec::with_capacity(self.taps.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let next = self.layer(ops, layer, &x, &mask)?;
            if self.taps.contains(&index) {
                tapped.push(x);
            }
            x = next;
            ops.stage(&x, || format!("text.layer{index}"))?;
        }
        tapped.push(x);
        Ok(tapped)
    }

    fn layer(&self, ops: &Ops<'_, D>, layer: &Layer<D>, x: &Tensor<D>, mask: &Mask) -> Result<Tensor<D>> {
        let h = ops.rms_norm(x, &layer.input_layernorm, self.epsilon)?;
        let qkv = ops.linear(&h, &layer.qkv_proj)?; // [512, (32 + 8 + 8) · 128]
        let part = QkvPart { qkv: &qkv, query_norm: Some(&layer.q_norm), key_norm: Some(&layer.k_norm) };
        let heads = ops.qkv_heads(&[part], self.layout, self.epsilon, Some(&self.rotary))?;
        drop(qkv);
        let o = ops.attention(&heads, mask, (self.layout.head_dim as f32).powf(-0.5))?; // [512, 32 · 128]
        let x = ops.linear_add(&o, &layer.o_proj, None, x)?;
        let h = ops.rms_norm(&x, &layer.post_attention_layernorm, self.epsilon)?;
        let h = ops.linear_swiglu(&h, &layer.gate_up_proj)?;
        ops.linear_add(&h, &layer.down_proj, None, &x)
    }
}

impl<D: Device> Layer<D> {
    fn load(loader: &Loader<'_, D>, config: &TextEncoderConfig, prefix: &str) -> Result<Self> {
        let (hidden, mlp, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let weight = |name: &str, shape: &[usize]| loader.weight(&format!("{prefix}{name}.weight"), shape);
        // Qwen3 rotates half-split (column j with column j + d/2); reading the rows of q and k, and their norms, in pair
        // order makes that the adjacent-pair rotation which the devices have. Scores are dot products, so the order of
        // columns within a head does not matter to them.
        let pairs = |weight: Weight| weight.with_row_order(RowOrder::HalfSplitToPairs { head_dim });
        let q_proj = pairs(weight("self_attn.q_proj", &[config.num_attention_heads * head_dim, hidden])?);
        let k_proj = pairs(weight("self_attn.k_proj", &[config.num_key_value_heads * head_dim, hidden])?);
        let v_proj = weight("self_attn.v_proj", &[config.num_key_value_heads * head_dim, hidden])?;
        let pair_row = |name: &str| loader.ops.row(&pairs(weight(name, &[head_dim])?).to_f32());
        let ops = loader.ops;
        Ok(Self {
            input_layernorm: loader.row(&format!("{prefix}input_layernorm.weight"), hidden)?,
            qkv_proj: ops.matrix(&[q_proj, k_proj, v_proj])?,
            q_norm: pair_row("self_attn.q_norm")?,
            k_norm: pair_row("self_attn.k_norm")?,
            o_proj: ops
                .matrix(&[weight("self_attn.o_proj", &[hidden, config.num_attention_heads * head_dim])?])?,
            post_attention_layernorm: loader
                .row(&format!("{prefix}post_attention_layernorm.weight"), hidden)?,
            gate_up_proj: ops.gated_matrix(
                &weight("mlp.gate_proj", &[mlp, hidden])?,
                &weight("mlp.up_proj", &[mlp, hidden])?,
            )?,
            down_proj: ops.matrix(&[weight("mlp.down_proj", &[hidden, mlp])?])?,
        })
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The text encoder: the first layers of a Qwen3 or Mistral language model, tapped three times.
//!
//! Mirrors transformers 5.3.0 `Qwen3Model` and `MistralModel`; what differs is in [`TextEncoderSpec`]. Surprising: the
//! residual stream is taken *between* layers (no final norm), so everything after the last tap is never loaded; padding
//! rows are computed like real ones, because the DiT reads them; nobody may look at a padding row, so it is masked as a
//! key. Padding *before* the prompt therefore sees nothing at all: its attention is zero, all its rows are equal, and one
//! is computed for all of them.

use std::ops::Range;

use serde::{Deserialize, Deserializer, de::Error as _};

use super::Loader;
use crate::{
    device::{Device, GatedMatrix, HeadLayout, Mask, Matrix, Ops, QkvPart, Rotary, Row, Tensor},
    error::{Error, Result},
    rope,
    spec::{ModelSpec, TextEncoderSpec},
    weight::{RowOrder, Weight},
};

/// `text_encoder/config.json`, or the `text_config` in it where the language model is part of a larger one.
#[derive(Clone, Debug)]
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
    /// Base of the rotary embedding.
    pub rope_theta: f64,
}

/// The file as it is written.
#[derive(Deserialize)]
struct ConfigFile {
    text_config: Option<LanguageModelConfig>,
    #[serde(flatten)]
    itself: serde_json::Value,
}

#[derive(Deserialize)]
struct LanguageModelConfig {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    vocab_size: usize,
    rms_norm_eps: f32,
    /// Where transformers 4 writes it.
    rope_theta: Option<f64>,
    /// Where transformers 5 writes it.
    rope_parameters: Option<RopeParameters>,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: f64,
}

impl<'de> Deserialize<'de> for TextEncoderConfig {
    fn deserialize<T: Deserializer<'de>>(deserializer: T) -> Result<Self, T::Error> {
        let file = ConfigFile::deserialize(deserializer)?;
        let config = match file.text_config {
            Some(config) => config,
            None => serde_json::from_value(file.itself).map_err(T::Error::custom)?,
        };
        let theta = config.rope_parameters.map(|parameters| parameters.rope_theta).or(config.rope_theta);
        Ok(Self {
            hidden_size: config.hidden_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            intermediate_size: config.intermediate_size,
            vocab_size: config.vocab_size,
            rms_norm_eps: config.rms_norm_eps,
            rope_theta: theta
                .ok_or_else(|| T::Error::custom("neither rope_theta nor rope_parameters.rope_theta"))?,
        })
    }
}

impl TextEncoderConfig {
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
    layout: HeadLayout,
    theta: f64,
    epsilon: f32,
    taps: &'static [usize],
}

/// What [`TextEncoder::forward`] gives.
pub struct TappedStreams<D: Device> {
    /// The residual stream after each tapped layer, `[rows, hidden]` each.
    pub taps: Vec<Tensor<D>>,
    /// How many positions the first row stands for: 1, or all the padding before the prompt.
    pub first_row_repeats: usize,
}

struct Layer<D: Device> {
    input_layernorm: Row<D>,
    qkv_proj: Matrix<D>,
    q_norm: Option<Row<D>>,
    k_norm: Option<Row<D>>,
    o_proj: Matrix<D>,
    post_attention_layernorm: Row<D>,
    gate_up_proj: GatedMatrix<D>,
    down_proj: Matrix<D>,
}

impl<D: Device> TextEncoder<D> {
    /// Takes the weights it needs; layers after the last tap, the final norm and the LM head stay in the file.
    pub fn load(loader: &Loader<'_, D>, config: &TextEncoderConfig, spec: &ModelSpec) -> Result<Self> {
        let (taken, depth) = (&spec.text_encoder, spec.text_encoder.depth());
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
        let prefix = taken.prefix;
        let embed_tokens = loader
            .weight(&format!("{prefix}embed_tokens.weight"), &[config.vocab_size, config.hidden_size])?;
        let layers = (0..depth)
            .map(|index| Layer::load(loader, config, taken, &format!("{prefix}layers.{index}.")))
            .collect::<Result<_>>()?;
        loader.weights.ignore(&|name| taken.knows_unneeded(name));
        Ok(Self {
            embed_tokens,
            layers,
            layout: config.layout(),
            theta: config.rope_theta,
            epsilon: config.rms_norm_eps,
            taps: taken.taps,
        })
    }

    /// The residual stream after each tapped layer for all `ids`, of which `real` are the positions that are not padding.
    pub fn forward(&self, ops: &Ops<'_, D>, ids: &[u32], real: Range<usize>) -> Result<TappedStreams<D>> {
        // One row of the padding before the prompt, at the last of its positions; positions stay absolute.
        let first = real.start.saturating_sub(1);
        let ids = &ids[first..];
        let table = rope::text_table(first..first + ids.len(), self.layout.head_dim, self.theta);
        let rotary = ops.rotary(&table)?;
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
        let mask = Mask::CausalKeys(real.start - first..real.end - first);
        let mut tapped = Vec::with_capacity(self.taps.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let next = self.layer(ops, layer, &x, &rotary, &mask)?;
            if self.taps.contains(&index) {
                tapped.push(x);
            }
            x = next;
            ops.stage(&x, || format!("text.layer{index}"))?;
        }
        tapped.push(x);
        Ok(TappedStreams { taps: tapped, first_row_repeats: first + 1 })
    }

    fn layer(
        &self,
        ops: &Ops<'_, D>,
        layer: &Layer<D>,
        x: &Tensor<D>,
        rotary: &Rotary<D>,
        mask: &Mask,
    ) -> Result<Tensor<D>> {
        let h = ops.rms_norm(x, &layer.input_layernorm, self.epsilon)?;
        let qkv = ops.linear(&h, &layer.qkv_proj)?; // [512, (32 + 8 + 8) · 128]
        let part = QkvPart { qkv: &qkv, query_norm: layer.q_norm.as_ref(), key_norm: layer.k_norm.as_ref() };
        let heads = ops.qkv_heads(&[part], self.layout, self.epsilon, Some(rotary))?;
        drop(qkv);
        let o = ops.attention(&heads, mask, (self.layout.head_dim as f32).powf(-0.5))?; // [512, 32 · 128]
        let x = ops.linear_add(&o, &layer.o_proj, None, x)?;
        let h = ops.rms_norm(&x, &layer.post_attention_layernorm, self.epsilon)?;
        let h = ops.linear_swiglu(&h, &layer.gate_up_proj)?;
        ops.linear_add(&h, &layer.down_proj, None, &x)
    }
}

impl<D: Device> Layer<D> {
    fn load(
        loader: &Loader<'_, D>,
        config: &TextEncoderConfig,
        taken: &TextEncoderSpec,
        prefix: &str,
    ) -> Result<Self> {
        let (hidden, mlp, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let weight = |name: &str, shape: &[usize]| loader.weight(&format!("{prefix}{name}.weight"), shape);
        // The language model rotates half-split (column j with column j + d/2); reading the rows of q and k, and their norms, in pair
        // order makes that the adjacent-pair rotation which the devices have. Scores are dot products, so the order of
        // columns within a head does not matter to them.
        let pairs = |weight: Weight| weight.with_row_order(RowOrder::HalfSplitToPairs { head_dim });
        let q_proj = pairs(weight("self_attn.q_proj", &[config.num_attention_heads * head_dim, hidden])?);
        let k_proj = pairs(weight("self_attn.k_proj", &[config.num_key_value_heads * head_dim, hidden])?);
        let v_proj = weight("self_attn.v_proj", &[config.num_key_value_heads * head_dim, hidden])?;
        let head_norm = |name: &str| -> Result<_> {
            taken
                .query_key_norm
                .then(|| loader.ops.row(&pairs(weight(name, &[head_dim])?).to_f32()))
                .transpose()
        };
        let ops = loader.ops;
        Ok(Self {
            input_layernorm: loader.row(&format!("{prefix}input_layernorm.weight"), hidden)?,
            qkv_proj: ops.matrix(&[q_proj, k_proj, v_proj])?,
            q_norm: head_norm("self_attn.q_norm")?,
            k_norm: head_norm("self_attn.k_norm")?,
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

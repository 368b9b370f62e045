// SPDX-License-Identifier: Apache-2.0
//! FLUX.2, written once over [`Device`].
//!
//! | part | file | klein 4B as published |
//! | --- | --- | --- |
//! | text encoder | [`text_encoder`] | Qwen3-4B, 27 of 36 layers, hidden 2560 |
//! | diffusion transformer | [`transformer`] | 5 dual + 20 single blocks, width 3072 = 24 heads × 128 |
//! | VAE | [`vae`] | widths 128, 256, 512, 512; 32 latent channels |
//!
//! Struct and field names follow the tensors of the checkpoint, so that loading *is* the name map. Sizes come from the
//! checkpoint's configuration files. Formulas: diffusers 0.37.1 `transformer_flux2.py`, `autoencoder_kl_flux2.py` and
//! transformers 5.3.0 `modeling_qwen3.py`, `modeling_mistral.py`.

pub mod text_encoder;
pub mod transformer;
pub mod vae;

use std::{cell::Cell, path::Path};

use self::{
    text_encoder::{TextEncoder, TextEncoderConfig},
    transformer::{Transformer, TransformerConfig},
    vae::{Vae, VaeConfig},
};
use crate::{
    checkpoint::{Component, read_json},
    device::{Device, Ops, Precision, Row},
    error::Result,
    spec::ModelSpec,
    weight::{DType, Storage, Weight},
};

/// The three configuration files of a checkpoint.
#[derive(Clone, Debug)]
pub struct Configs {
    /// `text_encoder/config.json`.
    pub text_encoder: TextEncoderConfig,
    /// `transformer/config.json`.
    pub transformer: TransformerConfig,
    /// `vae/config.json`.
    pub vae: VaeConfig,
}

impl Configs {
    /// Reads the files of a checkpoint directory; the text encoder may lie elsewhere.
    pub fn read(checkpoint: &Path, text_encoder: &Path) -> Result<Self> {
        Ok(Self {
            text_encoder: read_json(&text_encoder.join("config.json"))?,
            transformer: read_json(&checkpoint.join("transformer/config.json"))?,
            vae: read_json(&checkpoint.join("vae/config.json"))?,
        })
    }

    /// The published FLUX.2 \[dev\].
    pub fn dev() -> Self {
        let klein = Self::klein_4b();
        Self {
            text_encoder: TextEncoderConfig {
                hidden_size: 5120,
                num_hidden_layers: 40,
                intermediate_size: 32_768,
                vocab_size: 131_072,
                rms_norm_eps: 1e-5,
                rope_theta: 1e9,
                ..klein.text_encoder
            },
            transformer: TransformerConfig {
                num_attention_heads: 48,
                num_layers: 8,
                num_single_layers: 48,
                joint_attention_dim: 15_360,
                guidance_embeds: true,
                ..klein.transformer
            },
            vae: klein.vae,
        }
    }

    /// The published FLUX.2 \[klein\] 4B.
    pub fn klein_4b() -> Self {
        Self {
            text_encoder: TextEncoderConfig {
                hidden_size: 2560,
                num_hidden_layers: 36,
                num_attention_heads: 32,
                num_key_value_heads: 8,
                head_dim: 128,
                intermediate_size: 9728,
                vocab_size: 151_936,
                rms_norm_eps: 1e-6,
                rope_theta: 1e6,
            },
            transformer: TransformerConfig {
                num_attention_heads: 24,
                attention_head_dim: 128,
                num_layers: 5,
                num_single_layers: 20,
                in_channels: 128,
                joint_attention_dim: 7680,
                mlp_ratio: 3.0,
                axes_dims_rope: vec![32; 4],
                rope_theta: 2000.0,
                eps: 1e-6,
                timestep_guidance_channels: 256,
                guidance_embeds: false,
            },
            vae: VaeConfig {
                block_out_channels: vec![128, 256, 512, 512],
                layers_per_block: 2,
                latent_channels: 32,
                norm_num_groups: 32,
                batch_norm_eps: 1e-4,
            },
        }
    }
}

/// Where a model's weights come from.
pub trait Weights {
    /// The weight `name`, of exactly this shape.
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight>;
    /// Names for which this is true are knowingly left unused.
    fn ignore(&self, unneeded: &dyn Fn(&str) -> bool);
}

impl Weights for Component {
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        Component::weight(self, name, shape)
    }
    fn ignore(&self, unneeded: &dyn Fn(&str) -> bool) {
        Component::ignore(self, unneeded);
    }
}

/// Weights that have the shapes asked for and no values, to plan a run from configurations alone.
#[derive(Default)]
pub struct ShapesOnly {
    /// Parameters asked for so far.
    pub parameters: Cell<u64>,
}

impl Weights for ShapesOnly {
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        self.parameters.set(self.parameters.get() + shape.iter().product::<usize>() as u64);
        Ok(Weight::new(name, Storage::Absent, 0, DType::Bf16, shape))
    }
    fn ignore(&self, _: &dyn Fn(&str) -> bool) {}
}

/// Weights of one part on their way to a device.
pub struct Loader<'a, D: Device> {
    /// The device's operations.
    pub ops: &'a Ops<'a, D>,
    /// The checkpoint.
    pub weights: &'a dyn Weights,
}

impl<D: Device> Loader<'_, D> {
    /// A weight by name. What is stored as F32 is rounded here, all of it and once, for a device that computes in bf16, as
    /// diffusers does under `torch_dtype=torch.bfloat16`: FLUX.2 \[dev\]'s VAE then is klein's, to the bit.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let weight = self.weights.weight(name, shape)?;
        Ok(if self.ops.device().precision() == Precision::Bf16 { weight.rounded() } else { weight })
    }
    /// A row vector by name.
    pub fn row(&self, name: &str, len: usize) -> Result<Row<D>> {
        self.ops.row(&self.weight(name, &[len])?.to_f32())
    }
}

/// The three parts on a device.
pub struct Model<D: Device> {
    /// Prompt to prompt embeds.
    pub text_encoder: TextEncoder<D>,
    /// Noise to latents.
    pub transformer: Transformer<D>,
    /// Pixels to latents and back.
    pub vae: Vae<D>,
}

impl<D: Device> Model<D> {
    /// Loads the parts from one source of weights each: text encoder, transformer, VAE.
    pub fn load(device: &D, weights: [&dyn Weights; 3], configs: &Configs, spec: &ModelSpec) -> Result<Self> {
        let ops = Ops::new(device);
        let [text_encoder, transformer, vae] = weights.map(|weights| Loader { ops: &ops, weights });
        Ok(Self {
            text_encoder: TextEncoder::load(&text_encoder, &configs.text_encoder, spec)?,
            transformer: Transformer::load(&transformer, &configs.transformer)?,
            vae: Vae::load(&vae, &configs.vae)?,
        })
    }
}

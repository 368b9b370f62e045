// SPDX-License-Identifier: Apache-2.0
//! The VAE: pixels to latents and back, NHWC.
//!
//! Mirrors diffusers 0.37.1 `AutoencoderKLFlux2`. The encoder gives the mean of the posterior (its mode): reference images
//! are never sampled. The batch norm over the 128 patchified channels only lends its running statistics to
//! [`crate::latents`]; it is never applied to noise.

use serde::Deserialize;

use super::Loader;
use crate::{
    device::{Conv, ConvGeometry, Device, GroupNorm, HeadLayout, Mask, Matrix, Ops, QkvPart, Tensor},
    error::{Error, Result},
    latents::LatentStatistics,
};

/// Epsilon of every group norm (fixed in diffusers' blocks).
const EPSILON: f32 = 1e-6;

/// `vae/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct VaeConfig {
    /// Width of each level, from full size to 1/8.
    pub block_out_channels: Vec<usize>,
    /// Resnets of one encoder level; a decoder level has one more.
    pub layers_per_block: usize,
    /// Channels of the latents before 2×2 patches.
    pub latent_channels: usize,
    /// Groups of every group norm.
    pub norm_num_groups: usize,
    /// Added to the running variance.
    #[serde(default = "default_batch_norm_eps")]
    pub batch_norm_eps: f32,
}

fn default_batch_norm_eps() -> f32 {
    1e-4
}

impl VaeConfig {
    fn check(&self) -> Result<()> {
        let channels = 4 * self.latent_channels;
        if channels != crate::latents::CHANNELS || self.block_out_channels.len() != 4 {
            return Err(Error::checkpoint(
                "vae/config.json",
                format!(
                    "latent_channels is {} and block_out_channels has {} levels; FLUX.2 has 32 and 4",
                    self.latent_channels,
                    self.block_out_channels.len()
                ),
            ));
        }
        Ok(())
    }

    fn widest(&self) -> usize {
        self.block_out_channels[self.block_out_channels.len() - 1]
    }
}

/// Encoder and decoder on a device.
pub struct Vae<D: Device> {
    encoder: Encoder<D>,
    decoder: Decoder<D>,
    /// Statistics that normalise latents for the DiT.
    pub statistics: LatentStatistics,
}

struct Encoder<D: Device> {
    conv_in: Conv<D>,
    down_blocks: Vec<Level<D>>,
    mid_block: Mid<D>,
    conv_norm_out: GroupNorm<D>,
    conv_out: Conv<D>,
    quant_conv: Conv<D>,
}

struct Decoder<D: Device> {
    post_quant_conv: Conv<D>,
    conv_in: Conv<D>,
    mid_block: Mid<D>,
    up_blocks: Vec<Level<D>>,
    conv_norm_out: GroupNorm<D>,
    conv_out: Conv<D>,
}

/// Resnets of one resolution, then a change of resolution (not on the last level).
struct Level<D: Device> {
    resnets: Vec<Resnet<D>>,
    sampler: Option<Conv<D>>,
}

struct Resnet<D: Device> {
    norm1: GroupNorm<D>,
    conv1: Conv<D>,
    norm2: GroupNorm<D>,
    conv2: Conv<D>,
    conv_shortcut: Option<Conv<D>>,
}

/// Resnet, attention over all pixels with one head, resnet.
struct Mid<D: Device> {
    resnets: [Resnet<D>; 2],
    group_norm: GroupNorm<D>,
    to_qkv: Matrix<D>,
    to_out: Matrix<D>,
    channels: usize,
}

impl<D: Device> Vae<D> {
    /// Takes all weights of the component.
    pub fn load(loader: &Loader<'_, D>, config: &VaeConfig) -> Result<Self> {
        config.check()?;
        let channels = crate::latents::CHANNELS;
        let mean = loader.weight("bn.running_mean", &[channels])?.to_f32();
        let variance = loader.weight("bn.running_var", &[channels])?.to_f32();
        loader.weights.ignore(&|name| name == "bn.num_batches_tracked");
        Ok(Self {
            encoder: Encoder::load(loader, config)?,
            decoder: Decoder::load(loader, config)?,
            statistics: LatentStatistics::new(&mean, &variance, config.batch_norm_eps),
        })
    }

    /// Posterior moments of an image `[height, width, 3]` in -1..1: `[height / 8, width / 8, 2 · latent channels]`, means
    /// first.
    pub fn encode(&self, ops: &Ops<'_, D>, pixels: &Tensor<D>) -> Result<Tensor<D>> {
        let encoder = &self.encoder;
        let mut x = ops.conv2d(pixels, &encoder.conv_in, ConvGeometry::SAME_3X3)?;
        for (index, level) in encoder.down_blocks.iter().enumerate() {
            for resnet in &level.resnets {
                x = resnet.forward(ops, x)?;
            }
            if let Some(sampler) = &level.sampler {
                x = ops.conv2d(&x, sampler, ConvGeometry::DOWN_3X3)?;
            }
            ops.stage(&x, || format!("vae.encoder.down{index}"))?;
        }
        let x = encoder.mid_block.forward(ops, x)?;
        ops.stage(&x, || "vae.encoder.mid".into())?;
        let x =
            ops.norm_silu_conv(&x, &encoder.conv_norm_out, &encoder.conv_out, ConvGeometry::SAME_3X3, None)?;
        let moments = ops.conv2d(&x, &encoder.quant_conv, ConvGeometry::POINTWISE)?;
        ops.stage(&moments, || "vae.encoder.moments".into())?;
        Ok(moments)
    }

    /// An image `[8 · height, 8 · width, 3]`, about -1..1, from latents `[height, width, latent channels]`.
    pub fn decode(&self, ops: &Ops<'_, D>, latents: &Tensor<D>) -> Result<Tensor<D>> {
        let decoder = &self.decoder;
        ops.stage(latents, || "vae.decoder.input".into())?;
        let x = ops.conv2d(latents, &decoder.post_quant_conv, ConvGeometry::POINTWISE)?;
        let x = ops.conv2d(&x, &decoder.conv_in, ConvGeometry::SAME_3X3)?;
        ops.stage(&x, || "vae.decoder.conv_in".into())?;
        let mut x = decoder.mid_block.forward(ops, x)?;
        ops.stage(&x, || "vae.decoder.mid".into())?;
        for (index, level) in decoder.up_blocks.iter().enumerate() {
            for resnet in &level.resnets {
                x = resnet.forward(ops, x)?;
            }
            if let Some(sampler) = &level.sampler {
                x = ops.upsample_conv(&x, sampler, ConvGeometry::SAME_3X3)?;
            }
            ops.stage(&x, || format!("vae.decoder.up{index}"))?;
        }
        let image =
            ops.norm_silu_conv(&x, &decoder.conv_norm_out, &decoder.conv_out, ConvGeometry::SAME_3X3, None)?;
        ops.stage(&image, || "vae.decoder.output".into())?;
        Ok(image)
    }
}

impl<D: Device> Loader<'_, D> {
    fn conv(&self, name: &str, outputs: usize, inputs: usize, size: usize) -> Result<Conv<D>> {
        self.ops.conv(
            &self.weight(&format!("{name}.weight"), &[outputs, inputs, size, size])?,
            &self.weight(&format!("{name}.bias"), &[outputs])?,
        )
    }

    fn group_norm(&self, name: &str, channels: usize, groups: usize) -> Result<GroupNorm<D>> {
        Ok(GroupNorm {
            groups,
            weight: self.row(&format!("{name}.weight"), channels)?,
            bias: self.row(&format!("{name}.bias"), channels)?,
            epsilon: EPSILON,
        })
    }
}

impl<D: Device> Encoder<D> {
    fn load(loader: &Loader<'_, D>, config: &VaeConfig) -> Result<Self> {
        let (widths, groups, latent) =
            (&config.block_out_channels, config.norm_num_groups, config.latent_channels);
        let mut down_blocks = Vec::new();
        for (level, &width) in widths.iter().enumerate() {
            let prefix = format!("encoder.down_blocks.{level}");
            let inputs = widths[level.saturating_sub(1)];
            let resnets = Resnet::load_all(loader, &prefix, config.layers_per_block, inputs, width, groups)?;
            let sampler = (level + 1 < widths.len())
                .then(|| loader.conv(&format!("{prefix}.downsamplers.0.conv"), width, width, 3))
                .transpose()?;
            down_blocks.push(Level { resnets, sampler });
        }
        let widest = config.widest();
        Ok(Self {
            conv_in: loader.conv("encoder.conv_in", widths[0], 3, 3)?,
            down_blocks,
            mid_block: Mid::load(loader, "encoder.mid_block", widest, groups)?,
            conv_norm_out: loader.group_norm("encoder.conv_norm_out", widest, groups)?,
            conv_out: loader.conv("encoder.conv_out", 2 * latent, widest, 3)?,
            quant_conv: loader.conv("quant_conv", 2 * latent, 2 * latent, 1)?,
        })
    }
}

impl<D: Device> Decoder<D> {
    fn load(loader: &Loader<'_, D>, config: &VaeConfig) -> Result<Self> {
        let (groups, latent, widest) = (config.norm_num_groups, config.latent_channels, config.widest());
        let mut up_blocks = Vec::new();
        let mut inputs = widest;
        for (level, &width) in config.block_out_channels.iter().rev().enumerate() {
            let prefix = format!("decoder.up_blocks.{level}");
            let resnets =
                Resnet::load_all(loader, &prefix, config.layers_per_block + 1, inputs, width, groups)?;
            let sampler = (level + 1 < config.block_out_channels.len())
                .then(|| loader.conv(&format!("{prefix}.upsamplers.0.conv"), width, width, 3))
                .transpose()?;
            up_blocks.push(Level { resnets, sampler });
            inputs = width;
        }
        Ok(Self {
            post_quant_conv: loader.conv("post_quant_conv", latent, latent, 1)?,
            conv_in: loader.conv("decoder.conv_in", widest, latent, 3)?,
            mid_block: Mid::load(loader, "decoder.mid_block", widest, groups)?,
            up_blocks,
            conv_norm_out: loader.group_norm("decoder.conv_norm_out", inputs, groups)?,
            conv_out: loader.conv("decoder.conv_out", 3, inputs, 3)?,
        })
    }
}

impl<D: Device> Resnet<D> {
    fn load(
        loader: &Loader<'_, D>,
        prefix: &str,
        inputs: usize,
        outputs: usize,
        groups: usize,
    ) -> Result<Self> {
        Ok(Self {
            norm1: loader.group_norm(&format!("{prefix}.norm1"), inputs, groups)?,
            conv1: loader.conv(&format!("{prefix}.conv1"), outputs, inputs, 3)?,
            norm2: loader.group_norm(&format!("{prefix}.norm2"), outputs, groups)?,
            conv2: loader.conv(&format!("{prefix}.conv2"), outputs, outputs, 3)?,
            conv_shortcut: (inputs != outputs)
                .then(|| loader.conv(&format!("{prefix}.conv_shortcut"), outputs, inputs, 1))
                .transpose()?,
        })
    }

    /// The resnets of one level; only the first changes the width.
    fn load_all(
        loader: &Loader<'_, D>,
        prefix: &str,
        count: usize,
        inputs: usize,
        outputs: usize,
        groups: usize,
    ) -> Result<Vec<Self>> {
        (0..count)
            .map(|index| {
                let inputs = if index == 0 { inputs } else { outputs };
                Self::load(loader, &format!("{prefix}.resnets.{index}"), inputs, outputs, groups)
            })
            .collect()
    }

    /// Takes `x`, so that a full-size map is freed as soon as it is not needed.
    fn forward(&self, ops: &Ops<'_, D>, x: Tensor<D>) -> Result<Tensor<D>> {
        let h = ops.norm_silu_conv(&x, &self.norm1, &self.conv1, ConvGeometry::SAME_3X3, None)?;
        let skip = match &self.conv_shortcut {
            Some(conv) => {
                let skip = ops.conv2d(&x, conv, ConvGeometry::POINTWISE)?;
                drop(x);
                skip
            }
            None => x,
        };
        ops.norm_silu_conv(&h, &self.norm2, &self.conv2, ConvGeometry::SAME_3X3, Some(&skip))
    }
}

impl<D: Device> Mid<D> {
    fn load(loader: &Loader<'_, D>, prefix: &str, channels: usize, groups: usize) -> Result<Self> {
        let attention = format!("{prefix}.attentions.0");
        let weight = |name: &str| loader.weight(&format!("{attention}.{name}.weight"), &[channels, channels]);
        let bias = |name: &str| loader.weight(&format!("{attention}.{name}.bias"), &[channels]);
        let resnet =
            |index| Resnet::load(loader, &format!("{prefix}.resnets.{index}"), channels, channels, groups);
        Ok(Self {
            resnets: [resnet(0)?, resnet(1)?],
            group_norm: loader.group_norm(&format!("{attention}.group_norm"), channels, groups)?,
            to_qkv: loader.ops.matrix_with_bias(
                &[weight("to_q")?, weight("to_k")?, weight("to_v")?],
                &[bias("to_q")?, bias("to_k")?, bias("to_v")?],
            )?,
            to_out: loader.ops.matrix_with_bias(&[weight("to_out.0")?], &[bias("to_out.0")?])?,
            channels,
        })
    }

    fn forward(&self, ops: &Ops<'_, D>, x: Tensor<D>) -> Result<Tensor<D>> {
        let x = self.resnets[0].forward(ops, x)?;
        let crate::device::Shape::Image(height, width, _) = x.shape() else {
            return Err(Error::Shape {
                operation: "vae.mid",
                got: x.shape().to_string(),
                wanted: "an image".into(),
            });
        };
        let h = ops.image_to_rows(&ops.group_norm(&x, &self.group_norm, false)?)?;
        let qkv = ops.linear(&h, &self.to_qkv)?; // [height · width, 3 · channels]
        let layout = HeadLayout { query_heads: 1, key_value_heads: 1, head_dim: self.channels };
        let part = QkvPart { qkv: &qkv, query_norm: None, key_norm: None };
        let heads = ops.qkv_heads(&[part], layout, EPSILON, None)?;
        drop(qkv);
        let o = ops.attention(&heads, &Mask::None, (self.channels as f32).powf(-0.5))?;
        let x = ops.linear_add(&o, &self.to_out, None, &ops.image_to_rows(&x)?)?;
        self.resnets[1].forward(ops, ops.rows_to_image(&x, height, width)?)
    }
}

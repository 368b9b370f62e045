// SPDX-License-Identifier: Apache-2.0
//! Latent layouts: packing, 2×2 patches, the VAE's statistics, and position ids of tokens.
//!
//! Noise lives in the patched 128-channel space and is never normalised; what the DiT ends with is denormalised exactly
//! once, by [`to_vae`]. A latent of the VAE has 32 channels at 1/8 of the picture's size; channel `4c + 2p + q` of a
//! patch is channel `c` of the patch's row `p` and column `q` (diffusers `_patchify_latents`).

/// Channels of a latent token: 32 of the VAE times a 2×2 patch.
pub const CHANNELS: usize = 128;

/// Rows or columns of a patch.
const PATCH: usize = 2;
/// Channels of the VAE's latents.
const VAE_CHANNELS: usize = CHANNELS / (PATCH * PATCH);
/// Time id of the first reference, and the distance to the next.
const REFERENCE_TIME: i32 = 10;

/// A latent `[channels, height, width]` as tokens `[height · width, channels]`.
///
/// # Panics
/// If the length is not a multiple of `height * width`.
pub fn pack(z: &[f32], height: usize, width: usize) -> Vec<f32> {
    let tokens = height * width;
    assert!(tokens > 0 && z.len().is_multiple_of(tokens), "{} values for {height}x{width} tokens", z.len());
    let channels = z.len() / tokens;
    (0..tokens).flat_map(|token| (0..channels).map(move |c| z[c * tokens + token])).collect()
}

/// Mean and standard deviation of each of the 128 channels, from the VAE's batch norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentStatistics {
    /// Mean by channel.
    pub mean: Vec<f32>,
    /// Standard deviation by channel.
    pub std: Vec<f32>,
}

impl LatentStatistics {
    /// Statistics from `bn.running_mean`, `bn.running_var` and `batch_norm_eps` of the VAE.
    ///
    /// # Panics
    /// If there are not 128 of each.
    pub fn new(running_mean: &[f32], running_var: &[f32], epsilon: f32) -> Self {
        assert_eq!((running_mean.len(), running_var.len()), (CHANNELS, CHANNELS), "latent statistics");
        let std = running_var.iter().map(|variance| (variance + epsilon).sqrt()).collect();
        Self { mean: running_mean.to_vec(), std }
    }
}

/// Tokens `[grid_height · grid_width, 128]` of the DiT as the VAE decoder's input: denormalised (`x · std + mean`) and
/// unpatchified to NHWC `[2 · grid_height, 2 · grid_width, 32]`.
///
/// # Panics
/// If the length does not fit the grid.
pub fn to_vae(
    tokens: &[f32],
    grid_height: usize,
    grid_width: usize,
    statistics: &LatentStatistics,
) -> Vec<f32> {
    assert_eq!(
        tokens.len(),
        grid_height * grid_width * CHANNELS,
        "tokens of a {grid_height}x{grid_width} grid"
    );
    let mut image = vec![0.0; tokens.len()];
    for_each_channel(grid_height, grid_width, |token, channel, at| {
        image[at] = tokens[token * CHANNELS + channel] * statistics.std[channel] + statistics.mean[channel];
    });
    image
}

/// Mean of the VAE encoder's output, NHWC `[height, width, 32]`, as reference tokens of the DiT: patchified, normalised
/// (`(x - mean) / std`) and packed to `[height / 2 · width / 2, 128]`.
///
/// # Panics
/// If height or width is odd or the length does not fit.
pub fn from_vae(mean: &[f32], height: usize, width: usize, statistics: &LatentStatistics) -> Vec<f32> {
    assert!(height.is_multiple_of(PATCH) && width.is_multiple_of(PATCH), "latent of {height}x{width}");
    assert_eq!(mean.len(), height * width * VAE_CHANNELS, "latent of {height}x{width}");
    let mut tokens = vec![0.0; mean.len()];
    for_each_channel(height / PATCH, width / PATCH, |token, channel, at| {
        tokens[token * CHANNELS + channel] = (mean[at] - statistics.mean[channel]) / statistics.std[channel];
    });
    tokens
}

/// Calls `f(token, channel, index in the NHWC latent)` for every value of a grid of tokens.
fn for_each_channel(grid_height: usize, grid_width: usize, mut f: impl FnMut(usize, usize, usize)) {
    for y in 0..grid_height {
        for x in 0..grid_width {
            for channel in 0..CHANNELS {
                let (c, p, q) = (channel / (PATCH * PATCH), channel / PATCH % PATCH, channel % PATCH);
                let pixel = (PATCH * y + p) * (PATCH * grid_width) + PATCH * x + q;
                f(y * grid_width + x, channel, pixel * VAE_CHANNELS + c);
            }
        }
    }
}

/// Ids (t, h, w, l) of `n` text tokens: only l counts up.
pub fn text_ids(n: usize) -> Vec<[i32; 4]> {
    (0..n).map(|l| [0, 0, 0, l as i32]).collect()
}

/// Ids of the tokens of a picture, row by row: t = 0.
pub fn image_ids(height: usize, width: usize) -> Vec<[i32; 4]> {
    grid_ids(0, height, width)
}

/// Ids of the tokens of reference `index` (from 0), row by row: t = 10 + 10 · index, h and w from 0 as the picture's own.
pub fn reference_ids(index: usize, height: usize, width: usize) -> Vec<[i32; 4]> {
    grid_ids(REFERENCE_TIME * (1 + index as i32), height, width)
}

fn grid_ids(time: i32, height: usize, width: usize) -> Vec<[i32; 4]> {
    (0..height * width).map(|i| [time, (i / width) as i32, (i % width) as i32, 0]).collect()
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "tests")]
mod tests {
    use super::*;

    fn statistics() -> LatentStatistics {
        let mean: Vec<f32> = (0..CHANNELS).map(|c| c as f32).collect();
        LatentStatistics::new(&mean, &[3.9999; CHANNELS], 1e-4)
    }

    #[test]
    fn packing_moves_channels_last() {
        assert_eq!(pack(&[1.0, 2.0, 3.0, 10.0, 20.0, 30.0], 1, 3), [1.0, 10.0, 2.0, 20.0, 3.0, 30.0]);
    }

    #[test]
    fn latents_are_denormalised_exactly_once() {
        // Tokens of all ones: every value becomes 1 · std + mean of its channel, std = √(3.9999 + 0.0001) = 2.
        let image = to_vae(&[1.0; 2 * CHANNELS], 1, 2, &statistics());
        for (y, x, c) in [(0, 0, 0), (1, 0, 5), (0, 3, 31), (1, 2, 17)] {
            let channel = 4 * c + 2 * y + x % 2;
            assert_eq!(image[(y * 4 + x) * 32 + c], 2.0 + channel as f32, "row {y}, column {x}, channel {c}");
        }
    }

    #[test]
    fn a_patch_is_two_by_two_pixels_of_the_latent() {
        let identity = LatentStatistics::new(&[0.0; CHANNELS], &[1.0; CHANNELS], 0.0);
        let tokens: Vec<f32> = (0..6 * CHANNELS).map(|v| v as f32).collect();
        let image = to_vae(&tokens, 2, 3, &identity);
        // Token (y 1, x 2), channel 4·7 + 2·1 + 0 is latent channel 7 at row 3, column 4.
        assert_eq!(image[(3 * 6 + 4) * 32 + 7], tokens[5 * CHANNELS + 30]);
    }

    #[test]
    fn encoding_undoes_decoding() {
        let tokens: Vec<f32> = (0..6 * CHANNELS).map(|v| (v as f32 * 0.37).sin()).collect();
        let statistics = statistics();
        let back = from_vae(&to_vae(&tokens, 2, 3, &statistics), 4, 6, &statistics);
        assert!(tokens.iter().zip(&back).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    #[test]
    fn ids_of_text_image_and_references() {
        assert_eq!(text_ids(3), [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]]);
        assert_eq!(image_ids(2, 2), [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]]);
        assert_eq!(reference_ids(0, 1, 2), [[10, 0, 0, 0], [10, 0, 1, 0]]);
        assert_eq!(reference_ids(2, 2, 1), [[30, 0, 0, 0], [30, 1, 0, 0]]);
    }
}

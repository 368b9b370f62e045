// SPDX-License-Identifier: Apache-2.0
//! The definitions, in f64, as plain as they can be written.

use std::ops::Range;

use flux2::{
    device::{ConvGeometry, HeadLayout, Mask},
    rope::RotaryTable,
};

/// `x Wᵀ`, `x` `[rows, inputs]`, `w` `[outputs, inputs]`.
pub fn linear(x: &[f64], w: &[f64], inputs: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(inputs) {
        out.extend(w.chunks_exact(inputs).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>()));
    }
    out
}

pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

pub fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64], epsilon: f64) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(weight.len()) {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        out.extend(
            x.iter()
                .zip(weight)
                .zip(bias)
                .map(|((x, w), b)| (x - mean) / (variance + epsilon).sqrt() * w + b),
        );
    }
    out
}

pub fn rms_norm(x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(weight.len()) {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        out.extend(x.iter().zip(weight).map(|(x, w)| x / (mean + epsilon).sqrt() * w));
    }
    out
}

/// One stream of a joint attention.
pub struct Part {
    pub qkv: Vec<f64>,
    pub query_norm: Option<Vec<f64>>,
    pub key_norm: Option<Vec<f64>>,
}

/// Query, key and value as `[heads, rows, head_dim]`.
pub fn qkv_heads(
    parts: &[Part],
    layout: HeadLayout,
    epsilon: f64,
    rotary: Option<&RotaryTable>,
) -> [Vec<f64>; 3] {
    let dim = layout.head_dim;
    let head = |index: usize, norm: fn(&Part) -> Option<&Vec<f64>>, rotate: bool| {
        let mut out = Vec::new();
        for part in parts {
            for row in part.qkv.chunks_exact(layout.columns()) {
                let x = &row[index * dim..(index + 1) * dim];
                let mut x = norm(part).map_or_else(|| x.to_vec(), |weight| rms_norm(x, weight, epsilon));
                if let Some(table) = rotary.filter(|_| rotate) {
                    let at = out.len() / dim * table.pairs();
                    for k in 0..table.pairs() {
                        let (cos, sin) = (f64::from(table.cos[at + k]), f64::from(table.sin[at + k]));
                        let (a, b) = (x[2 * k], x[2 * k + 1]);
                        (x[2 * k], x[2 * k + 1]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
                out.extend(x);
            }
        }
        out
    };
    let heads = |range: Range<usize>, norm, rotate| range.flat_map(|h| head(h, norm, rotate)).collect();
    let (q, kv) = (layout.query_heads, layout.key_value_heads);
    [
        heads(0..q, |part| part.query_norm.as_ref(), true),
        heads(q..q + kv, |part| part.key_norm.as_ref(), true),
        heads(q + kv..q + 2 * kv, |_| None, false),
    ]
}

pub fn attention(qkv: &[Vec<f64>; 3], rows: usize, layout: HeadLayout, mask: &Mask, scale: f64) -> Vec<f64> {
    let dim = layout.head_dim;
    let mut out = vec![0.0; rows * layout.query_columns()];
    for head in 0..layout.query_heads {
        let key_value_head = head / (layout.query_heads / layout.key_value_heads);
        let row = |x: &[f64], head: usize, row: usize| x[(head * rows + row) * dim..][..dim].to_vec();
        for i in 0..rows {
            let seen = match mask {
                Mask::None => 0..rows,
                Mask::Keys(keys) => keys.clone(),
                Mask::CausalKeys(keys) => keys.start..keys.end.min(i + 1),
            };
            let query = row(&qkv[0], head, i);
            let dot = |j| query.iter().zip(row(&qkv[1], key_value_head, j)).map(|(q, k)| q * k).sum::<f64>();
            let scores: Vec<f64> = seen.clone().map(|j| scale * dot(j)).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let out = &mut out[i * layout.query_columns() + head * dim..][..dim];
            for (j, score) in seen.zip(scores) {
                for (out, v) in out.iter_mut().zip(row(&qkv[2], key_value_head, j)) {
                    *out += (score - largest).exp() / total * v;
                }
            }
        }
    }
    out
}

/// NHWC convolution with a kernel `[out, in, size, size]`.
pub fn conv(
    x: &[f64],
    [height, width, inputs]: [usize; 3],
    kernel: &[f64],
    bias: &[f64],
    size: usize,
    geometry: ConvGeometry,
) -> Vec<f64> {
    let [out_height, out_width] = geometry.output(height, width, size);
    let mut out = Vec::new();
    for y in 0..out_height {
        for x_out in 0..out_width {
            for (o, bias) in bias.iter().enumerate() {
                let mut sum = *bias;
                for dy in 0..size {
                    for dx in 0..size {
                        let row = (y * geometry.stride + dy).checked_sub(geometry.padding[0]);
                        let column = (x_out * geometry.stride + dx).checked_sub(geometry.padding[1]);
                        let (Some(row), Some(column)) = (row, column) else { continue };
                        if row >= height || column >= width {
                            continue;
                        }
                        for c in 0..inputs {
                            sum += x[(row * width + column) * inputs + c]
                                * kernel[((o * inputs + c) * size + dy) * size + dx];
                        }
                    }
                }
                out.push(sum);
            }
        }
    }
    out
}

pub fn group_norm(
    x: &[f64],
    channels: usize,
    groups: usize,
    weight: &[f64],
    bias: &[f64],
    epsilon: f64,
) -> Vec<f64> {
    let size = channels / groups;
    let mut out = x.to_vec();
    for group in 0..groups {
        let values = || x.chunks_exact(channels).flat_map(|pixel| &pixel[group * size..(group + 1) * size]);
        let count = values().count() as f64;
        let mean = values().sum::<f64>() / count;
        let variance = values().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        for pixel in out.chunks_exact_mut(channels) {
            for c in group * size..(group + 1) * size {
                pixel[c] = (pixel[c] - mean) / (variance + epsilon).sqrt() * weight[c] + bias[c];
            }
        }
    }
    out
}

pub fn upsample(x: &[f64], [height, width, channels]: [usize; 3]) -> Vec<f64> {
    let mut out = Vec::new();
    for y in 0..2 * height {
        for column in 0..2 * width {
            out.extend_from_slice(&x[(y / 2 * width + column / 2) * channels..][..channels]);
        }
    }
    out
}

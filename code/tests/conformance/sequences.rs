// SPDX-License-Identifier: Apache-2.0
//! Heads and attention.

use flux2::{
    device::{Device, HeadLayout, Mask, Ops, QkvPart},
    rope::RotaryTable,
};

use crate::{
    cases::{BOUND, Numbers, close, devices, error, product_bound, rounds_inputs, wide},
    reference,
};

const LAYOUTS: [HeadLayout; 5] = [
    HeadLayout { query_heads: 3, key_value_heads: 3, head_dim: 32 },
    HeadLayout { query_heads: 8, key_value_heads: 2, head_dim: 128 },
    HeadLayout { query_heads: 1, key_value_heads: 1, head_dim: 512 },
    HeadLayout { query_heads: 2, key_value_heads: 1, head_dim: 6 },
    HeadLayout { query_heads: 2, key_value_heads: 2, head_dim: 50 },
];

fn table(rows: usize, pairs: usize) -> RotaryTable {
    let angle = |i: usize| (i / pairs) as f64 * 0.7 / (1.0 + (i % pairs) as f64);
    let cos = (0..rows * pairs).map(|i| angle(i).cos() as f32).collect();
    let sin = (0..rows * pairs).map(|i| angle(i).sin() as f32).collect();
    RotaryTable::new(rows, pairs, cos, sin)
}

#[test]
fn heads_are_split_normalised_and_rotated() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(10);
        for layout in LAYOUTS {
            for rows in [vec![1], vec![5, 28], vec![33], vec![0, 17], vec![0]] {
                for (normed, rotated) in [(false, false), (true, false), (true, true), (false, true)] {
                    let total: usize = rows.iter().sum();
                    let table = table(total, layout.head_dim / 2);
                    let norm = |numbers: &mut Numbers| normed.then(|| numbers.take(layout.head_dim));
                    let parts: Vec<_> = rows
                        .iter()
                        .map(|rows| {
                            (numbers.take(rows * layout.columns()), norm(&mut numbers), norm(&mut numbers))
                        })
                        .collect();
                    let wanted: Vec<_> = parts
                        .iter()
                        .map(|(qkv, q, k)| reference::Part {
                            qkv: wide(qkv),
                            query_norm: q.as_deref().map(wide),
                            key_norm: k.as_deref().map(wide),
                        })
                        .collect();
                    let wanted = reference::qkv_heads(&wanted, layout, 1e-6, rotated.then_some(&table));
                    let uploaded: Vec<_> = parts
                        .iter()
                        .zip(&rows)
                        .map(|((qkv, q, k), rows)| {
                            let row =
                                |values: &Option<Vec<f32>>| values.as_ref().map(|v| ops.row(v).unwrap());
                            (ops.upload_rows(qkv, *rows, layout.columns()).unwrap(), row(q), row(k))
                        })
                        .collect();
                    let parts: Vec<_> = uploaded
                        .iter()
                        .map(|(qkv, q, k)| QkvPart { qkv, query_norm: q.as_ref(), key_norm: k.as_ref() })
                        .collect();
                    let rotary = rotated.then(|| ops.rotary(&table).unwrap());
                    let qkv = ops.qkv_heads(&parts, layout, 1e-6, rotary.as_ref()).unwrap();
                    for (got, wanted) in ops.download_qkv(&qkv).unwrap().iter().zip(&wanted) {
                        close(
                            got,
                            wanted,
                            product_bound(&device),
                            format!("{} {layout:?} {rows:?}", device.name()),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn attention_under_every_mask() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(11);
        for layout in LAYOUTS {
            for rows in [0, 1, 2, 17, 100, 321] {
                let masks = [
                    Mask::None,
                    Mask::Keys(0..rows),
                    Mask::Keys(0..rows / 3),
                    Mask::Keys(rows / 2..rows - rows / 5),
                    Mask::Keys(rows..rows),
                    Mask::Keys(0..0),
                    Mask::CausalKeys(0..rows),
                    Mask::CausalKeys(0..rows / 4),
                    Mask::CausalKeys(rows / 3..rows - rows / 4),
                ];
                let qkv: Vec<f32> = numbers.take(rows * layout.columns()).iter().map(|v| 2.0 * v).collect();
                let part = reference::Part { qkv: wide(&qkv), query_norm: None, key_norm: None };
                let wanted = reference::qkv_heads(&[part], layout, 0.0, None);
                let bf16 =
                    |values: &Vec<f64>| values.iter().map(|v| half::bf16::from_f64(*v).to_f64()).collect();
                let coarse = wanted.each_ref().map(bf16);
                let qkv = ops.upload_rows(&qkv, rows, layout.columns()).unwrap();
                let part = QkvPart { qkv: &qkv, query_norm: None, key_norm: None };
                let heads = ops.qkv_heads(&[part], layout, 0.0, None).unwrap();
                for mask in masks {
                    // From flat to a few keys that take all.
                    for scale in [0.1f32, 1.5] {
                        let wanted = reference::attention(&wanted, rows, layout, &mask, f64::from(scale));
                        let got = ops.download(&ops.attention(&heads, &mask, scale).unwrap()).unwrap();
                        let case = format!("{} {layout:?} {rows} rows {mask:?} scale {scale}", device.name());
                        // Errors of a score grow with it: in fp16 no more than they do in bf16; bf16 also rounds the
                        // probabilities.
                        let bound = if product_bound(&device) > BOUND {
                            let coarse = reference::attention(&coarse, rows, layout, &mask, f64::from(scale));
                            let coarse = coarse.iter().map(|v| *v as f32).collect::<Vec<_>>();
                            let probabilities = if rounds_inputs(&device) { 4e-3 } else { 0.0 };
                            1.01 * error(&coarse, &wanted) + probabilities
                        } else {
                            1e-5
                        };
                        close(&got, &wanted, bound, case);
                    }
                }
            }
        }
    }
}

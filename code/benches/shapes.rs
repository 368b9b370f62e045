// SPDX-License-Identifier: Apache-2.0
//! One kernel at a time, at the word of another program: how `benches/compare.py` runs ours and a peer's in turn.
//!
//! Reads lines from standard input and answers each with one: `linear ROWS INPUTS OUTPUTS`, `attention ROWS HEADS`,
//! `conv SIDE INPUTS OUTPUTS` prepare and answer `ready`; `run` answers the seconds of one run. The first line printed
//! names the device and its peak in TFLOP/s. Arguments: the precision, `bf16` or `f32`, and the number of threads.

use std::{
    io::{BufRead, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use flux2::{
    Result,
    device::{
        ConvGeometry, Device, HeadLayout, Mask, Ops, Precision, QkvPart,
        cpu::{CpuDevice, CpuOptions},
    },
    weight::{DType, Storage, Weight},
};

/// Numbers in -1 to 1.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// A bf16 weight.
fn weight(shape: &[usize]) -> Weight {
    let values = numbers(shape.iter().product());
    let bytes = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
    Weight::new("w", Storage::Owned(Arc::new(bytes)), 0, DType::Bf16, shape)
}

type Work<'a> = Box<dyn Fn() -> Result<()> + 'a>;

/// The work that a line asks for.
fn prepare<'a>(ops: &'a Ops<'a, CpuDevice>, what: &str, sizes: &[usize]) -> Result<Option<Work<'a>>> {
    Ok(match (what, sizes) {
        ("linear", &[rows, inputs, outputs]) => {
            let x = ops.upload_rows(&numbers(rows * inputs), rows, inputs)?;
            let w = ops.matrix(&[weight(&[outputs, inputs])])?;
            Some(Box::new(move || ops.linear(&x, &w).map(|_| ())))
        }
        ("attention", &[rows, heads]) => {
            let layout = HeadLayout { query_heads: heads, key_value_heads: heads, head_dim: 128 };
            let qkv = ops.upload_rows(&numbers(rows * layout.columns()), rows, layout.columns())?;
            let part = QkvPart { qkv: &qkv, query_norm: None, key_norm: None };
            let heads = ops.qkv_heads(&[part], layout, 1e-6, None)?;
            Some(Box::new(move || ops.attention(&heads, &Mask::None, 0.088).map(|_| ())))
        }
        ("conv", &[side, inputs, outputs]) => {
            let x = ops.upload_image(&numbers(side * side * inputs), side, side, inputs)?;
            let conv = ops.conv(&weight(&[outputs, inputs, 3, 3]), &weight(&[outputs]))?;
            Some(Box::new(move || ops.conv2d(&x, &conv, ConvGeometry::SAME_3X3).map(|_| ())))
        }
        _ => None,
    })
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let precision = if arguments.next().as_deref() == Some("f32") { Precision::F32 } else { Precision::Bf16 };
    let threads = arguments.next().and_then(|threads| threads.parse().ok());
    let device = CpuDevice::new(CpuOptions { precision, threads })?;
    let peak = device.peak_flops(Duration::from_millis(500)) / 1e12;
    let mut out = std::io::stdout();
    let mut answer = |line: String| writeln!(out, "{line}").and_then(|()| out.flush()).is_ok();
    if !answer(format!("{}, peak {peak:.3} TFLOP/s", device.name())) {
        return Ok(());
    }
    let ops = Ops::new(&device);
    let mut work: Option<Work<'_>> = None;
    for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
        let mut words = line.split_whitespace();
        let what = words.next().unwrap_or_default();
        let sizes: Vec<usize> = words.filter_map(|word| word.parse().ok()).collect();
        let said = if what == "run"
            && let Some(work) = &work
        {
            let start = Instant::now();
            work()?;
            answer(format!("{:.9}", start.elapsed().as_secs_f64()))
        } else {
            // The last one's memory goes first.
            drop(work.take());
            work = prepare(&ops, what, &sizes)?;
            answer(if work.is_some() { "ready".into() } else { format!("unknown: {line}") })
        };
        if !said {
            break;
        }
    }
    Ok(())
}

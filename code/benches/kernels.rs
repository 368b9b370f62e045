// SPDX-License-Identifier: Apache-2.0
//! The CPU's kernels on the shapes of FLUX.2 [klein] 4B at 512×512 (1,536 rows) and 1024×1024 (4,608 rows).
//!
//! `cargo bench -p flux2 --bench kernels [-- FILTER]`. "elem/s" are floating-point operations per second, so Gelem/s are
//! GFLOP/s; compare them with the peak printed first. `FLUX2_CPU_ISA` chooses the instructions. An operation's FLOPs are
//! those of its definition: folded upsampling and skipped causal blocks show as more than the peak.

use std::{sync::Arc, time::Duration};

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use flux2::{
    Result,
    device::{
        ConvGeometry, GroupNorm, HeadLayout, Mask, Ops, Precision, QkvPart,
        cpu::{CpuDevice, CpuOptions},
    },
    weight::{DType, Storage, Weight},
};

type Cpu<'a> = Ops<'a, CpuDevice>;

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

fn bench<R>(c: &mut Criterion, group: &str, name: &str, flops: usize, run: impl Fn() -> Result<R>) {
    let mut group = c.benchmark_group(group);
    // Flat: one long run per sample, not ten.
    group.sampling_mode(SamplingMode::Flat);
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(flops as u64));
    group.bench_function(name, |b| b.iter(|| run().expect("kernels do not fail")));
    group.finish();
}

fn linears(c: &mut Criterion, ops: &Cpu<'_>) -> Result<()> {
    for [rows, inputs, outputs] in [
        [1536, 3072, 9216],
        [1536, 9216, 3072],
        [1536, 12_288, 3072],
        [4608, 3072, 9216],
        [4608, 9216, 3072],
        [512, 2560, 6144],
        [512, 9728, 2560],
        [1, 3072, 18_432],
    ] {
        let x = ops.upload_rows(&numbers(rows * inputs), rows, inputs)?;
        let w = ops.matrix(&[weight(&[outputs, inputs])])?;
        let flops = 2 * rows * inputs * outputs;
        bench(c, "linear", &format!("{rows}x{inputs}x{outputs}"), flops, || ops.linear(&x, &w));
    }
    let (rows, inputs, outputs) = (1536, 3072, 9216);
    let x = ops.upload_rows(&numbers(rows * inputs), rows, inputs)?;
    let w = ops.gated_matrix(&weight(&[outputs, inputs]), &weight(&[outputs, inputs]))?;
    let name = format!("{rows}x{inputs}x2x{outputs}");
    bench(c, "linear_swiglu", &name, 4 * rows * inputs * outputs, || ops.linear_swiglu(&x, &w));
    Ok(())
}

fn attention(c: &mut Criterion, ops: &Cpu<'_>) -> Result<()> {
    let dit = HeadLayout { query_heads: 24, key_value_heads: 24, head_dim: 128 };
    let text = HeadLayout { query_heads: 32, key_value_heads: 8, head_dim: 128 };
    let vae = HeadLayout { query_heads: 1, key_value_heads: 1, head_dim: 512 };
    for (name, rows, layout, mask) in [
        ("dit 1536", 1536, dit, Mask::None),
        ("dit 4608", 4608, dit, Mask::None),
        ("text encoder 512 causal", 512, text, Mask::CausalKeys(0..512)),
        ("text encoder 512 causal, 30 keys", 512, text, Mask::CausalKeys(0..30)),
        ("vae 4096", 4096, vae, Mask::None),
    ] {
        let qkv = ops.upload_rows(&numbers(rows * layout.columns()), rows, layout.columns())?;
        let norm = ops.row(&numbers(layout.head_dim))?;
        let split = || {
            let part = QkvPart { qkv: &qkv, query_norm: Some(&norm), key_norm: Some(&norm) };
            ops.qkv_heads(&[part], layout, 1e-6, None)
        };
        let heads = split()?;
        let flops = 4 * rows * rows * layout.query_columns();
        bench(c, "attention", name, flops, || ops.attention(&heads, &mask, 0.088));
        bench(c, "qkv_heads", name, rows * layout.columns(), split);
    }
    Ok(())
}

fn convolutions(c: &mut Criterion, ops: &Cpu<'_>) -> Result<()> {
    for (side, inputs, outputs) in
        [(64, 512, 512), (128, 512, 512), (256, 512, 256), (256, 256, 256), (512, 256, 128), (512, 128, 128)]
    {
        let x = ops.upload_image(&numbers(side * side * inputs), side, side, inputs)?;
        let conv = ops.conv(&weight(&[outputs, inputs, 3, 3]), &weight(&[outputs]))?;
        let row = || ops.row(&numbers(inputs));
        let norm = GroupNorm { groups: 32, weight: row()?, bias: row()?, epsilon: 1e-6 };
        let name = format!("{inputs} to {outputs} at {side}x{side}");
        let flops = 18 * side * side * inputs * outputs;
        let same = ConvGeometry::SAME_3X3;
        bench(c, "conv2d", &name, flops, || ops.conv2d(&x, &conv, same));
        bench(c, "norm_silu_conv", &name, flops, || ops.norm_silu_conv(&x, &norm, &conv, same, None));
        if inputs == outputs && side < 512 {
            bench(c, "upsample_conv", &name, 4 * flops, || ops.upsample_conv(&x, &conv, same));
            bench(c, "conv2d stride 2", &name, flops / 4, || ops.conv2d(&x, &conv, ConvGeometry::DOWN_3X3));
        }
    }
    Ok(())
}

fn rows(c: &mut Criterion, ops: &Cpu<'_>) -> Result<()> {
    let (rows, columns) = (4608, 3072);
    let x = ops.upload_rows(&numbers(rows * columns), rows, columns)?;
    let row = ops.row(&numbers(columns))?;
    let values = rows * columns;
    bench(c, "rows", "layer_norm 4608x3072", values, || ops.layer_norm(&x, &row, &row, 1e-6));
    bench(c, "rows", "rms_norm 4608x3072", values, || ops.rms_norm(&x, &row, 1e-6));
    bench(c, "rows", "silu 4608x3072", values, || ops.silu(&x));
    bench(c, "rows", "gated_add 4608x3072", values, || ops.gated_add(&x, &row, &x));
    Ok(())
}

fn kernels(c: &mut Criterion) {
    let device = CpuDevice::new(CpuOptions { precision: Precision::Bf16, threads: None }).expect("a CPU");
    let peak = device.peak_flops(Duration::from_millis(500));
    println!("{}, peak {:.1} GFLOP/s", flux2::device::Device::name(&device), peak / 1e9);
    let ops = Ops::new(&device);
    for part in [linears, attention, convolutions, rows] {
        part(c, &ops).expect("shapes fit");
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);

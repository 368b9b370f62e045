// SPDX-License-Identifier: Apache-2.0
//! What holds for devices as a whole: results that no thread count changes, two devices compared, shapes without numbers.

use flux2::{
    Result,
    device::{
        ConvGeometry, Device, GroupNorm, HeadLayout, Mask, Ops, Precision, QkvPart, Trace,
        compare::Compare,
        cpu::{CpuDevice, CpuOptions, Isa},
        record::RecordDevice,
    },
    rope::RotaryTable,
};

use crate::cases::{Numbers, Stored, device, devices, product_bound, weight};

const LAYOUT: HeadLayout = HeadLayout { query_heads: 4, key_value_heads: 2, head_dim: 32 };

/// A small graph that uses every operation; everything it computes.
pub fn graph<D: Device>(ops: &Ops<'_, D>) -> Result<Vec<Vec<f32>>> {
    let mut numbers = Numbers::new(30);
    let (rows, columns) = (301, LAYOUT.columns());
    let mut results = Vec::new();
    let mut keep = |x: &flux2::device::Tensor<D>| ops.download(x).map(|values| results.push(values));

    let x = ops.upload_rows(&numbers.take(rows * 96), rows, 96)?;
    let w = weight(&numbers.take(columns * 96), &[columns, 96], Stored::Bf16);
    let qkv = ops.linear(&x, &ops.matrix(&[w])?)?;
    keep(&qkv)?;
    let norm = ops.row(&numbers.take(LAYOUT.head_dim))?;
    let table = RotaryTable::new(rows, 16, numbers.take(rows * 16), numbers.take(rows * 16));
    let part = QkvPart { qkv: &qkv, query_norm: Some(&norm), key_norm: Some(&norm) };
    let heads = ops.qkv_heads(&[part], LAYOUT, 1e-6, Some(&ops.rotary(&table)?))?;
    let attended = ops.attention(&heads, &Mask::CausalKeys(0..250), 0.3)?;
    keep(&attended)?;
    let w = weight(&numbers.take(96 * 128), &[96, 128], Stored::Bf16);
    let rows_of_one = ops.upload_rows(&numbers.take(192), 1, 192)?;
    let split = ops.split_row(&ops.silu(&rows_of_one)?, 2)?;
    let gate = ops.one_plus(&split[0])?;
    let y = ops.linear_add(&attended, &ops.matrix(&[w])?, Some(&gate), &x)?;
    keep(&y)?;
    let y = ops.layer_norm(&y, &split[0], &split[1], 1e-6)?;
    let y = ops.rms_norm(&y, &gate, 1e-6)?;
    let (up, down) = (numbers.take(70 * 96), numbers.take(70 * 96));
    let gated =
        ops.gated_matrix(&weight(&up, &[70, 96], Stored::F32), &weight(&down, &[70, 96], Stored::F32))?;
    keep(&ops.linear_swiglu(&y, &gated)?)?;
    keep(&ops.gated_add(&x, &gate, &y)?)?;
    let both = ops.concat_rows(&[&x, &y])?;
    let image = ops.rows_to_image(&ops.slice_rows(&both, 10..586)?, 24, 24)?;
    let kernel = weight(&numbers.take(96 * 96 * 9), &[96, 96, 3, 3], Stored::Bf16);
    let conv = ops.conv(&kernel, &weight(&numbers.take(96), &[96], Stored::F32))?;
    let norm = GroupNorm { groups: 32, weight: gate, bias: ops.row(&numbers.take(96))?, epsilon: 1e-6 };
    let image = ops.norm_silu_conv(&image, &norm, &conv, ConvGeometry::SAME_3X3, Some(&image))?;
    keep(&image)?;
    let large = ops.upsample_conv(&image, &conv, ConvGeometry::SAME_3X3)?;
    keep(&large)?;
    let small = ops.conv2d(&ops.group_norm(&large, &norm, false)?, &conv, ConvGeometry::DOWN_3X3)?;
    keep(&small)?;
    let sum = ops.add(&ops.image_to_rows(&ops.upsample(&small)?)?, &ops.image_to_rows(&large)?)?;
    keep(&sum)?;
    Ok(results)
}

#[test]
fn results_depend_on_neither_threads_nor_repetition() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for precision in [Precision::F32, Precision::Bf16] {
            let bits = |threads| {
                let device = device(isa, precision, threads);
                let results = graph(&Ops::new(&device)).unwrap();
                results.iter().map(|values| values.iter().map(|v| v.to_bits()).collect()).collect()
            };
            let first: Vec<Vec<u32>> = bits(1);
            for threads in [1, 2, 2, 3, 7, 2, 1, 16, 2, 1] {
                assert!(bits(threads) == first, "{isa} {precision:?}: {threads} threads change the result");
            }
        }
    }
}

#[test]
fn instructions_that_the_host_lacks_are_refused_by_name() {
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
        let options = CpuOptions { precision: Precision::F32, threads: Some(1) };
        let error = CpuDevice::with_isa(options, isa).err().unwrap().to_string();
        assert!(error.contains(&format!("no {isa}")) && error.contains("portable"), "{error}");
    }
}

#[test]
fn every_device_agrees_with_the_portable_one() {
    for device in devices() {
        let reference = crate::cases::device(Isa::Portable, device.precision(), 1);
        let bound = (3.0 * product_bound(&device)).max(1e-5);
        graph(&Ops::new(&Compare::new(reference, device, bound))).unwrap();
    }
}

#[test]
fn record_gives_the_right_sizes_and_the_same_operations() {
    let mut recorded = Trace::default();
    let device = RecordDevice::new(Precision::F32);
    let sizes = |results: Vec<Vec<f32>>| results.iter().map(Vec::len).collect::<Vec<_>>();
    let record_sizes = sizes(graph(&Ops::observed(&device, &mut recorded)).unwrap());
    let mut run = Trace::default();
    let device = crate::cases::device(Isa::Portable, Precision::F32, 2);
    assert_eq!(sizes(graph(&Ops::observed(&device, &mut run)).unwrap()), record_sizes);
    assert_eq!(run.operations, recorded.operations);
}

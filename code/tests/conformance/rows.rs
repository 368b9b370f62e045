// SPDX-License-Identifier: Apache-2.0
//! Linears and row operations.

use flux2::{
    device::{Device, Ops, Precision},
    weight::{RowOrder, Weight},
};

use crate::{
    cases::{self, BOUND, Numbers, Stored, close, device, devices, product_bound, seen, weight, wide},
    reference,
};

/// Rows, inputs, outputs: tails of tiles, panels, blocks of rows, slices of depth; one row, a few, none.
const LINEARS: [[usize; 3]; 14] = [
    [1, 1, 1],
    [1, 300, 130],
    [2, 31, 17],
    [3, 64, 70],
    [4, 5, 3],
    [5, 16, 16],
    [6, 256, 32],
    [7, 257, 33],
    [13, 511, 129],
    [96, 768, 200],
    [193, 300, 65],
    [775, 37, 140],
    [0, 16, 24],
    [9, 8, 0],
];

#[test]
fn linear_in_all_sizes_and_storages() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(1);
        for [rows, inputs, outputs] in LINEARS {
            for stored in Stored::ALL {
                let w = weight(&numbers.take(outputs * inputs), &[outputs, inputs], stored);
                let matrix = ops.matrix(std::slice::from_ref(&w)).unwrap();
                for (x, bound) in cases::inputs(&device, &mut numbers, rows * inputs) {
                    let y = ops.linear(&ops.upload_rows(&x, rows, inputs).unwrap(), &matrix).unwrap();
                    let wanted = reference::linear(&wide(&x), &seen(&w, device.precision()), inputs);
                    let case = format!("{} linear {rows} x {inputs} x {outputs} {stored:?}", device.name());
                    close(&ops.download(&y).unwrap(), &wanted, bound, case);
                }
            }
        }
    }
}

#[test]
fn linear_adds_bias_gate_and_residual() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(2);
        for [rows, inputs, outputs] in LINEARS {
            let (x, residual) = (numbers.take(rows * inputs), numbers.take(rows * outputs));
            let w = weight(&numbers.take(outputs * inputs), &[outputs, inputs], Stored::Bf16);
            let bias = numbers.take(outputs);
            let gate = numbers.take(outputs);
            let product = reference::linear(&wide(&x), &seen(&w, device.precision()), inputs);
            let x = ops.upload_rows(&x, rows, inputs).unwrap();
            let r = ops.upload_rows(&residual, rows, outputs).unwrap();
            let gate_row = ops.row(&gate).unwrap();
            for (with_bias, with_gate) in [(false, false), (false, true), (true, false), (true, true)] {
                let matrix = if with_bias {
                    let biases = [Weight::from_f32("b", &bias, &[outputs])];
                    ops.matrix_with_bias(std::slice::from_ref(&w), &biases).unwrap()
                } else {
                    ops.matrix(std::slice::from_ref(&w)).unwrap()
                };
                let wanted: Vec<f64> = (0..rows * outputs)
                    .map(|i| {
                        let column = i % outputs;
                        let bias = if with_bias { f64::from(bias[column]) } else { 0.0 };
                        let gate = if with_gate { f64::from(gate[column]) } else { 1.0 };
                        f64::from(residual[i]) + gate * (product[i] + bias)
                    })
                    .collect();
                let y = ops.linear_add(&x, &matrix, with_gate.then_some(&gate_row), &r).unwrap();
                let case = format!("{} {rows} x {inputs} x {outputs} {with_bias} {with_gate}", device.name());
                close(&ops.download(&y).unwrap(), &wanted, product_bound(&device), case);
                if !with_gate && with_bias {
                    let wanted: Vec<f64> =
                        product.iter().enumerate().map(|(i, p)| p + f64::from(bias[i % outputs])).collect();
                    close(
                        &ops.download(&ops.linear(&x, &matrix).unwrap()).unwrap(),
                        &wanted,
                        product_bound(&device),
                        "bias",
                    );
                }
            }
        }
    }
}

#[test]
fn linear_swiglu_in_all_sizes() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(3);
        for [rows, inputs, outputs] in LINEARS {
            let x = numbers.take(rows * inputs);
            let both = weight(&numbers.take(2 * outputs * inputs), &[2 * outputs, inputs], Stored::Bf16);
            let (gate, up) = (both.slice_rows(0..outputs), both.slice_rows(outputs..2 * outputs));
            let matrix = ops.gated_matrix(&gate, &up).unwrap();
            let y = ops.linear_swiglu(&ops.upload_rows(&x, rows, inputs).unwrap(), &matrix).unwrap();
            let product = |w: &Weight| reference::linear(&wide(&x), &seen(w, device.precision()), inputs);
            let wanted: Vec<f64> = product(&gate)
                .iter()
                .zip(product(&up))
                .map(|(gate, up)| reference::silu(*gate) * up)
                .collect();
            let case = format!("{} swiglu {rows} x {inputs} x {outputs}", device.name());
            close(&ops.download(&y).unwrap(), &wanted, 2.0 * product_bound(&device), case);
        }
    }
}

#[test]
fn slices_orders_and_parts_of_weights_are_honoured() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(4);
        for stored in Stored::ALL {
            for rows in [2, 50] {
                let whole = weight(&numbers.take(90 * 70), &[90, 70], stored);
                let reordered = whole.slice_rows(3..67).slice_columns(5..64);
                let reordered = reordered.with_row_order(RowOrder::HalfSplitToPairs { head_dim: 32 });
                let other = weight(&numbers.take(21 * 59), &[21, 59], Stored::F32);
                let x = numbers.take(rows * 59);
                let parts = [reordered, other];
                let wanted: Vec<f64> = parts.iter().flat_map(|part| seen(part, device.precision())).collect();
                let wanted = reference::linear(&wide(&x), &wanted, 59);
                let x = ops.upload_rows(&x, rows, 59).unwrap();
                let y = ops.linear(&x, &ops.matrix(&parts).unwrap()).unwrap();
                close(
                    &ops.download(&y).unwrap(),
                    &wanted,
                    product_bound(&device),
                    format!("{} {stored:?} {rows}", device.name()),
                );
            }
        }
    }
}

#[test]
fn row_operations() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(5);
        for [rows, columns] in [[1, 1], [1, 7], [3, 8], [5, 33], [40, 3072], [300, 257], [0, 12]] {
            // A mean far from zero, as residual streams have.
            let x: Vec<f32> = numbers.take(rows * columns).iter().map(|v| 3.0 + 2.0 * v).collect();
            let y = numbers.take(rows * columns);
            let (weight, bias) = (numbers.take(columns), numbers.take(columns));
            let case = |what: &str| format!("{} {what} [{rows}, {columns}]", device.name());
            let (xs, ys) =
                (ops.upload_rows(&x, rows, columns).unwrap(), ops.upload_rows(&y, rows, columns).unwrap());
            let (w, b) = (ops.row(&weight).unwrap(), ops.row(&bias).unwrap());
            let check = |what: &str, got, wanted: &[f64], bound| {
                close(&ops.download(&got).unwrap(), wanted, bound, case(what));
            };
            let silu: Vec<f64> = x.iter().map(|x| reference::silu(f64::from(*x))).collect();
            check("silu", ops.silu(&xs).unwrap(), &silu, BOUND);
            let layer = reference::layer_norm(&wide(&x), &wide(&weight), &wide(&bias), 1e-6);
            check("layer_norm", ops.layer_norm(&xs, &w, &b, 1e-6).unwrap(), &layer, 1e-5);
            let rms = reference::rms_norm(&wide(&x), &wide(&weight), 1e-6);
            check("rms_norm", ops.rms_norm(&xs, &w, 1e-6).unwrap(), &rms, BOUND);
            let sum: Vec<f64> = wide(&x).iter().zip(wide(&y)).map(|(x, y)| x + y).collect();
            check("add", ops.add(&xs, &ys).unwrap(), &sum, BOUND);
            let gated: Vec<f64> = (0..x.len())
                .map(|i| f64::from(x[i]) + f64::from(weight[i % columns]) * f64::from(y[i]))
                .collect();
            check("gated_add", ops.gated_add(&xs, &w, &ys).unwrap(), &gated, BOUND);
            let both = [wide(&x), wide(&y)].concat();
            check("concat_rows", ops.concat_rows(&[&xs, &ys]).unwrap(), &both, 0.0);
            let part = rows / 3..rows - rows / 4;
            let slice = &x[part.start * columns..part.end * columns];
            check("slice_rows", ops.slice_rows(&xs, part).unwrap(), &wide(slice), 0.0);
        }
        let x = ops.upload_rows(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1, 6).unwrap();
        let rows = ops.split_row(&x, 3).unwrap();
        assert_eq!(ops.download_row(&rows[1]).unwrap(), [3.0, 4.0]);
        assert_eq!(ops.download_row(&ops.one_plus(&rows[2]).unwrap()).unwrap(), [6.0, 7.0]);
    }
}

#[test]
fn exponentials_are_accurate_over_their_range_and_keep_nan() {
    for device in devices() {
        let ops = Ops::new(&device);
        let x: Vec<f32> = (-8500..8700).map(|i| i as f32 / 100.0).collect();
        let got = ops.download(&ops.silu(&ops.upload_rows(&x, 1, x.len()).unwrap()).unwrap()).unwrap();
        for (x, got) in x.iter().zip(got) {
            let wanted = reference::silu(f64::from(*x));
            assert!(
                (f64::from(got) - wanted).abs() <= 5e-7 * wanted.abs(),
                "{} silu({x}) = {got}",
                device.name()
            );
        }
        let odd = [f32::NAN, f32::INFINITY, -1e30, 1e30, f32::NAN];
        let got = ops.download(&ops.silu(&ops.upload_rows(&odd, 1, 5).unwrap()).unwrap()).unwrap();
        assert!(got[0].is_nan() && got[4].is_nan() && got[1] == f32::INFINITY && got[3] == 1e30, "{got:?}");
    }
}

#[test]
fn memory_counts_what_is_not_mapped() {
    let w = Weight::from_f32("w", &[0.5; 12], &[3, 4]);
    let report = |precision| {
        let device = device(flux2::device::cpu::Isa::Portable, precision, 1);
        Ops::new(&device).matrix(std::slice::from_ref(&w)).unwrap();
        (device.memory().weights, device.memory().mapped)
    };
    assert_eq!(report(Precision::F32), (48, 0));
    assert_eq!(report(Precision::Bf16), (24, 0));
}

// SPDX-License-Identifier: Apache-2.0
//! Convolutions and what surrounds them.

use flux2::device::{ConvGeometry, Device, GroupNorm, Ops, Shape};

use crate::{
    cases::{self, Numbers, Stored, close, devices, product_bound, seen, weight, wide},
    reference,
};

/// Height, width, inputs, outputs.
const CONVS: [[usize; 4]; 9] = [
    [1, 1, 1, 1],
    [3, 5, 3, 8],
    [8, 8, 32, 16],
    [7, 9, 40, 33],
    [5, 131, 4, 3],
    [19, 70, 33, 20],
    [9, 3, 128, 3],
    [2, 300, 1, 5],
    [16, 16, 96, 64],
];

const GEOMETRIES: [(usize, ConvGeometry); 6] = [
    (3, ConvGeometry::SAME_3X3),
    (3, ConvGeometry::DOWN_3X3),
    (1, ConvGeometry::POINTWISE),
    (1, ConvGeometry { stride: 2, padding: [0; 4] }),
    (3, ConvGeometry { stride: 1, padding: [0, 2, 3, 1] }),
    (2, ConvGeometry { stride: 3, padding: [1, 0, 2, 3] }),
];

fn fits([height, width]: [usize; 2], size: usize, geometry: ConvGeometry) -> bool {
    let [top, left, bottom, right] = geometry.padding;
    height + top + bottom >= size && width + left + right >= size
}

#[test]
fn convolutions_in_all_sizes_and_geometries() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(20);
        for [height, width, inputs, outputs] in CONVS {
            for (size, geometry) in GEOMETRIES {
                for stored in [Stored::F32, Stored::Bf16Unaligned] {
                    let shape = [outputs, inputs, size, size];
                    let kernel = weight(&numbers.take(shape.iter().product()), &shape, stored);
                    let bias = weight(&numbers.take(outputs), &[outputs], stored);
                    let conv = ops.conv(&kernel, &bias).unwrap();
                    let kernel = seen(&kernel, device.precision());
                    let bias = wide(&bias.to_f32());
                    let case = format!(
                        "{} [{height}, {width}, {inputs}] to {outputs} size {size} {geometry:?} {stored:?}",
                        device.name()
                    );
                    for (x, bound) in cases::inputs(&device, &mut numbers, height * width * inputs) {
                        let image = ops.upload_image(&x, height, width, inputs).unwrap();
                        if fits([height, width], size, geometry) {
                            let wanted = reference::conv(
                                &wide(&x),
                                [height, width, inputs],
                                &kernel,
                                &bias,
                                size,
                                geometry,
                            );
                            let got = ops.conv2d(&image, &conv, geometry).unwrap();
                            close(&ops.download(&got).unwrap(), &wanted, bound, &case);
                        }
                        if fits([2 * height, 2 * width], size, geometry) && height * width < 200 {
                            let large = reference::upsample(&wide(&x), [height, width, inputs]);
                            let dims = [2 * height, 2 * width, inputs];
                            let wanted = reference::conv(&large, dims, &kernel, &bias, size, geometry);
                            let got = ops.upsample_conv(&image, &conv, geometry).unwrap();
                            close(
                                &ops.download(&got).unwrap(),
                                &wanted,
                                product_bound(&device),
                                format!("upsampled {case}"),
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn group_norm_and_what_follows_it() {
    for device in devices() {
        let ops = Ops::new(&device);
        let mut numbers = Numbers::new(21);
        for [height, width, channels, groups] in
            [[1, 1, 4, 2], [3, 5, 12, 3], [9, 7, 64, 32], [70, 71, 32, 4], [6, 6, 40, 1], [2, 2, 7, 7]]
        {
            // A mean much larger than the spread.
            let x: Vec<f32> = numbers.take(height * width * channels).iter().map(|v| 8.0 + 0.5 * v).collect();
            let (scale, shift) = (numbers.take(channels), numbers.take(channels));
            let image = ops.upload_image(&x, height, width, channels).unwrap();
            let norm = GroupNorm {
                groups,
                weight: ops.row(&scale).unwrap(),
                bias: ops.row(&shift).unwrap(),
                epsilon: 1e-6,
            };
            let plain =
                reference::group_norm(&wide(&x), channels, groups, &wide(&scale), &wide(&shift), 1e-6);
            let case = format!("{} group norm [{height}, {width}, {channels}] {groups}", device.name());
            let got = ops.download(&ops.group_norm(&image, &norm, false).unwrap()).unwrap();
            close(&got, &plain, 1e-5, &case);
            let silu: Vec<f64> = plain.iter().map(|v| reference::silu(*v)).collect();
            let got = ops.download(&ops.group_norm(&image, &norm, true).unwrap()).unwrap();
            close(&got, &silu, 1e-5, &case);

            let outputs = 19;
            let shape = [outputs, channels, 3, 3];
            let kernel = weight(&numbers.take(shape.iter().product()), &shape, Stored::Bf16);
            let bias = weight(&numbers.take(outputs), &[outputs], Stored::F32);
            let conv = ops.conv(&kernel, &bias).unwrap();
            let (kernel, bias) = (wide(&kernel.to_f32()), wide(&bias.to_f32()));
            for geometry in [ConvGeometry::SAME_3X3, ConvGeometry::DOWN_3X3] {
                if !fits([height, width], 3, geometry) {
                    continue;
                }
                let mut wanted =
                    reference::conv(&silu, [height, width, channels], &kernel, &bias, 3, geometry);
                let got = ops.norm_silu_conv(&image, &norm, &conv, geometry, None).unwrap();
                let Shape::Image(out_height, out_width, _) = got.shape() else { panic!("not an image") };
                close(&ops.download(&got).unwrap(), &wanted, product_bound(&device).max(1e-5), &case);
                let residual = numbers.take(wanted.len());
                for (wanted, residual) in wanted.iter_mut().zip(&residual) {
                    *wanted += f64::from(*residual);
                }
                let residual = ops.upload_image(&residual, out_height, out_width, outputs).unwrap();
                let got = ops.norm_silu_conv(&image, &norm, &conv, geometry, Some(&residual)).unwrap();
                close(&ops.download(&got).unwrap(), &wanted, product_bound(&device).max(1e-5), &case);
            }
        }
    }
}

#[test]
fn images_are_upsampled_and_viewed_as_rows() {
    for device in devices() {
        let ops = Ops::new(&device);
        let x = Numbers::new(22).take(3 * 5 * 7);
        let image = ops.upload_image(&x, 3, 5, 7).unwrap();
        let large = ops.upsample(&image).unwrap();
        assert_eq!(large.shape(), Shape::Image(6, 10, 7));
        close(&ops.download(&large).unwrap(), &reference::upsample(&wide(&x), [3, 5, 7]), 0.0, "upsample");
        let rows = ops.image_to_rows(&image).unwrap();
        assert_eq!((rows.shape(), ops.download(&rows).unwrap()), (Shape::Rows(15, 7), x.clone()));
        let back = ops.rows_to_image(&rows, 5, 3).unwrap();
        assert_eq!((back.shape(), ops.download(&back).unwrap()), (Shape::Image(5, 3, 7), x));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The golden tensors that the repository keeps are whole.

mod goldens;

use sha2::{Digest, Sha256};

#[test]
fn every_case_and_run_loads_with_the_picture_that_diffusers_made() {
    for name in goldens::CASES {
        let case = goldens::case(name);
        for run in ["f32", "bf16", "f32_bf16noise"] {
            let tensors = goldens::load(name, run);
            let digest = Sha256::digest(tensors["image_u8"].u8());
            let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, case.image_sha256[run], "{name} {run}");
            for step in 0..4 {
                assert!(
                    tensors.contains_key(&format!("step{step}.latents_after")),
                    "{name} {run} step {step}"
                );
            }
        }
        assert_eq!(goldens::load(name, "f32")["te.layer26"].shape, [1, 512, 48]);
    }
}

#[test]
fn the_yardstick_run_has_every_tensor_of_which_a_bf16_distance_is_known() {
    for name in goldens::CASES {
        let tensors = goldens::load(name, "f32_bf16noise");
        let bf16 = goldens::load(name, "bf16");
        for (tensor, &wanted) in &goldens::case(name).bf16_distance {
            let golden = tensors[tensor].f32();
            if let Some(bf16) = bf16.get(tensor) {
                let got = goldens::distance(bf16.f32(), golden);
                assert!((got - wanted).abs() <= 1e-9, "{name} {tensor}: {got} against {wanted}");
            }
        }
    }
}

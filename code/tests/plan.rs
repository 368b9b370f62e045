// SPDX-License-Identifier: Apache-2.0
//! Plans of the published models against the figures worked out by hand from their shapes, and of shapes between them.

use std::time::Instant;

use flux2::{
    model::{Configs, text_encoder::TextEncoderConfig, transformer::TransformerConfig},
    pipeline::Stage,
    plan::{Plan, Run, plan},
    spec::{DEV, KLEIN, ModelSpec},
};

const TERA: f64 = 1e12;

fn run(size: [usize; 2], prompt_tokens: usize, spec: &ModelSpec) -> Run {
    Run { size, references: Vec::new(), steps: 1, prompt: spec.prompt.real(prompt_tokens) }
}

/// Teraflop of a stage: attention and everything else that multiplies.
fn teraflop(plan: &Plan, stage: Stage) -> (f64, f64) {
    let stage = plan.stages.iter().find(|planned| planned.stage == stage).expect("the stage");
    let sum = |attention: bool| -> f64 {
        let chosen = stage.operations.iter().filter(|operation| (operation.name == "attention") == attention);
        chosen.map(|operation| operation.flops as f64).sum::<f64>() / TERA
    };
    (sum(false), sum(true))
}

fn assert_near(got: f64, wanted: f64, what: &str) {
    assert!((got / wanted - 1.0).abs() < 0.02, "{what}: {got:.3} TFLOP, by hand {wanted}");
}

#[test]
fn klein_costs_what_its_shapes_say() {
    for (side, linear, attention) in [(256, 4.73, 0.18), (512, 9.45, 0.72), (1024, 28.3, 6.52)] {
        let plan = plan(&Configs::klein_4b(), &KLEIN, &run([side, side], 24, &KLEIN)).expect("a plan");
        let (products, attended) = teraflop(&plan, Stage::Dit);
        assert_near(products, linear, &format!("DiT {side}"));
        assert_near(attended, attention, &format!("DiT attention {side}"));
        let (products, attended) = teraflop(&plan, Stage::TextEncoder);
        assert_near(products, 2.79, "text encoder");
        assert_near(attended, 0.116, "text encoder attention");
        assert_eq!(plan.parameters[1], 3_875_544_576, "DiT");
        assert_eq!(plan.parameters[2], 84_046_372 - 1, "VAE without the counter of its batch norm");
    }
}

#[test]
fn dev_costs_what_its_shapes_say_and_padding_before_the_prompt_costs_one_row() {
    for (size, linear, attention) in
        [([512, 512], 84.4, 3.2), ([1024, 1024], 253.3, 29.2), ([1072, 1920], 470.0, 100.7)]
    {
        let plan = plan(&Configs::dev(), &DEV, &run(size, 45, &DEV)).expect("a plan");
        let (products, attended) = teraflop(&plan, Stage::Dit);
        assert_near(products, linear, &format!("DiT {size:?}"));
        assert_near(attended, attention, &format!("DiT attention {size:?}"));
        assert_eq!(plan.parameters[0], 17_343_754_240, "embedding and 30 layers");
        assert_eq!(plan.parameters[1], 32_223_281_152, "DiT");
    }
    let text = |tokens| {
        let plan = plan(&Configs::dev(), &DEV, &run([512, 512], tokens, &DEV)).expect("a plan");
        let (products, attended) = teraflop(&plan, Stage::TextEncoder);
        products + attended
    };
    assert_near(text(512), 17.2, "all 512 rows");
    assert_near(text(45), 17.2 * 46.0 / 512.0, "45 rows and one of padding");
}

#[test]
fn the_decoder_costs_the_same_in_both() {
    for (configs, spec) in [(Configs::klein_4b(), &KLEIN), (Configs::dev(), &DEV)] {
        let plan = plan(&configs, spec, &run([1024, 1024], 24, spec)).expect("a plan");
        let (products, attended) = teraflop(&plan, Stage::VaeDecode);
        assert_near(products, 9.9, "VAE decode");
        assert_near(attended, 0.55, "VAE attention");
    }
}

#[test]
fn the_largest_picture_with_three_references_is_planned() {
    let start = Instant::now();
    let run = Run { references: vec![[1024, 1024]; 3], steps: 4, ..run([1088, 1920], 512, &KLEIN) };
    let plan = plan(&Configs::klein_4b(), &KLEIN, &run).expect("a plan");
    assert_eq!(plan.sequence, 512 + 120 * 68 + 3 * 64 * 64);
    assert!(plan.stages.iter().any(|stage| stage.stage == Stage::ReferenceEncode));
    println!("planned in {:?}", start.elapsed());
}

/// Widths, heads and depths of the size between klein 4B and dev.
#[test]
fn shapes_like_klein_9b_load() {
    let klein = Configs::klein_4b();
    let configs = Configs {
        text_encoder: TextEncoderConfig {
            hidden_size: 4096,
            intermediate_size: 12_288,
            ..klein.text_encoder
        },
        transformer: TransformerConfig {
            num_attention_heads: 32,
            num_layers: 8,
            num_single_layers: 24,
            joint_attention_dim: 12_288,
            ..klein.transformer
        },
        vae: klein.vae,
    };
    let plan = plan(&configs, &KLEIN, &run([1024, 1024], 24, &KLEIN)).expect("a plan");
    assert!((8.5e9..9.5e9).contains(&(plan.parameters[1] as f64)), "{}", plan.parameters[1]);
}

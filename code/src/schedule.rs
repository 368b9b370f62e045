// SPDX-License-Identifier: Apache-2.0
//! The noise levels of a run and the Euler step between them.
//!
//! Mirrors `compute_empirical_mu` of diffusers' `pipeline_flux2_klein.py` and `FlowMatchEulerDiscreteScheduler` with
//! exponential dynamic shifting. Surprising: mu falls sharply past 4300 image tokens, and reference tokens do not count.

/// Noise levels of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Shift of the noise levels, from the number of image tokens and steps.
    pub mu: f64,
    /// Noise level before each step, then 0: `steps + 1` values.
    pub sigmas: Vec<f32>,
    /// `sigma · 1000` of each step.
    pub timesteps: Vec<f32>,
}

impl Schedule {
    /// The schedule of a picture of `image_tokens` = (height / 16) · (width / 16) tokens, references not counted.
    ///
    /// Bit-exact with numpy and torch: the unshifted levels are numpy's `linspace(1, 1/steps, steps)` in f64 rounded to
    /// f32, mu is f64, and after `E = f32(exp(mu))` every operation is f32 with one rounding.
    ///
    /// # Panics
    /// If `steps` is 0.
    pub fn new(image_tokens: usize, steps: usize) -> Self {
        assert!(steps > 0, "a schedule has at least one step");
        let mu = empirical_mu(image_tokens, steps);
        let shift = mu.exp() as f32;
        let last = 1.0 / steps as f64;
        let unshifted = (0..steps).map(|i| {
            if i == 0 {
                1.0
            } else if i + 1 == steps {
                last as f32
            } else {
                (1.0 + i as f64 * ((last - 1.0) / (steps - 1) as f64)) as f32
            }
        });
        let mut sigmas: Vec<f32> = unshifted.map(|s| shift / (shift + (1.0 / s - 1.0))).collect();
        let timesteps = sigmas.iter().map(|sigma| sigma * 1000.0).collect();
        sigmas.push(0.0);
        Self { mu, sigmas, timesteps }
    }

    /// Step `i` in f32: `latents += (sigma[i + 1] - sigma[i]) · velocity`, product and sum rounded apart.
    ///
    /// # Panics
    /// If the lengths differ or there is no such step.
    pub fn step(&self, i: usize, latents: &mut [f32], velocity: &[f32]) {
        assert_eq!(latents.len(), velocity.len(), "latents and velocity of step {i}");
        let dt = self.sigmas[i + 1] - self.sigmas[i];
        for (x, v) in latents.iter_mut().zip(velocity) {
            *x += dt * v;
        }
    }
}

/// mu as Black Forest Labs fitted it: a line in the image tokens at 10 steps and one at 200, between them linear in the
/// steps; past 4300 tokens the line of 200 steps whatever the steps.
fn empirical_mu(image_tokens: usize, steps: usize) -> f64 {
    let tokens = image_tokens as f64;
    let at_200 = 0.000_169_27 * tokens + 0.456_666_66;
    if image_tokens > 4300 {
        return at_200;
    }
    let at_10 = 8.738_095_24e-5 * tokens + 1.898_333_33;
    let slope = (at_200 - at_10) / 190.0;
    slope * steps as f64 + (at_200 - 200.0 * slope)
}

#[cfg(test)]
#[allow(clippy::float_cmp, clippy::excessive_precision, reason = "tests hold figures as printed")]
mod tests {
    use super::*;

    /// (image tokens, mu, sigmas 1 to 3) of four steps, from diffusers 0.37.1.
    const FOUR_STEPS: [(usize, f64, [f32; 3]); 7] = [
        (16, 1.945_216_365_6, [0.954_515_34, 0.874_924_12, 0.699_854_25]),
        (256, 1.965_567_161_4, [0.955_390_75, 0.877_134_26, 0.704_111_7]),
        (1024, 2.030_689_707_9, [0.958_085_36, 0.883_981_88, 0.717_496_57]),
        (2067, 2.119_130_874_7, [0.961_496_59, 0.892_748_77, 0.735_073_63]),
        (4096, 2.291_179_894_1, [0.967_384_04, 0.908_143_94, 0.767_199_93]),
        (8040, 1.817_597_46, [0.948_641_96, 0.860_277_59, 0.672_383_49]),
        (8160, 1.837_909_86, [0.949_622_57, 0.862_701_3, 0.676_842_21]),
    ];

    /// Sigmas of 1024² with 28 and 50 steps, printed to six places, from diffusers 0.37.1.
    const STEPS_28: [f32; 29] = [
        1.0, 0.995_71, 0.991_132, 0.986_234, 0.980_983, 0.975_338, 0.969_253, 0.962_675, 0.955_542, 0.947_78,
        0.939_302, 0.930_005, 0.919_763, 0.908_424, 0.895_804, 0.881_67, 0.865_735, 0.847_629, 0.826_877,
        0.802_854, 0.774_719, 0.741_318, 0.701_02, 0.651_443, 0.588_964, 0.507_794, 0.398_072, 0.241_515,
        0.0,
    ];
    const STEPS_50: [f32; 51] = [
        1.0, 0.997_309, 0.994_521, 0.991_632, 0.988_634, 0.985_523, 0.982_29, 0.978_931, 0.975_435,
        0.971_796, 0.968_005, 0.964_05, 0.959_922, 0.955_609, 0.951_099, 0.946_376, 0.941_427, 0.936_234,
        0.930_779, 0.925_041, 0.918_998, 0.912_626, 0.905_895, 0.898_776, 0.891_233, 0.883_227, 0.874_715,
        0.865_647, 0.855_967, 0.845_61, 0.834_503, 0.822_562, 0.809_688, 0.795_769, 0.780_671, 0.764_237,
        0.746_284, 0.726_589, 0.704_885, 0.680_851, 0.654_088, 0.624_104, 0.590_28, 0.551_828, 0.507_73,
        0.456_641, 0.396_757, 0.325_593, 0.239_631, 0.133_719, 0.0,
    ];

    #[test]
    fn four_steps_are_exact_at_every_size() {
        for (tokens, mu, sigmas) in FOUR_STEPS {
            let schedule = Schedule::new(tokens, 4);
            assert!((schedule.mu - mu).abs() < 6e-11, "{tokens} tokens: mu {}", schedule.mu);
            assert_eq!(schedule.sigmas, [1.0, sigmas[0], sigmas[1], sigmas[2], 0.0], "{tokens} tokens");
            assert_eq!(
                schedule.timesteps,
                schedule.sigmas[..4].iter().map(|s| s * 1000.0).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn mu_falls_past_4300_tokens() {
        assert!((Schedule::new(4300, 4).mu - Schedule::new(4301, 4).mu) > 1.0);
    }

    #[test]
    fn other_step_counts_follow_the_tables() {
        for (steps, mu, table) in [(28, 2.151_443_161_8, &STEPS_28[..]), (50, 2.023_351_157_1, &STEPS_50[..])]
        {
            let schedule = Schedule::new(4096, steps);
            assert!((schedule.mu - mu).abs() < 6e-11, "{steps} steps: mu {}", schedule.mu);
            assert_eq!(schedule.sigmas.len(), table.len());
            for (i, (sigma, wanted)) in schedule.sigmas.iter().zip(table).enumerate() {
                assert!((sigma - wanted).abs() < 6e-7, "{steps} steps, sigma {i}: {sigma} for {wanted}");
            }
        }
    }

    #[test]
    fn any_number_of_steps_starts_at_one_and_falls_to_zero() {
        for steps in 1..=60 {
            let schedule = Schedule::new(4096, steps);
            assert_eq!((schedule.sigmas.len(), schedule.timesteps.len()), (steps + 1, steps));
            assert_eq!((schedule.sigmas[0], schedule.sigmas[steps]), (1.0, 0.0));
            assert!(schedule.sigmas.is_sorted_by(|a, b| a > b), "{steps} steps");
        }
    }

    #[test]
    fn a_step_moves_along_the_velocity() {
        let schedule = Schedule { mu: 0.0, sigmas: vec![1.0, 0.75, 0.0], timesteps: vec![1000.0, 750.0] };
        let mut latents = [1.0, -2.0];
        schedule.step(0, &mut latents, &[4.0, 8.0]);
        assert_eq!(latents, [0.0, -4.0]);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! How long a picture takes, from those that were made: the estimate behind positions and `Retry-After`.

use std::collections::HashMap;

/// What the time of a run depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Pixels of all references together.
    pub reference_pixels: usize,
    /// Denoising steps.
    pub steps: usize,
    /// Floating-point operations of the run; 0 if they could not be counted.
    pub flops: u64,
}

/// Weight of the newest run in the average.
const NEWEST: f64 = 0.3;
/// Most shapes that are remembered one by one.
const MAX_SHAPES: usize = 256;

/// Moving averages: by exact shape where one was seen, else by floating-point operation.
#[derive(Debug, Default)]
pub struct Rates {
    by_shape: HashMap<Work, f64>,
    seconds_per_flop: Option<f64>,
}

impl Rates {
    /// A run of `work` took `seconds`.
    pub fn record(&mut self, work: Work, seconds: f64) {
        let average = |old: f64| old + NEWEST * (seconds - old);
        if let Some(known) = self.by_shape.get_mut(&work) {
            *known = average(*known);
        } else if self.by_shape.len() < MAX_SHAPES {
            self.by_shape.insert(work, seconds);
        }
        if work.flops == 0 {
            return;
        }
        let rate = seconds / work.flops as f64;
        self.seconds_per_flop = Some(self.seconds_per_flop.map_or(rate, |old| old + NEWEST * (rate - old)));
    }

    /// Seconds that `work` will take; `None` before anything was measured.
    pub fn estimate(&self, work: Work) -> Option<f64> {
        self.by_shape
            .get(&work)
            .copied()
            .or_else(|| self.seconds_per_flop.map(|rate| rate * work.flops as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefers_the_same_shape_and_falls_back_to_operations() {
        let square = |side: usize| Work {
            width: side,
            height: side,
            reference_pixels: 0,
            steps: 4,
            flops: (side * side) as u64,
        };
        let mut rates = Rates::default();
        assert_eq!(rates.estimate(square(512)), None);
        rates.record(square(512), 2.0);
        assert_eq!(rates.estimate(square(512)), Some(2.0));
        assert_eq!(rates.estimate(square(1024)), Some(8.0));
        rates.record(square(512), 4.0);
        assert_eq!(rates.estimate(square(512)), Some(2.6));
    }
}

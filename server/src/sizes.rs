// SPDX-License-Identifier: Apache-2.0
//! Which sizes are served: one, fixed at start, or all of the model's range.
//!
//! A package for a card serves one size, because the device prepares itself for one shape; the settings choose it. A device
//! that makes one size after another serves the whole range, at once for a model whose published package does so too
//! (klein), and on request (`--any-size`) otherwise (dev).

use std::path::Path;

use flux2::{DeviceChoice, Request, request::Limits, spec::ModelSpec};

use crate::config::{Config, ConfigError};

/// Sizes of a served model.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// Ranges that requests are checked against.
    pub limits: Limits,
    /// Width and height where a request names none.
    pub default: [usize; 2],
}

impl Sizes {
    /// The sizes of a model under these settings.
    ///
    /// # Errors
    /// A width or height that the model cannot make, or every size where the device makes only one.
    pub fn of(config: &Config, spec: &ModelSpec, device: &DeviceChoice) -> Result<Self, ConfigError> {
        let refuse = |flag, message: String| Err(ConfigError { flag, message });
        if config.any_size && !device.any_size() {
            return refuse("any-size", "this device makes one size alone; give --width and --height".into());
        }
        let limits = spec.limits.clone();
        let mut limits = if config.small_sizes { limits.with_small_sizes() } else { limits };
        limits.max_side = config.max_side.unwrap_or(limits.max_side).min(limits.max_side);
        let named = config.width.or(config.height).is_some();
        let asked = Request::new("");
        let largest = limits.max_side / limits.grid * limits.grid;
        let default = [
            config.width.unwrap_or(asked.width.min(largest)),
            config.height.unwrap_or(asked.height.min(largest)),
        ];
        if let Err(error) = limits.check_size(default[0], default[1]) {
            let flag = if error.parameter == "width" { "width" } else { "height" };
            return refuse(flag, error.message);
        }
        let any = device.any_size() && (config.any_size || !(named || spec.one_size));
        limits.only_size = (!any).then_some(default);
        Ok(Self { limits, default })
    }

    /// The sizes of the model in a checkpoint.
    ///
    /// # Errors
    /// As [`Sizes::of`], in a sentence; a checkpoint that does not say what it is.
    pub fn of_checkpoint(config: &Config, checkpoint: &Path) -> Result<Self, String> {
        let spec = flux2::spec::of_checkpoint(checkpoint).map_err(|error| error.to_string())?;
        Self::of(config, spec, &config.device()).map_err(|error| error.to_string())
    }

    /// As `/health` tells them: `1024x1024`, or the range.
    pub fn resolution(&self) -> String {
        let Limits { min_side, max_side, grid, max_pixels, only_size, .. } = &self.limits;
        match only_size {
            Some([width, height]) => format!("{width}x{height}"),
            None => format!("{min_side}-{max_side} px in steps of {grid}, at most {max_pixels} pixels"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::Parser;
    use flux2::spec::{DEV, KLEIN};

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        config: Config,
    }

    fn sizes(spec: &ModelSpec, flags: &[&str]) -> Result<Sizes, String> {
        let config = Flags::try_parse_from(["test"].iter().chain(flags)).unwrap().config;
        Sizes::of(&config, spec, &config.device()).map_err(|error| error.to_string())
    }

    #[test]
    fn klein_serves_any_size_and_dev_one_unless_told_otherwise() {
        for (spec, flags, default, only) in [
            (&KLEIN, &[][..], [1024, 1024], None),
            (&DEV, &[], [1024, 1024], Some([1024, 1024])),
            (&DEV, &["--any-size"], [1024, 1024], None),
            (&DEV, &["--width", "1920", "--height", "1072"], [1920, 1072], Some([1920, 1072])),
            (&KLEIN, &["--height", "512"], [1024, 512], Some([1024, 512])),
            (&KLEIN, &["--any-size", "--width", "768"], [768, 1024], None),
            (&KLEIN, &["--max-side", "600"], [600, 600], None),
            (&DEV, &["--max-side", "600"], [592, 592], Some([592, 592])),
        ] {
            let sizes = sizes(spec, flags).unwrap();
            assert_eq!((sizes.default, sizes.limits.only_size), (default, only), "{} {flags:?}", spec.name);
        }
        assert_eq!(sizes(&DEV, &[]).unwrap().resolution(), "1024x1024");
        assert!(sizes(&KLEIN, &[]).unwrap().resolution().starts_with("512-1920 px in steps of 8"));
    }

    #[test]
    fn a_size_that_the_model_cannot_make_is_no_setting() {
        for (flags, flag) in [
            (&["--width", "1000"][..], "--width: is 1000, wanted a multiple of 16"),
            (&["--height", "256"], "--height: is 256, "),
            (&["--width", "1920", "--height", "1920"], "--height: 1920 x 1920 is "),
            (&["--width", "1024", "--max-side", "512"], "--width: is 1024, "),
        ] {
            let message = sizes(&DEV, flags).unwrap_err();
            assert!(message.starts_with(flag), "{message}");
        }
    }
}

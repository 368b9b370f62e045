// SPDX-License-Identifier: Apache-2.0
//! `packager`: from `manifest.yaml` to a container package.

use std::process::ExitCode;

fn main() -> ExitCode {
    packager::cli::main()
}

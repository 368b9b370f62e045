// SPDX-License-Identifier: Apache-2.0
//! What several tests need.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The directory of fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The repository's root.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs the real program.
pub fn packager(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_packager"))
        .current_dir(dir)
        .args(arguments)
        .output()
        .expect("the program starts")
}

/// Writes a file and its directories.
pub fn write(root: &Path, path: &str, content: impl AsRef<[u8]>) {
    let full = root.join(path);
    fs::create_dir_all(full.parent().expect("a parent")).expect("directories");
    fs::write(full, content).expect("a file");
}

/// A manifest that passes `check` with `tree` as its code.
pub const MINIMAL: &str = "schema: \"5.1\"
repo: org/pkg
name: pkg
weights: org/weights
kind: http-server
arch: blackhole
source:
  tt_metal: {wheel: \"ttnn==0.81.1\"}
  extra_code: [{root: tree, paths: [\".\"]}]
  ubuntu: \"24.04\"
  python: \"3.12\"
runtime:
  command: [server, --host, \"{host}\", --port, \"{port}\"]
serve: {hardware: p100a, mesh_device: P100}
";

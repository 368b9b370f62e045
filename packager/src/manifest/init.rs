// SPDX-License-Identifier: Apache-2.0
//! `packager init`: a first manifest that passes `check`.

use std::path::Path;

use super::{Problem, hardware};

/// What `init` needs to know.
#[derive(Debug, Clone)]
pub struct Answers {
    /// organisation/name on the Hub.
    pub repo: String,
    /// Weights repository.
    pub weights: String,
    /// Board label, p100a.
    pub hardware: String,
    /// Directory or file that ships, relative to the manifest.
    pub code: String,
    /// Program that serves HTTP.
    pub server: String,
}

/// The manifest's text; problems if an answer breaks a rule.
pub fn render(answers: &Answers, dir: &Path) -> Result<String, Vec<Problem>> {
    let Answers { repo, weights, hardware, code, server } = answers;
    let name = repo.rsplit('/').next().unwrap_or_default().to_lowercase();
    let arch = if hardware.to_lowercase().starts_with('p') { "blackhole" } else { "wormhole_b0" };
    let mesh = match hardware::chips(hardware) {
        Some(1) => "(1, 1)".to_owned(),
        Some(chips) => format!("(1, {chips})"),
        None => "P100".to_owned(),
    };
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let text = format!(
        "# A container package for Tenstorrent hardware. Every key: packager help manifest
schema: \"5.1\"
repo: {repo}
name: {name}
weights:
  repo: {weights}
  # Pin a commit here, or let `packager pin` write it to manifest.lock.
  revision: main
kind: http-server
arch: {arch}

source:
  tt_metal: {{wheel: \"ttnn==0.81.1\"}}
  extra_code:
    - root: .
      paths: [{code}]
  ubuntu: \"24.04\"
  python: \"3.12\"

runtime:
  command: [{server}, --host, \"{{host}}\", --port, \"{{port}}\"]
  ready_line: Application startup complete

serve:
  hardware: {hardware}
  mesh_device: {mesh}
  port: 20000

card:
  description: One paragraph that says what the model does.
  performance: Measured figures with machine and date.
  limitations: What it cannot do.
  license: {{id: apache-2.0}}
",
        repo = quoted(repo),
        name = quoted(&name),
        weights = quoted(weights),
        code = quoted(code),
        server = quoted(server),
        hardware = quoted(hardware),
        mesh = quoted(&mesh),
    );
    super::read(&text, dir).map(|_| text)
}

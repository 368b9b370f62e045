// SPDX-License-Identifier: Apache-2.0
//! The `runtime` section of each kind.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::{GitSource, RelativePath};

/// `kind: vllm-plugin`: vLLM with a plugin that brings the model.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VllmPlugin {
    /// Which vLLM: exactly one of version, wheel, path.
    pub vllm: Vllm,
    /// The plugin: exactly one of path, repo with ref, version.
    pub plugin: Plugin,
    /// Extension module to load.
    #[serde(default)]
    pub extension: Option<String>,
    /// Directory with further models; must be covered by the shipped code.
    #[serde(default)]
    pub extra_models_dir: Option<RelativePath>,
    /// File of Python pins beside the manifest.
    #[serde(default)]
    pub lock: Option<RelativePath>,
    /// Requirements that replace pins of dependencies.
    #[serde(default)]
    pub overrides: Vec<String>,
    /// Wheels to install.
    #[serde(default)]
    pub wheels: Vec<String>,
}

/// Which vLLM: exactly one of the three.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vllm {
    /// A published version.
    #[serde(default)]
    pub version: Option<String>,
    /// A wheel file.
    #[serde(default)]
    pub wheel: Option<String>,
    /// A source tree.
    #[serde(default)]
    pub path: Option<String>,
}

/// Which plugin: a tree, a Git revision or a published version.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plugin {
    /// A source tree.
    #[serde(default)]
    pub path: Option<String>,
    /// URL of a Git repository; needs `ref`.
    #[serde(default)]
    pub repo: Option<String>,
    /// Commit, tag or branch of `repo`.
    #[serde(default, rename = "ref")]
    pub reference: Option<String>,
    /// A published version.
    #[serde(default)]
    pub version: Option<String>,
}

/// `kind: vllm-fork`: a fork of vLLM that holds the model.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VllmFork {
    /// The fork.
    pub vllm: GitSource,
    /// Extension module to load.
    #[serde(default)]
    pub extension: Option<String>,
    /// File of Python pins beside the manifest.
    #[serde(default)]
    pub lock: Option<RelativePath>,
    /// Directory of the model; must be covered by the shipped code.
    #[serde(default)]
    pub model_dir: Option<RelativePath>,
}

/// `kind: tt-dit-server`: a Python ASGI application under uvicorn.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TtDitServer {
    /// The application, `module.path:attribute`; its first segment must be shipped code.
    #[schemars(
        regex(pattern = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"),
        extend("x-expected" = "module.path:attribute")
    )]
    pub app: String,
    /// Python packages besides fastapi, uvicorn, pydantic and pillow.
    #[serde(default)]
    pub packages: Vec<String>,
    /// File of Python pins beside the manifest.
    #[serde(default)]
    pub lock: Option<RelativePath>,
    /// Variable that tells the server its mesh shape.
    #[serde(default)]
    #[schemars(regex(pattern = r"^[A-Za-z_][A-Za-z0-9_]*$"), extend("x-expected" = "the name of a variable"))]
    pub mesh_shape_env: Option<String>,
}

/// `kind: http-server`: any program that serves HTTP.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpServer {
    /// The program and its arguments; `{host}` and `{port}` stand as entries of their own.
    #[schemars(length(min = 1))]
    pub command: Vec<Word>,
    /// Part of the log line that says the server is ready. Default: `"event": "ready"`.
    #[serde(default)]
    #[schemars(regex(pattern = r"\S"))]
    pub ready_line: Option<String>,
    /// Python packages to install.
    #[serde(default)]
    pub packages: Vec<String>,
    /// File of Python pins beside the manifest.
    #[serde(default)]
    pub lock: Option<RelativePath>,
    /// Wheels to install.
    #[serde(default)]
    pub wheels: Vec<String>,
    /// Requirements that replace pins of dependencies.
    #[serde(default)]
    pub overrides: Vec<String>,
}

/// A word of a command: not empty.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct Word(#[schemars(length(min = 1), regex(pattern = r"."))] pub String);

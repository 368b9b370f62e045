// SPDX-License-Identifier: Apache-2.0
//! The authored manifest, schema "5.1", as types. The doc comments here are what an editor shows and
//! what `packager help manifest` prints; the JSON Schema made from these types is what the reader
//! checks a file against, so the three cannot disagree.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A repository id as the Hub accepts it.
const REPO: &str = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$";
/// Relative path: no leading slash, no `..` component.
const RELATIVE: &str = r"^([^/.][^/]*|\.|\.[^/.][^/]*|\.\.[^/]+)(/([^/.][^/]*|\.|\.[^/.][^/]*|\.\.[^/]+)?)*$";
/// Something other than blanks.
const FILLED: &str = r"\S";

/// A container package for Tenstorrent hardware, as its author writes it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format. The string "5.1": without quotes YAML makes it a number.
    #[serde(default = "schema_version")]
    #[schemars(extend("const" = "5.1"))]
    pub schema: String,
    /// Where the package is published: organisation/name on the Hugging Face Hub.
    #[schemars(regex(pattern = REPO), extend("x-expected" = "a Hub id, organisation/name"))]
    pub repo: String,
    /// Name of the package, of its image and of its containers.
    #[schemars(
        regex(pattern = r"^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*$"),
        extend("x-expected" = "a safe name: lower-case letters and digits, parted by single . or _ or by -")
    )]
    pub name: String,
    /// The weights, fetched by the consumer and never put into the image.
    pub weights: WeightsEntry,
    /// Further weight repositories; each only once.
    #[serde(default)]
    pub auxiliary_weights: Vec<WeightsEntry>,
    /// What kind of server the image runs.
    #[serde(default)]
    pub kind: Kind,
    /// The chip architecture.
    pub arch: Arch,
    /// Which code ships, and what it is built on.
    pub source: Source,
    /// Where the image goes.
    #[serde(default)]
    pub image: Image,
    /// How the server is started; its keys depend on `kind`.
    #[serde(default)]
    pub runtime: Map<String, Value>,
    /// Settings that all profiles share.
    #[serde(default)]
    pub serve: Serve,
    /// Named variations of `serve`. None: one profile called `default`.
    #[serde(default)]
    pub serve_profiles: Vec<Profile>,
    /// The profile a consumer gets who asks for none; required if there is more than one.
    #[serde(default)]
    pub default_profile: Option<String>,
    /// Python statements, each run in the finished image when it is built (not by consumers).
    #[serde(default)]
    pub verify: Vec<String>,
    /// The author's texts for the model card.
    #[serde(default)]
    pub card: Option<Card>,
    /// How the image is built (an extension: consumers never see it).
    #[serde(default)]
    pub build: Option<Build>,
}

fn schema_version() -> String {
    "5.1".into()
}

/// A weights repository: its id, or a map that also pins and filters it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum WeightsEntry {
    /// The id alone; the revision then comes from the lock.
    Id(#[schemars(regex(pattern = REPO), extend("x-expected" = "a Hub id, organisation/name"))] String),
    /// Id with revision and filters.
    Full(Weights),
}

/// A weights repository with revision and filters.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// organisation/name on the Hub.
    #[schemars(regex(pattern = REPO), extend("x-expected" = "a Hub id, organisation/name"))]
    pub repo: String,
    /// Commit, tag or branch; only a 40-digit commit is a pin.
    #[serde(default)]
    #[schemars(regex(pattern = FILLED))]
    pub revision: Option<String>,
    /// Globs of the files to fetch.
    #[serde(default)]
    pub allow_patterns: Option<Vec<String>>,
    /// Globs of the files to leave out.
    #[serde(default)]
    pub ignore_patterns: Option<Vec<String>>,
}

impl WeightsEntry {
    /// The same with every field.
    pub fn full(&self) -> Weights {
        match self {
            Self::Id(repo) => {
                Weights { repo: repo.clone(), revision: None, allow_patterns: None, ignore_patterns: None }
            }
            Self::Full(weights) => weights.clone(),
        }
    }
}

/// What kind of server the image runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum Kind {
    /// vLLM with a plugin.
    #[default]
    VllmPlugin,
    /// A fork of vLLM.
    VllmFork,
    /// A Python ASGI application under uvicorn.
    TtDitServer,
    /// Any program that serves HTTP.
    HttpServer,
}

impl Kind {
    /// As the manifest writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::VllmPlugin => "vllm-plugin",
            Self::VllmFork => "vllm-fork",
            Self::TtDitServer => "tt-dit-server",
            Self::HttpServer => "http-server",
        }
    }

    /// True for the two kinds that run vLLM.
    pub fn is_vllm(self) -> bool {
        matches!(self, Self::VllmPlugin | Self::VllmFork)
    }
}

/// The chip architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Arch {
    /// p100, p150, p300 boards.
    Blackhole,
    /// n150, n300, e150 boards.
    WormholeB0,
}

impl Arch {
    /// As the manifest writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blackhole => "blackhole",
            Self::WormholeB0 => "wormhole_b0",
        }
    }
}

/// Which code ships, and what it is built on.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// tt-metal: a local tree, a Git revision, or (an extension) a published wheel.
    pub tt_metal: TtMetal,
    /// Files and directories of the tt-metal tree that ship. May be empty (an extension) if `extra_code` is not.
    #[serde(default)]
    pub code: Vec<RelativePath>,
    /// Files and directories that ship from other trees; a later root overwrites an earlier one.
    #[serde(default)]
    pub extra_code: Vec<ExtraCode>,
    /// Ubuntu release of the image, "24.04".
    #[schemars(regex(pattern = r"^\d\d\.\d\d$"), extend("x-expected" = "an Ubuntu release such as \"24.04\""))]
    pub ubuntu: String,
    /// Python version of the image, "3.12".
    #[schemars(regex(pattern = r"^3\.\d+$"), extend("x-expected" = "a Python version such as \"3.12\""))]
    pub python: String,
}

/// A path inside a tree: relative, without `..`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct RelativePath(
    #[schemars(regex(pattern = RELATIVE), extend("x-expected" = "a relative path without `..`"))] pub String,
);

/// Where tt-metal comes from.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TtMetal {
    /// A local tree, taken as it is.
    Path(#[schemars(regex(pattern = FILLED))] String),
    /// A Git revision.
    Git(GitSource),
    /// A published wheel (an extension).
    Wheel(WheelSource),
}

/// A Git repository at a revision.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GitSource {
    /// URL of the repository.
    #[schemars(regex(pattern = FILLED))]
    pub repo: String,
    /// Commit, tag or branch; the lock holds the commit.
    #[serde(rename = "ref")]
    #[schemars(regex(pattern = FILLED))]
    pub reference: String,
}

/// A published wheel at an exact version.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WheelSource {
    /// Requirement with an exact version, `ttnn==0.81.1`; the lock holds its hash.
    #[schemars(
        regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*$"),
        extend("x-expected" = "name==version")
    )]
    pub wheel: String,
}

/// Code from another tree.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtraCode {
    /// A local directory (relative to the manifest) or a Git revision.
    pub root: Root,
    /// What ships of it.
    #[schemars(length(min = 1))]
    pub paths: Vec<RelativePath>,
}

/// The tree of an `extra_code` entry.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Root {
    /// A local directory, relative to the manifest.
    Path(#[schemars(regex(pattern = FILLED))] String),
    /// A Git revision.
    Git(GitSource),
}

/// Where the image goes.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// `hf`: inside the package; else a registry namespace such as `ghcr.io/organisation`.
    #[serde(default = "hub")]
    #[schemars(regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"), extend("x-expected" = "hf or a registry namespace"))]
    pub registry: String,
    /// Name of the image there; the package's name if absent.
    #[serde(default)]
    #[schemars(regex(pattern = r"^[a-z0-9]+((\.|_|__|-+|/)[a-z0-9]+)*$"), extend("x-expected" = "an image name"))]
    pub repository: Option<String>,
}

fn hub() -> String {
    "hf".into()
}

impl Default for Image {
    fn default() -> Self {
        Self { registry: hub(), repository: None }
    }
}

/// Settings of a run. All may be left out here and given in a profile.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Serve {
    /// Board label with a count: p100a, p150x4, n300, p300x2. Not a machine's name.
    #[serde(default)]
    pub hardware: Option<String>,
    /// Mesh that is opened: P100, QB2, T3K, or a literal "(2, 2)".
    #[serde(default)]
    pub mesh_device: Option<String>,
    /// Port of a bare `docker run`; consumers choose their own.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<u32>,
    /// Longest context in tokens (vLLM kinds).
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub max_model_len: Option<u64>,
    /// Most sequences at once (vLLM kinds).
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub max_num_seqs: Option<u64>,
    /// KV block size (vLLM kinds).
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub block_size: Option<u64>,
    /// Seconds until the server must be ready.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub server_timeout: Option<u64>,
    /// Parsers of an OpenAI-compatible chat server.
    #[serde(default)]
    pub capabilities: Option<Capabilities>,
    /// Passed to vLLM as it is.
    #[serde(default)]
    pub additional_config: Map<String, Value>,
    /// Arguments appended to the command; nested lists are flattened.
    #[serde(default)]
    pub args: Vec<Argument>,
    /// Environment of the container: strings only, and no secrets.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// Parsers of an OpenAI-compatible chat server.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capabilities {
    /// Name of the tool-call parser.
    #[serde(default)]
    pub tool_parser: Option<String>,
    /// Name of the reasoning parser.
    #[serde(default)]
    pub reasoning_parser: Option<String>,
}

/// One argument, or several that belong together.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Argument {
    /// One argument.
    One(String),
    /// A flag with its values.
    Many(Vec<String>),
}

/// A named variation of `serve`: what it sets replaces, what it leaves out is inherited.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// What differs from `serve`.
    #[serde(flatten)]
    pub serve: Serve,
    /// Name of the profile; it becomes part of the container's name.
    #[schemars(
        regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"),
        extend("x-expected" = "letters, digits, `_`, `.`, `-`, starting with a letter or digit")
    )]
    pub name: String,
    /// One line for the table of profiles.
    #[serde(default)]
    pub description: Option<String>,
}

/// The author's texts for the model card, in Markdown.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// What the model is and does, one paragraph or more.
    #[serde(default)]
    pub description: Option<String>,
    /// Added to the generated quickstart.
    #[serde(default)]
    pub quickstart: Option<String>,
    /// One line for "At a glance".
    #[serde(default)]
    pub architecture: Option<String>,
    /// One line for "At a glance".
    #[serde(default)]
    pub status: Option<String>,
    /// What it is meant for.
    #[serde(default)]
    pub intended_use: Option<String>,
    /// What it is not meant for.
    #[serde(default)]
    pub out_of_scope_use: Option<String>,
    /// How it is used once it serves.
    #[serde(default)]
    pub usage: Option<String>,
    /// Measured figures with machine and date. A catalogue listing needs it.
    #[serde(default)]
    pub performance: Option<String>,
    /// What it cannot do. A catalogue listing needs it.
    #[serde(default)]
    pub limitations: Option<String>,
    /// Risks and safety considerations.
    #[serde(default)]
    pub risks: Option<String>,
    /// Licences of weights and code.
    #[serde(default)]
    pub licensing: Option<String>,
    /// Related packages.
    #[serde(default)]
    pub related: Option<String>,
    /// Licence of the package for the Hub's front matter.
    #[serde(default)]
    pub license: Option<License>,
    /// The Hub's task, `text-to-image`.
    #[serde(default)]
    #[schemars(regex(pattern = r"^[a-z0-9]+(-[a-z0-9]+)*$"), extend("x-expected" = "a Hub task such as text-to-image"))]
    pub pipeline_tag: Option<String>,
    /// Models this one comes from; the weights repository if absent.
    #[serde(default)]
    pub base_model: Option<Vec<String>>,
}

/// Licence for the Hub's front matter.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct License {
    /// The Hub's identifier (apache-2.0, mit, …) or `other`.
    pub id: String,
    /// Name of the licence; required if the id is `other`.
    #[serde(default)]
    pub name: Option<String>,
    /// Where its text stands.
    #[serde(default)]
    pub link: Option<String>,
}

/// How the image is built.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Build {
    /// The Dockerfile, relative to the manifest.
    #[serde(default = "dockerfile")]
    pub dockerfile: RelativePath,
    /// Root of the paths below, relative to the manifest.
    #[serde(default = "here")]
    #[schemars(regex(pattern = FILLED))]
    pub root: String,
    /// Stage to build; the last one if absent.
    #[serde(default)]
    #[schemars(regex(pattern = FILLED))]
    pub target: Option<String>,
    /// Files and directories sent to the engine besides the staged code: nothing else enters the image.
    #[serde(default)]
    pub context: Vec<RelativePath>,
    /// Where the staged code stands in the build context.
    #[serde(default = "code")]
    pub code: RelativePath,
    /// Where the Dockerfile puts that code in the image; compared byte for byte after the build.
    #[serde(default)]
    #[schemars(regex(pattern = r"^/."), extend("x-expected" = "an absolute path in the image"))]
    pub code_in_image: Option<String>,
    /// Build arguments; no secrets (they stay in the image's history).
    #[serde(default)]
    pub args: BTreeMap<String, String>,
    /// Build arguments that name base images: the lock holds their digests.
    #[serde(default)]
    pub base_images: BTreeMap<String, String>,
    /// Commands run in the finished image before it is packed, each as an arbitrary user.
    #[serde(default)]
    pub check: Vec<Vec<String>>,
}

fn dockerfile() -> RelativePath {
    RelativePath("Dockerfile".into())
}

fn here() -> String {
    ".".into()
}

fn code() -> RelativePath {
    RelativePath("code".into())
}

// SPDX-License-Identifier: Apache-2.0
//! The wire manifest `tt_kernel_manifest.json`: what consumers read. Field order, names and which fields
//! are null are fixed by the published format (section B); keys of other schemas stand there as null.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::manifest::{
    Manifest, hardware,
    model::{Card, Profile, Serve, Weights},
    profile,
};

/// File name in the package.
pub const FILE: &str = "tt_kernel_manifest.json";

/// The whole file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the published format's own")]
pub struct Wire {
    pub schema_version: String,
    pub name: String,
    pub tt_metal_version: String,
    pub arch: String,
    pub device_count: u32,
    pub producer: Producer,
    pub weights: WireWeights,
    pub auxiliary_weights: Vec<WireWeights>,
    pub mesh: Value,
    pub entrypoint: Value,
    pub resources: Value,
    pub capabilities: Value,
    pub env: Map<String, Value>,
    pub bundled: Value,
    pub deps: Value,
    pub container: Container,
}

/// Who made the package, and when.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Producer {
    /// Version of this program.
    pub tt_kernel_version: String,
    /// UTC with microseconds.
    pub created_at: String,
    /// Always null here: the build host's name is nobody's business.
    pub hostname: Option<String>,
}

/// A weights repository; `repo_id` here, `repo` in the authored manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the published format's own")]
pub struct WireWeights {
    pub repo_id: String,
    pub revision: Option<String>,
    pub allow_patterns: Option<Vec<String>>,
    pub ignore_patterns: Option<Vec<String>>,
    pub repo_type: String,
}

/// What makes it a container package.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the published format's own")]
pub struct Container {
    pub image: WireImage,
    pub kind: String,
    pub runtime: Map<String, Value>,
    pub serve: Serve,
    pub serve_profiles: Vec<Profile>,
    pub default_profile: Option<String>,
    pub code_dir: Option<String>,
    pub verify: Vec<String>,
    pub built: Map<String, Value>,
    pub card: Option<Card>,
}

/// Where the image is.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the published format's own")]
pub struct WireImage {
    pub registry: String,
    pub repository: String,
    pub tag: String,
    pub digest: Option<String>,
}

/// Facts of a build that the manifest cannot know.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Final tag of the image.
    pub tag: String,
    /// Image id, "sha256:…".
    pub digest: Option<String>,
    /// Version of what tt-metal is, or "unknown".
    pub tt_metal_version: String,
    /// Commit of each weights repository, primary first; none where it floats.
    pub revisions: Vec<Option<String>>,
    /// UTC with microseconds.
    pub created_at: String,
    /// The open map `built`, in the order it is to have.
    pub built: Map<String, Value>,
}

impl Wire {
    /// Of a checked manifest and the facts of its build.
    pub fn new(manifest: &Manifest, facts: Facts) -> Self {
        let chips =
            profile::default(manifest).serve.hardware.as_deref().and_then(hardware::chips).unwrap_or(1);
        let mut revisions = facts.revisions.into_iter();
        let mut weights = |weights: Weights| WireWeights {
            revision: revisions.next().flatten().or(weights.revision),
            repo_id: weights.repo,
            allow_patterns: weights.allow_patterns,
            ignore_patterns: weights.ignore_patterns,
            repo_type: "model".into(),
        };
        let primary = weights(manifest.weights.full());
        let auxiliary_weights =
            manifest.auxiliary_weights.iter().map(|entry| weights(entry.full())).collect();
        Self {
            schema_version: manifest.schema.clone(),
            name: manifest.name.clone(),
            tt_metal_version: facts.tt_metal_version,
            arch: manifest.arch.name().into(),
            device_count: chips,
            producer: Producer {
                tt_kernel_version: env!("CARGO_PKG_VERSION").into(),
                created_at: facts.created_at,
                hostname: None,
            },
            weights: primary,
            auxiliary_weights,
            mesh: Value::Null,
            entrypoint: Value::Null,
            resources: Value::Null,
            capabilities: Value::Null,
            env: Map::new(),
            bundled: Value::Null,
            deps: Value::Null,
            container: Container {
                image: WireImage {
                    registry: manifest.image.registry.clone(),
                    repository: manifest.image.repository.clone().unwrap_or_else(|| manifest.name.clone()),
                    tag: facts.tag,
                    digest: facts.digest,
                },
                kind: manifest.kind.name().into(),
                runtime: manifest.runtime.clone(),
                serve: manifest.serve.clone(),
                serve_profiles: profile::declared(manifest),
                default_profile: manifest.default_profile.clone(),
                code_dir: Some("code".into()),
                verify: manifest.verify.clone(),
                built: facts.built,
                card: manifest.card.clone(),
            },
        }
    }

    /// The file's text: two spaces, nulls kept, nothing escaped that JSON does not need escaped.
    pub fn render(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a wire manifest is plain data");
        text.push('\n');
        text
    }

    /// The line in the log that says the server is ready.
    pub fn ready_line(&self) -> &str {
        let given = self.container.runtime.get("ready_line").and_then(Value::as_str);
        given.unwrap_or(if self.container.kind == "http-server" {
            "\"event\": \"ready\""
        } else {
            "Application startup complete"
        })
    }

    /// A fact of the build as text; "" if it is not there.
    pub fn built(&self, pointer: &str) -> &str {
        let (first, rest) = pointer.split_once('/').unwrap_or((pointer, ""));
        let value = self.container.built.get(first);
        let value =
            if rest.is_empty() { value } else { value.and_then(|value| value.pointer(&format!("/{rest}"))) };
        value.and_then(Value::as_str).unwrap_or_default()
    }

    /// True if the image holds the tt-metal wheel.
    pub fn has_wheel(&self) -> bool {
        self.container.built.get("tt_metal").is_some_and(|metal| metal["in_image"] == Value::Bool(true))
    }

    /// The repository that the package is published to.
    pub fn repo(&self) -> &str {
        self.built("repo")
    }

    /// All profiles merged, the default first found by `default_profile`.
    pub fn profiles(&self) -> Vec<profile::Merged> {
        self.container
            .serve_profiles
            .iter()
            .map(|overlay| profile::overlay(&self.container.serve, overlay))
            .collect()
    }

    /// Name of the profile that runs when none is named.
    pub fn default_profile(&self) -> &str {
        let first = self.container.serve_profiles.first().map_or("default", |profile| profile.name.as_str());
        self.container.default_profile.as_deref().unwrap_or(first)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The provenance: an in-toto statement v1 with a SLSA v1 predicate.

use serde_json::{Value, json};

use crate::{pins::Lock, wire::Wire};

/// File name in the package.
pub const FILE: &str = "provenance.intoto.json";

/// The statement: subjects are the image and the code, inputs are the pins and digests.
pub fn statement(wire: &Wire, lock: &Lock, parameters: &Value) -> Value {
    let digest = |text: &str| text.trim_start_matches("sha256:").to_owned();
    let subject = |name: &str, sha256: &str| json!({"name": name, "digest": {"sha256": digest(sha256)}});
    let mut inputs = Vec::new();
    let mut input = |uri: String, algorithm: &str, value: &str| {
        let mut entry = json!({"uri": uri});
        if !value.is_empty() {
            entry["digest"] = json!({algorithm: digest(value)});
        }
        inputs.push(entry);
    };
    for weights in &lock.weights {
        input(format!("hf://{}", weights.repo), "gitCommit", weights.revision.as_deref().unwrap_or_default());
    }
    for git in &lock.git {
        input(format!("git+{}@{}", git.repo, git.reference), "gitCommit", &git.commit);
    }
    if let Some(wheel) = lock.wheel.as_ref().filter(|_| wire.has_wheel()) {
        input(format!("pkg:pypi/{}", wheel.requirement.replace("==", "@")), "sha256", &wheel.sha256);
    }
    for image in lock.base_images.values() {
        let known = image.digest.as_deref().or(image.id.as_deref()).unwrap_or_default();
        input(format!("docker-image://{}", image.name), "sha256", known);
    }
    if let Some(cargo) = &lock.cargo_lock {
        input("file:Cargo.lock".into(), "sha256", cargo);
    }
    input("file:code/".into(), "sha256", wire.built("code_tree_sha256"));
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            subject(&wire.container.image.tag, wire.built("manifest_digest")),
            subject("image configuration", wire.built("image_digest")),
            subject("code/", wire.built("code_tree_sha256")),
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://huggingface.co/flux2-tt/flux2-klein-p100a#packager-build-v1",
                "externalParameters": parameters,
                "internalParameters": {},
                "resolvedDependencies": inputs,
            },
            "runDetails": {
                "builder": {"id": format!("https://huggingface.co/flux2-tt/flux2-klein-p100a#packager-{}", wire.built("tt_model_version"))},
                "metadata": {"invocationId": wire.built("inputs_sha256"), "startedOn": wire.built("created_at")},
            },
        },
    })
}

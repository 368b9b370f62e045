// SPDX-License-Identifier: Apache-2.0
//! The image configuration, with what only says when and where it was built taken out.

use serde_json::{Map, Value, json};

use crate::error::{Class, Failure, Result};

/// Keys of `config` that mean something to whoever runs the image.
const RUN_KEYS: [&str; 14] = [
    "User",
    "ExposedPorts",
    "Env",
    "Entrypoint",
    "Cmd",
    "Volumes",
    "WorkingDir",
    "Labels",
    "StopSignal",
    "StopTimeout",
    "Healthcheck",
    "Shell",
    "OnBuild",
    "ArgsEscaped",
];

/// The normalised configuration for layers with these digests ("sha256:…").
pub fn normalize(config: &[u8], diff_ids: &[String], epoch: &str) -> Result<Vec<u8>> {
    let broken = |why: &str| Failure::new(Class::Engine, "the image's configuration cannot be used").why(why);
    let old: Value = serde_json::from_slice(config).map_err(|error| broken(&error.to_string()))?;
    let mut new = Map::new();
    for key in ["architecture", "os", "variant", "os.version", "os.features"] {
        if let Some(value) = old.get(key).filter(|value| !value.is_null() && **value != json!("")) {
            new.insert(key.into(), value.clone());
        }
    }
    new.insert("created".into(), json!(epoch));
    let mut run = Map::new();
    for key in RUN_KEYS {
        let value = &old["config"][key];
        let empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            _ => false,
        };
        if !empty {
            run.insert(key.into(), sorted(value));
        }
    }
    new.insert("config".into(), Value::Object(run));
    new.insert("rootfs".into(), json!({"type": "layers", "diff_ids": diff_ids}));
    let mut layers = 0;
    let mut history = Vec::new();
    for step in old["history"].as_array().into_iter().flatten() {
        let mut entry = Map::new();
        entry.insert("created".into(), json!(epoch));
        for key in ["created_by", "comment", "author"] {
            if let Some(text) = step[key].as_str().filter(|text| !text.is_empty()) {
                entry.insert(key.into(), json!(text));
            }
        }
        if step["empty_layer"] == json!(true) {
            entry.insert("empty_layer".into(), json!(true));
        } else {
            layers += 1;
        }
        history.push(Value::Object(entry));
    }
    if layers != diff_ids.len() {
        // Readers insist on one non-empty entry per layer.
        history = diff_ids.iter().map(|_| json!({"created": epoch})).collect();
    }
    new.insert("history".into(), Value::Array(history));
    serde_json::to_vec(&Value::Object(new)).map_err(|error| broken(&error.to_string()))
}

/// Maps with their keys in order: engines write them as they come.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(entries) => {
            let mut keys: Vec<&String> = entries.keys().collect();
            keys.sort();
            Value::Object(keys.into_iter().map(|key| (key.clone(), sorted(&entries[key]))).collect())
        }
        other => other.clone(),
    }
}

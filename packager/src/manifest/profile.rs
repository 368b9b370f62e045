// SPDX-License-Identifier: Apache-2.0
//! Merging a profile over `serve`, exactly as consumers do it again from the wire manifest.

use serde_json::{Map, Value};

use super::model::{Manifest, Profile, Serve};

/// A profile with everything it inherits.
#[derive(Debug, Clone)]
pub struct Merged {
    /// Its name.
    pub name: String,
    /// Its line for the table.
    pub description: Option<String>,
    /// What it runs with.
    pub serve: Serve,
}

/// The profiles as declared; without any, one called `default` that sets nothing.
pub fn declared(manifest: &Manifest) -> Vec<Profile> {
    if manifest.serve_profiles.is_empty() {
        return vec![Profile { serve: Serve::default(), name: "default".into(), description: None }];
    }
    manifest.serve_profiles.clone()
}

/// All profiles, merged.
pub fn merged(manifest: &Manifest) -> Vec<Merged> {
    declared(manifest).iter().map(|profile| overlay(&manifest.serve, profile)).collect()
}

/// One profile over the shared settings.
pub fn overlay(serve: &Serve, profile: &Profile) -> Merged {
    Merged {
        serve: merge(serve, &profile.serve),
        name: profile.name.clone(),
        description: profile.description.clone(),
    }
}

/// The profile that runs when none is named.
pub fn default(manifest: &Manifest) -> Merged {
    let mut all = merged(manifest);
    let wanted = manifest.default_profile.as_ref();
    let index = all.iter().position(|profile| Some(&profile.name) == wanted).unwrap_or(0);
    all.swap_remove(index)
}

/// Null, `[]` and `{}` of the overlay are skipped, so a profile can never clear a list or map; `0`,
/// `false` and `""` do replace; maps merge recursively.
fn merge(base: &Serve, overlay: &Serve) -> Serve {
    let dump = |serve: &Serve| serde_json::to_value(serve).expect("Serve is plain data");
    let mut value = dump(base);
    if let (Some(base), Value::Object(overlay)) = (value.as_object_mut(), dump(overlay)) {
        merge_maps(base, overlay);
    }
    serde_json::from_value(value).expect("merging keeps the types")
}

fn merge_maps(base: &mut Map<String, Value>, overlay: Map<String, Value>) {
    for (key, value) in overlay {
        match (base.get_mut(&key), value) {
            (_, Value::Null) => {}
            (_, Value::Array(items)) if items.is_empty() => {}
            (_, Value::Object(entries)) if entries.is_empty() => {}
            (Some(Value::Object(into)), Value::Object(from)) => merge_maps(into, from),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_overlay_cannot_clear_but_can_set_zero_false_and_empty_text() {
        let base: Serve = serde_json::from_value(json!({
            "hardware": "p100a", "args": ["--a"], "env": {"A": "1", "B": "2"},
            "additional_config": {"deep": {"x": 1, "y": true}, "kept": [1]}
        }))
        .expect("valid");
        let overlay: Serve = serde_json::from_value(json!({
            "hardware": null, "args": [], "env": {"B": "", "C": "3"},
            "additional_config": {"deep": {"x": 0, "y": false}, "kept": []}
        }))
        .expect("valid");
        let merged = serde_json::to_value(merge(&base, &overlay)).expect("plain");
        assert_eq!(merged["hardware"], "p100a");
        assert_eq!(merged["args"], json!(["--a"]));
        assert_eq!(merged["env"], json!({"A": "1", "B": "", "C": "3"}));
        assert_eq!(merged["additional_config"], json!({"deep": {"x": 0, "y": false}, "kept": [1]}));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `packager help json` against what the commands print.

use std::collections::BTreeSet;

use packager::cli::json::{COMMANDS, ERROR, Field, fields};
use serde_json::Value;

use crate::{engine::Small, registry_server::Registry};

/// Exactly the documented keys; those that end in `?` may lack.
pub fn assert_documented(what: &str, value: &Value, fields: &[Field]) {
    let mut keys = BTreeSet::new();
    let mut add = |prefix: &str, object: &Value| {
        for (key, value) in object.as_object().unwrap_or_else(|| panic!("{what}: no object: {object}")) {
            let nested = format!("{prefix}{key}[].");
            if fields.iter().any(|(name, _)| name.starts_with(&nested)) {
                let entry = value.as_array().and_then(|list| list.first()).expect("an entry");
                keys.extend(entry.as_object().expect("an object").keys().map(|key| format!("{nested}{key}")));
            } else {
                keys.insert(format!("{prefix}{key}"));
            }
        }
    };
    match value.as_array() {
        Some(list) => add("[].", list.first().expect("an entry")),
        None => add("", value),
    }
    for key in &keys {
        let known = fields.iter().any(|(name, _)| name.trim_end_matches('?') == key);
        assert!(known, "{what} prints {key}, which `help json` does not say");
    }
    for (name, _) in fields.iter().filter(|(name, _)| !name.ends_with('?')) {
        assert!(keys.contains(*name), "{what} does not print {name}, which `help json` promises");
    }
}

#[test]
fn help_json_says_what_the_commands_print() {
    let (small, registry) = (Small::new("json"), Registry::open());
    let package = small.package();
    let package = package.to_str().expect("UTF-8");
    let place = format!("{}/small", registry.address());
    let mut seen = BTreeSet::from(["fetch", "push"]); // by `fetch.rs` and `push.rs`
    for (name, arguments) in [
        (
            "init",
            vec![
                "init",
                "--manifest",
                "new.yaml",
                "--repo",
                "a/b",
                "--weights",
                "a/w",
                "--hardware",
                "p100a",
                "--code",
                "code",
                "--server",
                "x",
            ],
        ),
        ("check", vec!["check"]),
        ("pin", vec!["pin", "--offline"]),
        ("pin --check", vec!["pin", "--check", "--offline"]),
        ("plan", vec!["plan"]),
        ("build", vec!["build", "--twice"]),
        ("build", vec!["build"]),
        ("card", vec!["card", package]),
        ("verify", vec!["verify", package]),
        ("serve --print", vec!["serve", "--print", package]),
        ("serve", vec!["serve", "--device", "cpu", package]),
        ("stop", vec!["stop", package]),
        ("push --registry", vec!["push", package, "--registry", &place, "--dry-run"]),
        ("push --registry", vec!["push", package, "--registry", &place]),
        ("digest", vec!["digest", "code"]),
    ] {
        let value = serde_json::from_str(&small.ok(&[&arguments[..], &["--json"]].concat())).expect("JSON");
        assert_documented(name, &value, fields(name));
        seen.insert(name);
    }
    assert_eq!(seen, COMMANDS.iter().map(|(name, _)| *name).collect());
    small.edit("manifest.yaml", "arch: blackhole", "arch: white");
    let failed = small.run(&["check", "--json"]);
    let value: Value = serde_json::from_slice(&failed.stdout).expect("JSON");
    assert_documented("a failure", &value["error"], &ERROR);
    assert!(value["error"]["problems"][0]["line"].is_number());
    let help = small.ok(&["help", "json"]);
    for (name, fields) in COMMANDS {
        assert!(
            help.contains(&format!("\n{name}\n")) && fields.iter().all(|(key, _)| help.contains(key)),
            "{name}"
        );
    }
}

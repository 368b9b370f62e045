// SPDX-License-Identifier: Apache-2.0
//! `packager help manifest`: every key with its type and meaning, from the schema itself.

use std::fmt::Write as _;

use serde_json::Value;

use super::schema::schema;

const INTRO: &str = "\
The manifest, schema \"5.1\". Unknown keys are errors. A key without * may be left out.

This packager reads every manifest of the published format, and beyond it:
  source.code    may be empty if source.extra_code is not (a package without tt-metal sources)
  source.tt_metal  may be {wheel: \"ttnn==X.Y.Z\"} besides a path or {repo, ref}; the lock holds its hash
  build          names the Dockerfile, its target, the files it gets and its arguments
and it refuses what consumers would stumble over later:
  name           must be an image name as well; a profile's name must fit a container's name
  {host}, {port} must be entries of their own in runtime.command: consumers replace whole entries only
  YAML           no tags, merge keys (<<), repeated keys, or bare words that YAML 1.1 takes as
                 something else (yes, 0755, 12:30): readers differ on them
";

/// The text.
pub fn text() -> String {
    let root = schema();
    let mut out = INTRO.to_owned();
    section(root, root, "", "top level", &mut out);
    for kind in root["allOf"].as_array().into_iter().flatten() {
        let name = kind["if"]["properties"]["kind"]["const"].as_str().unwrap_or_default();
        let runtime = resolve(root, &kind["then"]["properties"]["runtime"]);
        section(root, runtime, "runtime", &format!("runtime of kind {name}"), &mut out);
    }
    out
}

fn resolve<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    schema["$ref"].as_str().and_then(|reference| root.pointer(&reference[1..])).unwrap_or(schema)
}

fn section(root: &Value, schema: &Value, path: &str, title: &str, out: &mut String) {
    let _ = writeln!(out, "\n{title}");
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut below = Vec::new();
    for (key, property) in schema["properties"].as_object().into_iter().flatten() {
        let star = if required.contains(&key.as_str()) { "*" } else { "" };
        let about = property["description"]
            .as_str()
            .or(resolve(root, property)["description"].as_str())
            .unwrap_or_default();
        let (kind, inner) = kind(root, property);
        let _ = writeln!(out, "  {:<22} {kind}", format!("{key}{star}"));
        if !about.is_empty() {
            let _ =
                writeln!(out, "  {:<22}   {}", "", about.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        // `serve` is explained once; a profile has the same keys.
        below.extend(
            inner
                .into_iter()
                .filter(|_| key != "serve_profiles")
                .map(|inner| (super::yaml::join(path, key), inner)),
        );
    }
    for (path, inner) in below {
        section(root, inner, &path, &path, out);
    }
}

/// A type in words, and the closed maps inside it.
fn kind<'a>(root: &'a Value, schema: &'a Value) -> (String, Vec<&'a Value>) {
    let schema = resolve(root, schema);
    if let Some(branches) = schema["anyOf"].as_array() {
        let parts: Vec<_> =
            branches.iter().map(|branch| kind(root, branch)).filter(|(name, _)| name != "null").collect();
        let names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
        return (names.join(" or "), parts.iter().flat_map(|(_, inner)| inner.clone()).collect());
    }
    let choices = |list: &Value| {
        list.as_array().map(|list| {
            list.iter().filter_map(|c| c["const"].as_str().or(c.as_str())).collect::<Vec<_>>().join(" | ")
        })
    };
    if let Some(names) =
        schema.get("oneOf").and_then(choices).or_else(|| schema.get("enum").and_then(choices))
    {
        return (names, Vec::new());
    }
    if let Some(only) = schema["const"].as_str() {
        return (format!("\"{only}\""), Vec::new());
    }
    let name = schema["type"].as_str().or_else(|| schema["type"][0].as_str()).unwrap_or("map");
    match name {
        "array" => {
            let (item, inner) = kind(root, &schema["items"]);
            (format!("list of {item}"), inner)
        }
        "object" if schema.get("properties").is_some() => {
            let keys: Vec<String> =
                schema["properties"].as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect();
            if keys.len() > 4 {
                ("map".into(), vec![schema])
            } else {
                (format!("{{{}}}", keys.join(", ")), vec![schema])
            }
        }
        "object" => ("map".into(), Vec::new()),
        other => (other.into(), Vec::new()),
    }
}

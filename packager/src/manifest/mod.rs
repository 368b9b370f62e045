// SPDX-License-Identifier: Apache-2.0
//! Reading the authored manifest: text → tree with places → shape (the schema) → rules.
//!
//! All mistakes of a file are reported at once. The rules that compare fields run on what is left
//! when the misshapen keys are taken out, and say nothing about those keys.

pub mod hardware;
pub mod help;
pub mod init;
pub mod license;
pub mod model;
pub mod problem;
pub mod profile;
mod rules;
pub mod runtime;
pub mod schema;
mod shape;
pub mod yaml;

use std::{
    fs,
    path::{Path, PathBuf},
};

pub use model::Manifest;
pub use problem::{Place, Problem};

use crate::error::{At, Class, Failure, Result};

/// A manifest that passed every check, and where it came from.
#[derive(Debug)]
pub struct Loaded {
    /// The file.
    pub path: PathBuf,
    /// Its directory: local paths start here.
    pub dir: PathBuf,
    /// Its text.
    pub text: String,
    /// What it says.
    pub manifest: Manifest,
}

/// Checks a text. `dir` is where its local paths start.
pub fn read(text: &str, dir: &Path) -> Result<Manifest, Vec<Problem>> {
    let (root, mut problems) = yaml::parse(text)?;
    if !matches!(root.kind, yaml::Kind::Map(_)) {
        let problem = Problem::new(root.place, "", "a mapping of keys to values", "something else");
        return Err(vec![problem]);
    }
    problems.extend(shape::check(schema::schema(), &root));
    problems.sort_by_key(|problem| problem.place);
    // One place can break a rule of YAML and of the shape: the first says it.
    problems.dedup_by_key(|problem| (problem.place, problem.key.clone()));
    let mut value = root.value();
    for problem in &problems {
        remove(&mut value, &problem.key);
    }
    if !problems.is_empty() {
        fill(&mut value);
    }
    let manifest: Manifest = match serde_json::from_value(value) {
        Ok(manifest) => manifest,
        Err(error) if problems.is_empty() => {
            return Err(vec![Problem::new(root.place, "", "a manifest", &error.to_string())]);
        }
        // Too much is missing or of the wrong type: what the rules compare is not there.
        Err(_) => return Err(problems),
    };
    for problem in rules::check(&manifest, &root, dir) {
        let follows = |earlier: &Problem| {
            problem.key.starts_with(&earlier.key) || earlier.key.starts_with(&problem.key)
        };
        if !problems.iter().any(follows) {
            problems.push(problem);
        }
    }
    problems.sort_by_key(|problem| problem.place);
    if problems.is_empty() { Ok(manifest) } else { Err(problems) }
}

/// Gives required scalars that were taken out some value, so that the rules can look at the rest.
fn fill(value: &mut serde_json::Value) {
    for (section, key, text) in [
        ("", "repo", "a/a"),
        ("", "name", "a"),
        ("", "weights", "a/a"),
        ("", "arch", "blackhole"),
        ("/source", "ubuntu", ""),
        ("/source", "python", ""),
        ("/source", "tt_metal", "."),
    ] {
        if let Some(serde_json::Value::Object(entries)) = value.pointer_mut(section) {
            entries.entry(key).or_insert_with(|| text.into());
        }
    }
}

/// Takes the value at a dotted path out, so that the rest can still be read and checked.
fn remove(value: &mut serde_json::Value, path: &str) {
    let (parent, last) = path.rsplit_once(['.', '[']).unwrap_or(("", path));
    let mut steps =
        parent.split(['.', '[']).map(|step| step.trim_end_matches(']')).filter(|step| !step.is_empty());
    let parent = steps.try_fold(value, |value, step| match value {
        serde_json::Value::Array(items) => items.get_mut(step.parse::<usize>().ok()?),
        other => other.get_mut(step),
    });
    if let Some(serde_json::Value::Object(entries)) = parent {
        entries.remove(last);
    }
}

/// Reads and checks a file.
pub fn load(path: &Path) -> Result<Loaded> {
    let bytes = fs::read(path).map_err(|error| {
        let failure = Failure::io("read the manifest", path, &error);
        match error.kind() {
            std::io::ErrorKind::NotFound => failure.next("give its path, or write one with `packager init`"),
            _ => failure,
        }
    })?;
    let invalid = |problems: Vec<Problem>| {
        let count =
            if problems.len() == 1 { "1 problem".into() } else { format!("{} problems", problems.len()) };
        let mut failure = Failure::new(Class::Manifest, format!("{} has {count}", path.display()));
        failure.next = "correct the lines named above; `packager help manifest` explains every key".into();
        failure.problems = problems;
        failure
    };
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid =
            String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]).into_owned();
        let place = Place {
            line: valid.matches('\n').count() + 1,
            column: valid.rsplit('\n').next().unwrap_or_default().chars().count() + 1,
        };
        invalid(vec![Problem::new(place, "", "UTF-8 text", "a byte that is not UTF-8")])
    })?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let dir = dir.canonicalize().at("resolve", &dir)?;
    match read(&text, &dir) {
        Ok(manifest) => Ok(Loaded { path: path.to_path_buf(), dir, text, manifest }),
        Err(problems) => Err(invalid(problems)),
    }
}

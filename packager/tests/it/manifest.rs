// SPDX-License-Identifier: Apache-2.0
//! The corpus: every file under `fixtures/manifests` through the reader and through an independent
//! JSON Schema validator with the schema that editors get.
//!
//! A bad file begins with what is expected of it: `# expect: KEY | part of the message`, and
//! `# schema:` with `refuses`, `accepts` (the rule is beyond a schema) or `unreadable` (YAML itself).

use std::{fs, path::PathBuf, time::Instant};

use packager::manifest;
use serde_json::Value;

use crate::support::{fixtures, packager, repository};

fn corpus(kind: &str) -> Vec<(String, String)> {
    let mut files: Vec<PathBuf> = fs::read_dir(fixtures().join("manifests").join(kind))
        .expect("corpus")
        .map(|entry| entry.expect("entry").path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|path| {
            (
                path.file_stem().expect("name").to_string_lossy().into_owned(),
                fs::read_to_string(path).expect("text"),
            )
        })
        .collect()
}

fn schema_accepts(text: &str) -> bool {
    let value: Value = serde_yaml::from_str(text).expect("readable YAML");
    let mut schemas = boon::Schemas::new();
    let mut compiler = boon::Compiler::new();
    compiler.add_resource("manifest.json", manifest::schema::schema().clone()).expect("a schema");
    let index = compiler.compile("manifest.json", &mut schemas).expect("a valid schema");
    schemas.validate(&value, index).is_ok()
}

#[test]
fn good_files_pass_reader_and_schema() {
    let files = corpus("good");
    for (name, text) in &files {
        if let Err(problems) = manifest::read(text, &fixtures().join("manifests")) {
            panic!("{name}: {problems:#?}");
        }
        assert!(schema_accepts(text), "{name}: the schema refuses it");
    }
    assert!(files.len() >= 30);
}

#[test]
fn bad_files_are_refused_at_the_right_key_with_a_helpful_message() {
    let files = corpus("bad");
    for (name, text) in &files {
        let (expect, rest) =
            text.strip_prefix("# expect: ").and_then(|text| text.split_once('\n')).expect("a header");
        let (key, part) = expect.split_once(" | ").expect("KEY | message");
        let schema = rest
            .strip_prefix("# schema: ")
            .and_then(|text| text.split_once('\n'))
            .expect("a second header")
            .0;
        let problems = manifest::read(text, &fixtures().join("manifests"))
            .err()
            .unwrap_or_else(|| panic!("{name} was accepted"));
        let shown: Vec<String> = problems.iter().map(|problem| problem.render("m.yaml", text)).collect();
        let hit = problems
            .iter()
            .zip(&shown)
            .any(|(problem, shown)| (key.is_empty() || problem.key == key) && shown.contains(part));
        assert!(hit, "{name}: no problem at `{key}` with `{part}`:\n{}", shown.join(""));
        match schema {
            "refuses" => assert!(!schema_accepts(text), "{name}: the schema accepts it"),
            "accepts" => assert!(schema_accepts(text), "{name}: the schema refuses it"),
            other => assert_eq!(other, "unreadable", "{name}"),
        }
    }
    assert!(files.len() >= 60);
}

#[test]
fn all_problems_of_a_file_are_reported_at_once_in_file_order() {
    let text = fs::read_to_string(fixtures().join("manifests/bad/many-problems.yaml")).expect("text");
    let problems = manifest::read(&text, &fixtures().join("manifests")).expect_err("bad");
    let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(
        keys.iter().filter(|key| ["name", "arch", "serve.envv", "serve.port"].contains(key)).count(),
        4,
        "{keys:?}"
    );
    assert!(problems.is_sorted_by_key(|problem| problem.place), "{keys:?}");
}

#[test]
fn case_20_alias_bombs_are_refused_at_once() {
    let started = Instant::now();
    let text = fs::read_to_string(fixtures().join("manifests/bad/case20-alias-bomb.yaml")).expect("text");
    let problems = manifest::read(&text, &fixtures()).expect_err("bad");
    assert!(problems[0].hint.contains("write the values out"));
    assert!(started.elapsed().as_secs() < 5, "bounded work");
}

#[test]
fn case_17_null_for_a_list_names_line_column_key_and_type() {
    let text = fs::read_to_string(fixtures().join("manifests/bad/case17-packages-null.yaml")).expect("text");
    let problems = manifest::read(&text, &fixtures().join("manifests")).expect_err("bad");
    let problem = &problems[0];
    assert_eq!(problem.key, "runtime.packages");
    let line = text.lines().position(|line| line.contains("packages:")).expect("the line") + 1;
    assert_eq!(problem.place.line, line);
    assert!(problem.expected.starts_with("a list") && problem.hint.contains("[]"), "{problem:?}");
}

#[test]
fn case_22_versions_never_compare_equal_as_numbers() {
    for name in ["case22-schema-float", "case22-schema-5.10", "case22-schema-float-5.10"] {
        let text = fs::read_to_string(fixtures().join(format!("manifests/bad/{name}.yaml"))).expect("text");
        let problems = manifest::read(&text, &fixtures().join("manifests")).expect_err("bad");
        assert_eq!(
            (problems[0].key.as_str(), problems[0].expected.as_str()),
            ("schema", "the string \"5.1\""),
            "{name}"
        );
    }
}

/// The policy stands in packager/Cargo.toml; advisories are checked by scripts/deny.sh.
#[test]
fn case_21_no_abandoned_yaml_reader_is_in_the_lock() {
    let lock = fs::read_to_string(repository().join("Cargo.lock")).expect("Cargo.lock");
    assert!(lock.contains("name = \"yaml_serde\""));
    for abandoned in ["serde_yaml", "serde_yml", "yaml-rust", "libyml"] {
        assert!(!lock.contains(&format!("name = \"{abandoned}\"")), "{abandoned}");
    }
}

#[test]
fn the_committed_schema_is_the_one_the_types_give() {
    let path = repository().join("packager/manifest.schema.json");
    let committed = fs::read_to_string(&path).expect("the committed schema");
    let now = String::from_utf8(packager(&repository(), &["schema"]).stdout).expect("UTF-8");
    assert!(
        committed == now,
        "write it again: cargo run -p packager -- schema > packager/manifest.schema.json"
    );
}

#[test]
fn help_manifest_explains_every_key_of_the_schema() {
    let text = manifest::help::text();
    let definitions = manifest::schema::schema()["$defs"].as_object().expect("definitions");
    for (name, definition) in definitions {
        for key in definition["properties"].as_object().into_iter().flatten().map(|(key, _)| key) {
            assert!(text.contains(key.as_str()), "{name}.{key}");
        }
    }
}

proptest::proptest! {
    /// Whatever the bytes, the reader answers with a manifest or with problems; it never panics.
    #[test]
    fn any_text_is_answered(text in "[ -~\n]{0,300}") {
        let _ = manifest::read(&text, &fixtures());
    }

    /// A good manifest with a piece cut out or doubled is read or refused, never a panic.
    #[test]
    fn damaged_manifests_are_answered(from in 0usize..700, length in 0usize..80, twice in proptest::bool::ANY) {
        let text = fs::read_to_string(fixtures().join("manifests/good/profiles.yaml")).expect("text");
        let (from, to) = (from.min(text.len()), (from + length).min(text.len()));
        let damaged = if twice { format!("{}{}", &text[..to], &text[from..]) } else { format!("{}{}", &text[..from], &text[to..]) };
        let _ = manifest::read(&damaged, &fixtures().join("manifests"));
    }
}

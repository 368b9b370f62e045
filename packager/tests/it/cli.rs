// SPDX-License-Identifier: Apache-2.0
//! The program as a user meets it: exit codes, streams, JSON, generated pages.

use std::fs;

use serde_json::Value;
use tempfile::tempdir;

use crate::support::{MINIMAL, fixtures, packager, repository, write};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn check_shows_the_line_a_caret_and_a_hint_and_exits_with_3() {
    let output = packager(&fixtures().join("manifests"), &["check", "-m", "bad/weights-unknown-key.yaml"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(output.stdout.is_empty());
    let shown = text(&output.stderr);
    assert!(shown.contains("weights-unknown-key.yaml:6:30: weights.revison"), "{shown}");
    assert!(
        shown.contains("did you mean `revision`?") && shown.contains("next:") && !shown.contains('\x1b'),
        "{shown}"
    );
}

#[test]
fn check_as_json_lists_every_problem() {
    let output =
        packager(&fixtures().join("manifests"), &["check", "--json", "-m", "bad/many-problems.yaml"]);
    assert_eq!(output.status.code(), Some(3));
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["error"]["exit_code"], 3);
    assert!(value["error"]["problems"].as_array().expect("a list").len() >= 4);
    assert!(value["error"]["problems"][0]["line"].is_u64());
}

#[test]
fn our_own_manifests_pass_check() {
    for manifest in [
        "manifest.yaml",
        "examples/klein-mini/manifest.yaml",
        "examples/dev-tiny/manifest.yaml",
        "examples/flux2-dev-qb2/manifest.yaml",
    ] {
        let output = packager(&repository(), &["check", "-m", manifest]);
        assert!(output.status.success(), "{manifest}: {}", text(&output.stderr));
    }
}

/// Both published packages have no `build` section of ours: what can be said without one is said, and what
/// is missing.
#[test]
fn plan_says_of_both_seeds_what_ships_and_what_is_missing() {
    let plan = |name: &str| -> Value {
        let manifest = fixtures().join("seeds").join(name).join("manifest.yaml");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_packager"))
            // No network, so that the answer is the same everywhere.
            .env("GIT_ALLOW_PROTOCOL", "file")
            .args(["plan", "--json", "--manifest"])
            .arg(manifest)
            .output()
            .expect("the program starts");
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let dev = plan("dev");
    assert_eq!(
        dev["profiles"],
        serde_json::json!([{"name": "default", "hardware": "p300x2", "mesh": "QB2"}])
    );
    assert_eq!(dev["shipped"].as_array().map(Vec::len), Some(9), "{dev}");
    assert_eq!(dev["shipped"][1], "models/tt_dit/blocks/");
    assert_eq!(dev["code"]["code_sha256"].as_str().map(str::len), Some(64));
    assert!(dev["missing"].to_string().contains("has no build section"), "{dev}");
    let klein = plan("klein");
    assert_eq!(
        klein["profiles"],
        serde_json::json!([{"name": "default", "hardware": "p100a", "mesh": "P100"}])
    );
    assert_eq!(klein["weights"], "black-forest-labs/FLUX.2-klein-4B");
    let missing = klein["missing"].to_string();
    assert!(missing.contains("has no build section") && missing.contains("git "), "{missing}");
}

#[test]
fn init_writes_a_manifest_that_passes_check_and_never_replaces_one() {
    let dir = tempdir().expect("dir");
    write(dir.path(), "code/model.py", "x = 1\n");
    for hardware in ["p100a", "n300", "p150x4", "p300x2"] {
        let arguments = [
            "init",
            "--force",
            "--repo",
            "org/Model-A",
            "--weights",
            "org/w",
            "--hardware",
            hardware,
            "--code",
            "code",
            "--server",
            "serve",
        ];
        let output = packager(dir.path(), &arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let output = packager(dir.path(), &["check"]);
        assert!(output.status.success(), "{hardware}: {}", text(&output.stderr));
    }
    let before = fs::read(dir.path().join("manifest.yaml")).expect("manifest");
    let again = packager(
        dir.path(),
        &[
            "init",
            "--repo",
            "org/b",
            "--weights",
            "org/w",
            "--hardware",
            "p100",
            "--code",
            "code",
            "--server",
            "s",
        ],
    );
    assert_eq!(again.status.code(), Some(2));
    assert_eq!(fs::read(dir.path().join("manifest.yaml")).expect("manifest"), before);
    let asked = packager(dir.path(), &["init", "--force"]);
    assert_eq!(asked.status.code(), Some(2), "no terminal to ask on");
    assert!(text(&asked.stderr).contains("--repo"));
}

#[test]
fn a_missing_manifest_says_what_to_do() {
    let dir = tempdir().expect("dir");
    let output = packager(dir.path(), &["check"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("packager init"));
}

#[test]
fn completions_manual_pages_and_help_are_generated() {
    let dir = tempdir().expect("dir");
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&packager(dir.path(), &["completions", shell]).stdout).contains("packager"));
    }
    assert!(packager(dir.path(), &["man", "pages"]).status.success());
    assert!(dir.path().join("pages/packager-check.1").is_file());
    assert!(text(&packager(dir.path(), &["help", "manifest"]).stdout).contains("source.tt_metal"));
    assert!(text(&packager(dir.path(), &["help", "pin"]).stdout).contains("--offline"));
    assert_eq!(packager(dir.path(), &["help", "nothing"]).status.code(), Some(2));
}

#[test]
fn pin_writes_what_it_can_says_what_it_cannot_and_reports_drift() {
    let dir = tempdir().expect("dir");
    write(dir.path(), "tree/model.py", "x = 1\n");
    write(dir.path(), "Cargo.lock", "version = 4\n");
    write(dir.path(), "rust-toolchain.toml", "[toolchain]\nchannel = \"1.95\"\n");
    write(dir.path(), "Dockerfile", "FROM scratch\n");
    write(
        dir.path(),
        "manifest.yaml",
        format!("{MINIMAL}build: {{context: [Cargo.lock, rust-toolchain.toml]}}\n"),
    );
    assert_eq!(packager(dir.path(), &["pin", "--check", "--offline"]).status.code(), Some(3), "no lock yet");
    let output = packager(dir.path(), &["pin", "--offline"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(
        shown.contains("not pinned: ttnn==0.81.1") && shown.contains("not pinned: weights org/weights"),
        "{shown}"
    );
    let lock = fs::read_to_string(dir.path().join("manifest.lock")).expect("lock");
    assert!(lock.contains("toolchain: '1.95'"), "{lock}");
    assert!(packager(dir.path(), &["pin", "--check", "--offline"]).status.success());
    write(dir.path(), "Cargo.lock", "version = 5\n");
    let drifted = packager(dir.path(), &["pin", "--check", "--offline"]);
    assert_eq!(drifted.status.code(), Some(8));
    assert!(text(&drifted.stderr).contains("cargo_lock"));
    assert_eq!(
        fs::read_to_string(dir.path().join("manifest.lock")).expect("lock"),
        lock,
        "--check writes nothing"
    );
}

#[test]
fn case_35_half_a_snapshot_is_not_pinned() {
    let dir = tempdir().expect("dir");
    let commit = "1234567890123456789012345678901234567890";
    write(dir.path(), "tree/model.py", "x = 1\n");
    let manifest = MINIMAL
        .replace("weights: org/weights", &format!("weights: {{repo: org/weights, revision: \"{commit}\"}}"));
    write(dir.path(), "manifest.yaml", &manifest);
    let files: Vec<Value> = [("a.json", 2), ("b.bin", 4)]
        .map(|(path, size)| serde_json::json!({"path": path, "size": size, "id": {"git": "0".repeat(40)}}))
        .into();
    let folder = "hub/models--org--weights";
    let record = serde_json::json!({"files": files, "verified": []}).to_string();
    write(dir.path(), &format!("{folder}/.files/{commit}.json"), record);
    let pin = || {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_packager"))
            .args(["pin", "--offline"])
            .current_dir(dir.path())
            .env("HF_HUB_CACHE", dir.path().join("hub"))
            .output()
            .expect("runs");
        (output.status.code().unwrap_or(-1), text(&output.stderr))
    };
    write(dir.path(), &format!("{folder}/snapshots/{commit}/a.json"), "{}");
    let half = |said: &str| {
        let (code, shown) = pin();
        assert!(code == 8 && shown.contains("1 of the 2 files") && shown.contains(said), "{code}: {shown}");
        assert!(!dir.path().join("manifest.lock").exists());
    };
    half("b.bin");
    write(dir.path(), &format!("{folder}/snapshots/{commit}/b.bin"), "cut");
    half("b.bin");
    write(dir.path(), &format!("{folder}/snapshots/{commit}/b.bin"), "full");
    let (code, shown) = pin();
    assert_eq!(code, 0, "{shown}");
    let lock = fs::read_to_string(dir.path().join("manifest.lock")).expect("lock");
    assert!(lock.contains("a.json") && lock.contains("b.bin"), "{lock}");
    // What the manifest does not want need not be there.
    fs::remove_file(dir.path().join(format!("{folder}/snapshots/{commit}/b.bin"))).expect("removed");
    let some = format!("revision: \"{commit}\", allow_patterns: [\"*.json\"]");
    write(dir.path(), "manifest.yaml", manifest.replace(&format!("revision: \"{commit}\""), &some));
    assert_eq!(pin().0, 0);
}

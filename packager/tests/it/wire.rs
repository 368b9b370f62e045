// SPDX-License-Identifier: Apache-2.0
//! The wire manifest and the card, held against what the two published packages show.

use std::{fs, path::Path, process::Command};

use packager::{
    card,
    manifest::{self, Manifest},
    wire::{Facts, Wire},
};
use serde_json::{Value, json};

use crate::support::fixtures;

fn seed(name: &str) -> Manifest {
    let dir = fixtures().join("seeds").join(name);
    let text = fs::read_to_string(dir.join("manifest.yaml")).expect("manifest");
    manifest::read(&text, &dir).unwrap_or_else(|problems| panic!("{name}: {problems:#?}"))
}

/// The facts that the published cards state.
fn klein() -> Wire {
    let built = json!({
        "image": "tt-model/flux2-klein-p100a:aaaaaaaaaaaa", "repo": "sunandbean/flux2-klein-p100a", "tt_model_version": "0.1.0",
        "created_at": "2026-10-09T17:48:15+00:00",
        "tt_metal": {"sha": "58648d44443223041148125843ca7c7d4780463e", "describe": null, "dirty": false, "scm_version": "0.0.0.dev0",
            "mode": "git", "remote": "https://github.com/tenstorrent/tt-metal", "branch": null, "pushed": null},
        "code_sha256": format!("8491c45396dbafe7{}", "0".repeat(48)),
    });
    facts("klein", "0.0.0.dev0", &built)
}

fn dev() -> Wire {
    let built = json!({
        "repo": "stisiTT/flux2-dev-qb2", "tt_model_version": "0.1.0", "created_at": "2026-08-28T23:44:03+00:00",
        "tt_metal": {"sha": "b28416bb4f010b558a31de8f46d7710cd53c7a4c", "dirty": true, "mode": "local"},
        "code_sha256": format!("3c35026f808ab477{}", "0".repeat(48)),
    });
    facts("dev", "unknown", &built)
}

fn facts(name: &str, version: &str, built: &Value) -> Wire {
    let manifest = seed(name);
    let tag = format!("tt-model/{}:aaaaaaaaaaaa", manifest.name);
    let facts = Facts {
        tag,
        digest: Some(format!("sha256:{}", "a".repeat(64))),
        tt_metal_version: version.into(),
        revisions: Vec::new(),
        created_at: "2026-10-09T17:49:00.123456+00:00".into(),
        built: built.as_object().cloned().expect("a map"),
    };
    Wire::new(&manifest, facts)
}

#[test]
fn the_klein_seed_gives_the_wire_manifest_that_was_published() {
    let wire: Value = serde_json::from_str(&klein().render()).expect("JSON");
    let expected = json!({
        "/schema_version": "5.1", "/name": "flux2-klein-p100a", "/tt_metal_version": "0.0.0.dev0", "/arch": "blackhole", "/device_count": 1,
        "/producer/hostname": null, "/weights/repo_id": "black-forest-labs/FLUX.2-klein-4B",
        "/weights/revision": "e7b7dc27f91deacad38e78976d1f2b499d76a294", "/weights/repo_type": "model", "/auxiliary_weights": [],
        "/container/kind": "tt-dit-server", "/container/image/registry": "hf", "/container/image/repository": "flux2-klein-p100a",
        "/container/runtime/app": "tt_flux2_klein.server:app", "/container/runtime/mesh_shape_env": "KLEIN_MESH_SHAPE",
        "/container/runtime/packages": ["diffusers", "transformers", "safetensors", "huggingface_hub", "numpy", "loguru", "typing_extensions"],
        "/container/runtime/lock": "requirements.lock", "/container/serve/port": 8000, "/container/serve/hardware": "p100a",
        "/container/serve/mesh_device": "P100",
        "/container/serve/env": {"ARCH_NAME": "blackhole", "TT_METAL_OPERATION_TIMEOUT_SECONDS": "600.0"},
        "/container/serve_profiles/0/name": "default", "/container/default_profile": null, "/container/code_dir": "code",
        "/container/verify": ["import tt_flux2_klein.server as s; assert s.app"],
    });
    for (pointer, value) in expected.as_object().expect("a map") {
        assert_eq!(wire.pointer(pointer), Some(value), "{pointer}");
    }
}

#[test]
fn the_dev_seed_gives_four_chips_an_unpinned_weight_and_a_dirty_tree() {
    let wire: Value = serde_json::from_str(&dev().render()).expect("JSON");
    assert_eq!(wire["name"], "flux2-dev-qb2");
    assert_eq!(wire["device_count"], 4);
    assert_eq!(wire["weights"]["revision"], Value::Null);
    assert_eq!(wire["container"]["runtime"]["app"], "models.tt_dit.server.flux2.app:app");
    assert_eq!(
        (wire["container"]["serve"]["hardware"].as_str(), wire["container"]["serve"]["mesh_device"].as_str()),
        (Some("p300x2"), Some("QB2"))
    );
}

/// An independent reader with the published rules: field order, closed parts, no null lists.
const PYTHON: &str = r#"
import json, sys
TOP = "schema_version name tt_metal_version arch device_count producer weights auxiliary_weights mesh entrypoint resources capabilities env bundled deps container".split()
WEIGHTS = "repo_id revision allow_patterns ignore_patterns repo_type".split()
CONTAINER = "image kind runtime serve serve_profiles default_profile code_dir verify built card".split()
SERVE = "hardware mesh_device port max_model_len max_num_seqs block_size server_timeout capabilities additional_config args env".split()
CARD = "description quickstart architecture status intended_use out_of_scope_use usage performance limitations risks licensing related license pipeline_tag base_model".split()
def keys(value, expected, what):
    assert list(value) == expected, f"{what}: {list(value)}"
for path in sys.argv[1:]:
    raw = open(path, encoding="utf-8").read()
    m = json.loads(raw)
    keys(m, TOP, "top"); keys(m["producer"], ["tt_kernel_version", "created_at", "hostname"], "producer")
    assert m["schema_version"] in ("5", "5.1", "6") and isinstance(m["device_count"], int)
    for w in [m["weights"], *m["auxiliary_weights"]]: keys(w, WEIGHTS, "weights")
    for name in "mesh entrypoint resources capabilities bundled deps".split(): assert m[name] is None, name
    assert m["env"] == {}
    c = m["container"]; keys(c, CONTAINER, "container"); keys(c["image"], "registry repository tag digest".split(), "image")
    keys(c["serve"], SERVE, "serve"); assert c["serve_profiles"], "declares no serve profiles"
    for p in c["serve_profiles"]: keys(p, SERVE + ["name", "description"], "profile")
    for s in [c["serve"], *c["serve_profiles"]]:
        assert isinstance(s["args"], list) and isinstance(s["env"], dict) and isinstance(s["additional_config"], dict), "null"
        assert all(isinstance(v, str) for v in s["env"].values())
    assert isinstance(c["verify"], list) and isinstance(c["built"], dict)
    if c["card"] is not None: keys(c["card"], CARD, "card")
    assert raw == json.dumps(m, indent=2, ensure_ascii=False) + "\n", "not in its canonical form"
print("ok")
"#;

/// Runs the independent reader; panics with what it says.
pub fn read_strictly(path: &Path) {
    let output = Command::new("python3")
        .args(["-c", PYTHON])
        .arg(path)
        .output()
        .expect("python3 is needed to read with");
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_independent_strict_reader_accepts_every_wire_manifest() {
    let dir = tempfile::tempdir().expect("dir");
    for (name, wire) in [("klein", klein()), ("dev", dev())] {
        let path = dir.path().join(name);
        fs::write(&path, wire.render()).expect("written");
        read_strictly(&path);
    }
}

#[test]
fn a_wire_manifest_reads_back_as_the_same_bytes() {
    for wire in [klein(), dev()] {
        let again: Wire = serde_json::from_str(&wire.render()).expect("readable");
        assert_eq!(again.render(), wire.render());
    }
    let mut unknown: Value = serde_json::from_str(&klein().render()).expect("JSON");
    unknown["container"]["serve"]["surprise"] = json!(1);
    assert!(
        serde_json::from_value::<Wire>(unknown).is_err(),
        "an unknown key in serve makes it unreadable for everyone"
    );
}

/// The committed card is what is rendered; every value that the published card shows is on it.
#[test]
fn the_cards_of_the_seeds_are_as_committed_and_hold_every_published_value() {
    let klein_values = [
        "sunandbean/flux2-klein-p100a",
        "black-forest-labs/FLUX.2-klein-4B",
        "e7b7dc27f91deacad38e78976d1f2b499d76a294",
        "port 20000",
        "Application startup complete",
        "58648d44443223041148125843ca7c7d4780463e",
        "8491c45396dbafe7 (sha256, first 16 hex digits)",
        "2026-10-09T17:48:15+00:00",
        "--with-weights",
        "| End to end | 38.32 s | 2.93 s | 2.95 s |",
        "0.7809",
        "14cb3542fffc8b81",
        "POST /predict",
    ];
    let dev_values = [
        "stisiTT/flux2-dev-qb2",
        "black-forest-labs/FLUX.2-dev",
        "b28416bb4f010b558a31de8f46d7710cd53c7a4c (dirty tree)",
        "3c35026f808ab477",
        "2026-08-28T23:44:03+00:00",
        "p300x2",
        "291s",
        "80s",
        "~106 GB",
        "GET /jobs/{id}/image",
        "models/tt_dit/server/flux2",
    ];
    for (name, wire, values) in
        [("klein", klein(), klein_values.as_slice()), ("dev", dev(), dev_values.as_slice())]
    {
        let text = card::render(&wire).expect("a card");
        for value in values {
            let known = text.contains(value)
                || (name == "dev" && wire.render().contains(value))
                || seed_allowlist(name).contains(value);
            assert!(known, "{name}: `{value}` is not on the card:\n{text}");
        }
        let path = fixtures().join("seeds").join(name).join("README.md");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&path, &text).expect("written");
        }
        assert!(
            fs::read_to_string(&path).is_ok_and(|committed| committed == text),
            "{name}: run again with UPDATE_GOLDEN=1 and review the difference"
        );
    }
}

fn seed_allowlist(name: &str) -> String {
    fs::read_to_string(fixtures().join("seeds").join(name).join("manifest.yaml")).expect("manifest")
}

#[test]
fn case_23_commands_on_the_card_follow_the_repository() {
    let mut wire = klein();
    wire.container.built["repo"] = json!("other/place");
    let text = card::render(&wire).expect("a card");
    for line in [
        "tt model pull other/place",
        "tt serve other/place",
        "tt-model pull  other/place --with-weights",
        "tt-model serve other/place",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}");
    }
    let back = card::render(&klein()).expect("a card");
    assert!(back.lines().any(|line| line == "tt serve sunandbean/flux2-klein-p100a"));
}

#[test]
fn case_24_front_matter_is_what_the_hub_accepts() {
    let mut wire = dev();
    let card = wire.container.card.as_mut().expect("a card");
    card.license = serde_json::from_value(
        json!({"id": "other", "name": "FLUX Non-Commercial License\n", "link": "https://example.org/l"}),
    )
    .expect("license");
    let text = card::render(&wire).expect("a card");
    let front =
        text.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---\n")).expect("front matter").0;
    let front: Value = serde_yaml::from_str(front).expect("YAML");
    assert_eq!(front["license"], "other");
    assert_eq!(front["license_name"], "flux-non-commercial-license");
    assert_eq!(front["base_model"], json!(["black-forest-labs/FLUX.2-dev"]));
    let tags: Vec<&str> = front["tags"].as_array().expect("tags").iter().filter_map(Value::as_str).collect();
    assert!(
        tags.is_sorted()
            && ["tt-model-cache", "tt-model-container", "blackhole", "tt-dit-server", "p300x2"]
                .iter()
                .all(|tag| tags.contains(tag)),
        "{tags:?}"
    );
}

#[test]
fn sections_stand_in_the_order_of_the_format() {
    let text = card::render(&klein()).expect("a card");
    let headings: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let order = [
        "At a glance",
        "Intended use",
        "Quickstart",
        "Serve profiles",
        "Using it",
        "Expected performance",
        "Limitations",
        "Risks and safety considerations",
        "Licensing",
        "Related packages",
        "Feedback",
        "Provenance",
    ];
    let places: Vec<usize> =
        headings.iter().filter_map(|heading| order.iter().position(|known| known == heading)).collect();
    assert!(places.is_sorted() && places.len() >= 7, "{headings:?}");
    // Markdown that linters take: one blank line at most, none at the end, no trailing blanks, fences closed.
    assert!(!text.contains("\n\n\n") && text.ends_with('\n') && !text.ends_with("\n\n"));
    assert!(text.lines().all(|line| line == line.trim_end()));
    assert_eq!(text.matches("```").count() % 2, 0);
}

// SPDX-License-Identifier: Apache-2.0
//! The package of FLUX.2 [dev]: what its patterns take, what its card says of them, and the gate before its weights.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::Command,
    sync::Arc,
};

use axum::body::Bytes;
use hub::pattern::selected;
use packager::{
    card, manifest,
    pins::Lock,
    wire::{Facts, Wire},
};
use serde_json::{Map, Value};

use crate::{
    stand_in::{Hub, Repo, error},
    support::repository,
};

const REPO: &str = "black-forest-labs/FLUX.2-dev";
const REVISION: &str = "26afe3a78bb242c0a8bb181dcc8937bb16e5c66c";

fn path() -> PathBuf {
    repository().join("examples/flux2-dev-qb2/manifest.yaml")
}

/// Files of the published repository with their bytes, as public listings of that commit agree; 0 where they say none.
fn published() -> Vec<(String, u64)> {
    let transformer = [
        9_935_797_200,
        9_890_181_048,
        9_814_681_480,
        9_814_681_536,
        9_814_681_536,
        9_814_681_536,
        5_361_898_792,
    ];
    let text_encoder = [
        4_883_550_696,
        4_781_593_336,
        4_886_472_224,
        4_781_593_376,
        4_781_593_368,
        4_886_472_248,
        4_781_593_376,
        4_781_593_368,
        4_886_472_248,
        4_571_866_320,
    ];
    let numbered = |stem: &str, sizes: &[u64]| -> Vec<(String, u64)> {
        let name = |index: usize| format!("{stem}-{:05}-of-{:05}.safetensors", index + 1, sizes.len());
        sizes.iter().enumerate().map(|(index, size)| (name(index), *size)).collect()
    };
    let mut files = numbered("transformer/diffusion_pytorch_model", &transformer);
    files.extend(numbered("text_encoder/model", &text_encoder));
    files.push(("vae/diffusion_pytorch_model.safetensors".into(), 336_213_556));
    files.push(("tokenizer/tokenizer.json".into(), 17_078_037));
    files.push(("flux2-dev.safetensors".into(), 64_446_596_128));
    let rest = [
        "LICENSE.md",
        "README.md",
        "ae.safetensors",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/generation_config.json",
        "text_encoder/model.safetensors.index.json",
        "tokenizer/chat_template.jinja",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "vae/config.json",
    ];
    files.extend(rest.map(|name| (name.to_owned(), 0)));
    files
}

/// Names of [`published`] that are not for this package.
const LEFT_OUT: [&str; 5] = [
    "README.md",
    "ae.safetensors",
    "flux2-dev.safetensors",
    "text_encoder/model-00009-of-00010.safetensors",
    "text_encoder/model-00010-of-00010.safetensors",
];

#[test]
fn the_patterns_take_what_is_read_and_the_card_counts_it() {
    let loaded = manifest::load(&path()).expect("a valid manifest");
    let weights = loaded.manifest.weights.full();
    assert_eq!((weights.repo.as_str(), weights.revision.as_deref()), (REPO, Some(REVISION)));
    let allow = weights.allow_patterns.expect("patterns");
    let taken = |path: &str| selected(path, &allow, &[]);
    for (file, _) in published() {
        assert_eq!(taken(&file), !LEFT_OUT.contains(&file.as_str()), "{file}");
    }
    let bytes = |part: &str| -> u64 {
        published()
            .iter()
            .filter(|(file, _)| file.starts_with(part) && taken(file))
            .map(|(_, size)| size)
            .sum()
    };
    let giga = |bytes: u64| format!("{:.2}", bytes as f64 / 1e9);
    let disk = format!(
        "| weights | {} GB: transformer {}, text encoder {}, VAE {}, tokenizer {} |",
        giga(bytes("")),
        giga(bytes("transformer/")),
        giga(bytes("text_encoder/")),
        giga(bytes("vae/")),
        giga(bytes("tokenizer/"))
    );
    assert!(disk.contains("103.36 GB"), "{disk}");
    let facts = Facts {
        tag: "tt-model/flux2-dev-qb2:aaaaaaaaaaaa".into(),
        digest: Some(format!("sha256:{}", "a".repeat(64))),
        tt_metal_version: "0.81.1".into(),
        revisions: Vec::new(),
        created_at: "2026-12-01T12:00:00.000000+00:00".into(),
        built: Map::new(),
    };
    let wire = Wire::new(&loaded.manifest, facts);
    let json: Value = serde_json::from_str(&wire.render()).expect("JSON");
    assert_eq!((&json["device_count"], &json["weights"]["revision"]), (&4.into(), &REVISION.into()));
    let card = card::render(&wire).expect("a card");
    for part in [
        disk.as_str(),
        "license: other\nlicense_name: flux-non-commercial-license\nlicense_link: https://huggingface.co/black-forest-labs/FLUX.2-dev/blob/main/LICENSE.md",
        "Accept the licence at",
        "Four Blackhole chips, opened as a 2x2 mesh",
        "-d '{\"prompt\": \"a lighthouse in a thunderstorm\", \"seed\": 3}'",
        "| `GET /health` | readiness, model id, mesh shape, served resolution |",
        "| `POST /generate` | enqueue a prompt; returns 202 and a `job_id` |",
        "| `GET /jobs/{id}/image` | the finished PNG |",
        "Generation is serialized.",
        "The served resolution is fixed at startup.",
        "reaped an hour after completion",
        "| default (default) | p300x2 | QB2 |",
        "| wide | p300x2 | QB2 |",
        "## Provenance",
    ] {
        assert!(card.contains(part), "{part}\nis not in\n{card}");
    }
}

#[test]
fn its_lock_pins_the_weights_and_the_wheel() {
    let read = |dir: PathBuf| Lock::read(&dir).expect("readable").expect("it is there");
    let lock = read(repository().join("examples/flux2-dev-qb2"));
    assert_eq!(lock.revision(REPO), Some(REVISION));
    assert!(lock.wheel.is_some());
    assert_eq!(lock.wheel, read(repository()).wheel, "the same wheel as klein's");
}

/// A stand-in of the Hub that has the published names, a few bytes each.
struct Scene {
    hub: Arc<Hub>,
    endpoint: String,
    home: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

impl Scene {
    fn new() -> Self {
        let files: BTreeMap<String, Bytes> =
            published().into_iter().map(|(file, _)| (file.clone(), Bytes::from(file))).collect();
        let mut repo = Repo { main: REVISION.into(), ..Repo::default() };
        repo.commits.insert(REVISION.into(), files);
        let hub = Arc::new(Hub::default());
        hub.repos.lock().expect("hub").insert(REPO.into(), repo);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let endpoint = format!("http://{}", runtime.block_on(hub.start()));
        Self { hub, endpoint, home: tempfile::tempdir().expect("a directory"), _runtime: runtime }
    }

    fn fetch(&self, token: Option<&str>) -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_packager"));
        command.args(["fetch", "--manifest"]).arg(path()).env_clear();
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HOME", self.home.path());
        command.envs(token.map(|token| ("HF_TOKEN", token)));
        let output = command.output().expect("the program starts");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        (output.status.code(), text.into_owned())
    }
}

#[test]
fn fetch_meets_the_gate_and_says_what_opens_it() {
    let scene = Scene::new();
    for (status, token, which) in [(401, None, "no token was sent"), (403, Some("hf_nobody"), "HF_TOKEN")] {
        scene
            .hub
            .break_with(move |_, _| Some(error(status, "GatedRepo", "Access to this model is restricted.")));
        let (code, text) = scene.fetch(token);
        assert_eq!(code, Some(6), "{text}");
        let accept = format!("accept its conditions at {}/{REPO}", scene.endpoint);
        for part in [&format!("{REPO} is gated"), &accept, which] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("hf_nobody"), "{text}");
    }
}

#[test]
fn fetch_brings_the_files_that_are_read_and_no_other() {
    let scene = Scene::new();
    let (code, text) = scene.fetch(Some("hf_nobody"));
    assert_eq!(code, Some(0), "{text}");
    let asked: BTreeSet<String> = scene
        .hub
        .downloads()
        .iter()
        .filter_map(|ask| Some(ask.path.split_once(&format!("/resolve/{REVISION}/"))?.1.to_owned()))
        .collect();
    let all = published().into_iter().map(|(file, _)| file);
    assert_eq!(asked, all.filter(|file| !LEFT_OUT.contains(&file.as_str())).collect());
}

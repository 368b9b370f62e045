// SPDX-License-Identifier: Apache-2.0
//! `packager fetch` as a program: killed and resumed, two at once, exit codes, and read back by huggingface_hub.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    response::Response,
};
use futures_util::{StreamExt as _, stream};
use tempfile::{TempDir, tempdir};

use crate::stand_in::{Ask, Hub, error, file, sha256};

/// A hub with one repository of one small and one large file.
struct Scene {
    hub: Arc<Hub>,
    commit: String,
    files: Vec<(&'static str, Bytes)>,
    endpoint: String,
    dir: TempDir,
    runtime: tokio::runtime::Runtime,
}

impl Scene {
    fn new(large: usize) -> Self {
        let mut state = 7_u64;
        let mut noise = Vec::with_capacity(large);
        while noise.len() < large {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            noise.extend_from_slice(&state.to_be_bytes()[..4]);
        }
        let files =
            vec![("config.json", Bytes::from_static(b"{}")), ("model/weights.bin", Bytes::from(noise))];
        let hub = Arc::new(Hub::default());
        let commit = hub.commit("org/weights", &files);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let endpoint = format!("http://{}", runtime.block_on(hub.start()));
        Self { hub, commit, files, endpoint, dir: tempdir().expect("dir"), runtime }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_packager"));
        command
            .args(["fetch", "--package", "org/weights"])
            .args(arguments)
            .current_dir(self.dir.path())
            .env_clear()
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.dir.path().join("home"))
            .env("HF_TOKEN", "hf_test_token_of_nobody")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn start(&self) -> Child {
        self.command(&[]).spawn().expect("the program starts")
    }

    /// Runs to the end; returns the exit code and everything that was printed.
    fn run(&self, arguments: &[&str]) -> (i32, String) {
        end(self.command(arguments).spawn().expect("the program starts"))
    }

    fn blobs(&self) -> std::path::PathBuf {
        self.dir.path().join("home/hub/models--org--weights/blobs")
    }

    fn assert_right(&self) {
        for (path, bytes) in &self.files {
            let at =
                self.dir.path().join("home/hub/models--org--weights/snapshots").join(&self.commit).join(path);
            assert!(fs::read(&at).expect("a file") == *bytes, "{path}");
        }
        assert_eq!(
            fs::read_dir(self.blobs()).expect("blobs").count(),
            self.files.len(),
            "nothing is left over"
        );
    }

    /// True once a part of the large file is recorded as whole.
    fn has_something(&self) -> bool {
        let mut entries = fs::read_dir(self.blobs()).into_iter().flatten().flatten();
        entries.any(|entry| entry.path().extension().is_some_and(|end| end == "done"))
    }

    /// Whatever has its final name has its bytes.
    fn assert_nothing_wrong(&self) {
        let blob = self.blobs().join(sha256(&self.files[1].1));
        if let Ok(bytes) = fs::read(blob) {
            assert!(bytes == self.files[1].1, "a wrong file looks right");
        }
    }
}

fn end(child: Child) -> (i32, String) {
    let output = child.wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(!text.contains("hf_test_token_of_nobody"), "{text}");
    (output.status.code().unwrap_or(-1), text.into_owned())
}

/// The good answer, slowly: 256 kB every two milliseconds.
fn slowly(ask: &Ask, content: &Bytes) -> Response {
    let (parts, _) = file(ask, "c", content).into_parts();
    let (first, last) = ask.range.unwrap_or((0, u64::MAX));
    let part = content.slice(first as usize..(last.saturating_add(1) as usize).min(content.len()));
    let pieces = stream::iter((0..part.len()).step_by(1 << 18)).then(move |at| {
        let piece = part.slice(at..(at + (1 << 18)).min(part.len()));
        async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            Ok::<_, std::io::Error>(piece)
        }
    });
    Response::from_parts(parts, Body::from_stream(pieces))
}

#[test]
fn killed_at_twenty_random_moments_it_goes_on_and_ends_right() {
    let scene = Scene::new(90_000_000);
    scene.hub.break_with(|ask, content| ask.path.ends_with("weights.bin").then(|| slowly(ask, content)));
    let mut state = u64::from(std::process::id());
    for round in 0..20 {
        let mut child = scene.start();
        // Every other time something is there to go on from, however slow the machine is.
        while round % 2 == 1 && !scene.has_something() && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_millis(20 + (state >> 33) % 180));
        // It may have come to its end by itself.
        let _ = child.kill();
        child.wait().expect("an end");
        scene.assert_nothing_wrong();
    }
    let (code, text) = scene.run(&[]);
    assert_eq!(code, 0, "{text}");
    scene.assert_right();
    let resumed = scene
        .hub
        .downloads()
        .iter()
        .filter(|ask| ask.range.is_some_and(|(first, _)| first % (64 << 20) != 0))
        .count();
    assert!(resumed > 0, "no run went on where another was killed");
}

#[test]
fn case_36_two_processes_at_once_download_once_and_both_end_right() {
    let scene = Scene::new(40_000_000);
    scene.hub.break_with(|ask, content| ask.path.ends_with("weights.bin").then(|| slowly(ask, content)));
    let children = [scene.start(), scene.start()];
    for (code, text) in children.map(end) {
        assert_eq!(code, 0, "{text}");
    }
    scene.assert_right();
}

#[test]
fn case_36_a_process_whose_partner_is_killed_takes_over() {
    let scene = Scene::new(90_000_000);
    scene.hub.break_with(|ask, content| ask.path.ends_with("weights.bin").then(|| slowly(ask, content)));
    let mut first = scene.start();
    while !fs::read_dir(scene.blobs()).is_ok_and(|entries| entries.count() > 0) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = scene.start();
    std::thread::sleep(Duration::from_millis(150));
    first.kill().expect("kill");
    first.wait().expect("an end");
    let (code, text) = end(second);
    assert_eq!(code, 0, "{text}");
    scene.assert_right();
}

#[test]
fn exit_codes_tell_network_gate_and_wrong_bytes_apart() {
    let scene = Scene::new(200_000);
    scene.hub.break_with(|ask, _| {
        ask.path.starts_with("/api/").then(|| error(403, "GatedRepo", "Ask for access."))
    });
    let (code, text) = scene.run(&[]);
    assert!(code == 6 && text.contains("is gated") && text.contains("HF_TOKEN"), "{code}: {text}");
    let (code, text) = scene.run(&["--json"]);
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((code, &value["error"]["exit_code"]), (6, &serde_json::json!(6)), "{text}");
    scene.hub.break_with(|ask, content| {
        ask.path.ends_with("weights.bin").then(|| file(ask, "c", &Bytes::from(vec![0; content.len()])))
    });
    assert_eq!(scene.run(&[]).0, 8);
    scene.assert_nothing_wrong();
    scene.hub.break_with(|ask, _| {
        let entry =
            serde_json::json!([{"type": "file", "path": "a", "size": 1_u64 << 60, "oid": "0".repeat(40)}]);
        ask.path.contains("/tree/").then(|| axum::response::IntoResponse::into_response(axum::Json(entry)))
    });
    assert_eq!(scene.run(&[]).0, 7);
    scene.hub.mend();
    let fetched = scene.command(&["--json"]).output().expect("runs");
    let fetched = serde_json::from_slice(&fetched.stdout).expect("JSON");
    crate::json::assert_documented("fetch", &fetched, packager::cli::json::fields("fetch"));
    std::fs::remove_dir_all(scene.blobs().parent().expect("the repository")).expect("removed");
    let (code, text) = scene.run(&["--include", "*.json"]);
    assert!(code == 0 && text.contains("snapshots/"), "{text}");
    let offline = scene.command(&[]).env("HF_HUB_OFFLINE", "1").spawn().expect("the program starts");
    let (code, text) = end(offline);
    assert!(code == 5 && text.contains("model/weights.bin (200.0 kB)"), "{code}: {text}");
    assert_eq!(scene.run(&["--include", "*.gguf"]).0, 2);
    let nowhere = scene.command(&[]).env("HF_ENDPOINT", "nowhere").spawn().expect("the program starts");
    assert_eq!(end(nowhere).0, 2);
}

#[test]
fn case_14_the_token_goes_into_no_argument_and_no_file() {
    let scene = Scene::new(200_000);
    assert_eq!(scene.run(&[]).0, 0);
    let mut dirs = vec![scene.dir.path().to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).expect("dir").flatten() {
            if entry.file_type().expect("type").is_dir() {
                dirs.push(entry.path());
            } else if let Ok(bytes) = fs::read(entry.path()) {
                assert!(
                    !String::from_utf8_lossy(&bytes).contains("hf_test_token"),
                    "{}",
                    entry.path().display()
                );
            }
        }
    }
}

/// The real package, in an environment of its own that later runs find again.
fn python() -> std::path::PathBuf {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("huggingface_hub");
    let python = venv.join("bin/python");
    let ok = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    if !ok(Command::new(&python).args(["-c", "import huggingface_hub"]).stderr(Stdio::null())) {
        assert!(ok(Command::new("python3").args(["-m", "venv"]).arg(&venv)), "python3 -m venv works");
        assert!(
            ok(Command::new(&python).args(["-m", "pip", "install", "-q", "huggingface_hub"])),
            "pip install huggingface_hub works"
        );
    }
    python
}

#[test]
fn huggingface_hub_reads_the_cache_back_offline_and_downloads_nothing_again() {
    let scene = Scene::new(300_000);
    assert_eq!(scene.run(&[]).0, 0);
    let script = "
import sys, huggingface_hub as h
root = h.snapshot_download('org/weights', local_files_only=True)
pinned = h.snapshot_download('org/weights', revision=sys.argv[1], local_files_only=True)
assert root == pinned, (root, pinned)
print(h.hf_hub_download('org/weights', 'model/weights.bin', local_files_only=True))
info = h.scan_cache_dir()
assert not info.warnings, info.warnings
assert [r.nb_files for r in info.repos] == [2], info.repos
";
    let python = |script: &str| {
        let output = Command::new(python())
            .args(["-c", script, &scene.commit])
            .env("HF_HOME", scene.dir.path().join("home"))
            .env("HF_ENDPOINT", &scene.endpoint)
            .output()
            .expect("python");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let asked = scene.hub.downloads().len();
    let path = python(script);
    assert!(fs::read(path.trim()).expect("the file") == scene.files[1].1);
    // Online it finds nothing to do either; and what it downloaded, we take.
    python("import huggingface_hub as h; h.snapshot_download('org/weights')");
    assert!(scene.hub.downloads()[asked..].iter().all(|ask| ask.method == "HEAD"));
    fs::remove_dir_all(scene.dir.path().join("home")).expect("the cache");
    python("import huggingface_hub as h; h.snapshot_download('org/weights')");
    let before = scene.hub.downloads().len();
    let (code, text) = scene.run(&[]);
    assert!(code == 0 && text.contains("already here"), "{text}");
    assert_eq!(scene.hub.downloads().len(), before);
    let _ = &scene.runtime;
}

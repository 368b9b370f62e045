// SPDX-License-Identifier: Apache-2.0
//! `packager push` to the Hub as a program, with a real package, against the stand-in. Faults of single requests are in
//! `hub/tests/it/push.rs`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, LazyLock},
    time::Duration,
};

use axum::body::Bytes;
use packager::{files, verify};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use crate::{
    engine::Small,
    json::assert_documented,
    stand_in::{CUT, Hub, error, noise, write::account},
};

const TOKEN: &str = "hf_test_token_of_nobody";

/// The small package, built once. Each test works on a copy.
static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
    let small = Small::built("hub");
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("dir").keep();
    copy(&small.package(), &place);
    place
});

fn copy(from: &Path, to: &Path) {
    let from = format!("{}/.", from.display());
    assert!(Command::new("cp").args(["-a", &from]).arg(to).status().expect("cp").success());
}

struct Scene {
    hub: Arc<Hub>,
    endpoint: String,
    dir: TempDir,
    runtime: tokio::runtime::Runtime,
}

type Shown = BTreeMap<String, Bytes>;

impl Scene {
    fn new() -> Self {
        let dir = tempdir().expect("dir");
        fs::create_dir(dir.path().join("package")).expect("dir");
        copy(&BUILT, &dir.path().join("package"));
        let hub = Arc::new(Hub::default());
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let endpoint = format!("http://{}", runtime.block_on(hub.start()));
        let scene = Self { hub, endpoint, dir, runtime };
        scene.whoami(account("me", "write", &[("org", "write"), ("other", "admin")]));
        scene
    }

    fn whoami(&self, value: Value) {
        self.hub.write.accounts.lock().expect("hub").insert(TOKEN.into(), value);
    }

    fn package(&self) -> PathBuf {
        self.dir.path().join("package")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_packager"));
        command
            .args(["push", "package"])
            .args(arguments)
            .current_dir(self.dir.path())
            .env_clear()
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.dir.path().join("home"))
            .env("HF_TOKEN", TOKEN)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> (i32, String) {
        end(self.command(arguments).spawn().expect("the program starts"))
    }

    /// Gets the package back into the cache; its snapshot.
    fn fetch(&self) -> PathBuf {
        let output = Command::new(env!("CARGO_BIN_EXE_packager"))
            .args(["fetch", "--package", "org/small"])
            .env_clear()
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.dir.path().join("home"))
            .env("HF_TOKEN", TOKEN)
            .output()
            .expect("runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8").trim().into()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.command(arguments).arg("--json").output().expect("runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(output.status.success(), "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// What main of a repository shows, without the Hub's own file.
    fn shown(&self, repo: &str) -> Shown {
        let repos = self.hub.repos.lock().expect("hub");
        let mut files = repos[repo].commits[&repos[repo].main].clone();
        files.remove(".gitattributes");
        files
    }

    fn private(&self, repo: &str) -> bool {
        self.hub.repos.lock().expect("hub")[repo].private
    }

    fn card(&self, repo: &str) -> String {
        String::from_utf8(self.shown(repo)["README.md"].to_vec()).expect("UTF-8")
    }

    fn local(&self) -> Shown {
        let entries = files::walk(&self.package()).expect("walk");
        let entries = entries.into_iter().filter(|entry| entry.full.is_file());
        entries.map(|entry| (entry.path, fs::read(&entry.full).expect("read").into())).collect()
    }

    fn asked(&self, method: &str) -> usize {
        self.hub.seen.lock().expect("hub").iter().filter(|ask| ask.method == method).count()
    }

    fn stored(&self) -> usize {
        self.hub.seen.lock().expect("hub").iter().filter(|ask| ask.path.starts_with("/storage/")).count()
    }

    /// Adds a large file to the package's code and a line to the list of digests, as a builder would.
    fn grow(&self, name: &str, bytes: &[u8]) {
        fs::write(self.package().join(name), bytes).expect("written");
        verify::write_sums(&self.package()).expect("sums");
    }
}

fn end(child: Child) -> (i32, String) {
    let output = child.wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(!text.contains(TOKEN) && !text.contains("signature=secret"), "{text}");
    (output.status.code().unwrap_or(-1), text.into_owned())
}

/// What a repository shows, as a consumer gets it into a directory.
fn pulled(shown: &Shown) -> TempDir {
    let dir = tempdir().expect("dir");
    for (path, bytes) in shown {
        crate::support::write(dir.path(), path, bytes);
    }
    crate::support::write(dir.path(), ".gitattributes", "* -text\n");
    dir
}

#[test]
fn case_13_a_package_is_pushed_read_back_and_a_second_push_sends_nothing() {
    let scene = Scene::new();
    // A dry run lists everything with sizes, and sends nothing.
    let dry = scene.json(&["--dry-run"]);
    assert_documented("push", &dry, packager::cli::json::fields("push"));
    let sizes: u64 =
        dry["changed"].as_array().expect("a list").iter().filter_map(|f| f["size"].as_u64()).sum();
    assert_eq!(
        (&dry["pushed"], &dry["created"], &dry["bytes"]),
        (&json!(false), &json!(true), &json!(sizes))
    );
    assert_eq!(scene.asked("POST") + scene.asked("PUT"), 0);
    let (_, text) = scene.run(&["--dry-run"]);
    assert!(text.contains("image/index.json") && text.contains("to send"), "{text}");

    let pushed = scene.json(&[]);
    assert_documented("push", &pushed, packager::cli::json::fields("push"));
    assert!(pushed["read_back"] == true && pushed["visibility"] == "private" && pushed["listed"] == false);
    assert_eq!(pushed["bytes_sent"], sizes);
    assert_eq!(scene.shown("org/small"), scene.local(), "the whole package and nothing else");
    assert_eq!(scene.hub.write.commits.lock().expect("hub").len(), 1);
    assert!(scene.private("org/small"));
    // What consumers get proves itself.
    verify::verify(pulled(&scene.shown("org/small")).path()).expect("a good package");
    let fetched = scene.fetch();
    assert!(fs::symlink_metadata(fetched.join("README.md")).expect("a link").is_symlink());
    verify::verify(&fetched).expect("a good package in the cache");

    let stored = scene.stored();
    let (code, text) = scene.run(&[]);
    assert!(code == 0 && text.contains("0 of them new or changed, 0 B sent"), "{text}");
    assert_eq!((scene.stored(), scene.hub.write.commits.lock().expect("hub").len()), (stored, 1));
}

#[test]
fn case_23_the_cards_commands_follow_the_target_and_pushing_back_restores_them() {
    let scene = Scene::new();
    let (code, text) = scene.run(&["--repo", "other/place"]);
    assert_eq!(code, 0, "{text}");
    let card = scene.card("other/place");
    for line in [
        "tt model pull other/place",
        "tt serve other/place",
        "tt-model pull  other/place --with-weights",
        "tt-model serve other/place",
    ] {
        assert!(card.lines().any(|found| found == line), "{line}: {card}");
    }
    let differing: Vec<String> = {
        let (shown, local) = (scene.shown("other/place"), scene.local());
        local.into_iter().filter(|(path, bytes)| shown[path] != *bytes).map(|(path, _)| path).collect()
    };
    assert_eq!(differing, ["README.md", "SHA256SUMS"]);
    // It still proves itself, and from there it goes back.
    let there = pulled(&scene.shown("other/place"));
    verify::verify(there.path()).expect("a good package");
    let local = scene.local();
    fs::remove_dir_all(scene.package()).expect("the package");
    fs::create_dir(scene.package()).expect("dir");
    copy(there.path(), &scene.package());
    assert_eq!(scene.run(&["--repo", "org/small"]).0, 0);
    assert_eq!(scene.shown("org/small"), local);
    // A card that names different places, or other words, is no push's.
    let path = there.path().join("README.md");
    let text = fs::read_to_string(&path).expect("card");
    for (from, to) in [("tt serve other/place", "tt serve org/small"), ("None.", "Many.")] {
        fs::write(&path, text.replacen(from, to, 1)).expect("written");
        verify::write_sums(there.path()).expect("sums");
        assert_eq!(verify::verify(there.path()).expect_err(from).class.exit_code(), 8);
    }
}

#[test]
fn case_24_what_the_hub_says_about_the_card_comes_before_the_upload() {
    let scene = Scene::new();
    scene.hub.break_with(|ask, _| {
        let body = json!({"errors": [{"message": "license_name must be lower case"}], "warnings": []});
        (ask.path == "/api/validate-yaml").then(|| {
            let body = axum::response::IntoResponse::into_response(axum::Json(body));
            let (mut parts, body) = body.into_parts();
            parts.status = axum::http::StatusCode::BAD_REQUEST;
            axum::response::Response::from_parts(parts, body)
        })
    });
    let (code, text) = scene.run(&[]);
    assert!(code == 8 && text.contains("license_name must be lower case"), "{code}: {text}");
    assert!(!scene.hub.repos.lock().expect("hub").contains_key("org/small"));
    // A package that was changed is not pushed at all.
    fs::write(scene.package().join("code/run.sh"), "other").expect("written");
    scene.hub.mend();
    let before = scene.hub.seen.lock().expect("hub").len();
    let (code, text) = scene.run(&[]);
    assert!(code == 8 && text.contains("code/run.sh"), "{code}: {text}");
    assert_eq!(scene.hub.seen.lock().expect("hub").len(), before, "no request");
}

#[test]
fn stale_files_go_and_others_stay() {
    let scene = Scene::new();
    let old = [
        ("code/old.py", "x"),
        ("image/blobs/sha256/old", "y"),
        ("media/picture.png", "z"),
        ("README.md", "---\ntags:\n- x\n---\n"),
    ];
    let old: Vec<_> = old.map(|(path, text)| (path, Bytes::from_static(text.as_bytes()))).into();
    scene.hub.commit("org/small", &old);
    let pushed = scene.json(&[]);
    assert_eq!(pushed["removed"], json!(["code/old.py", "image/blobs/sha256/old"]));
    assert_eq!((&pushed["created"], &pushed["visibility"]), (&json!(false), &json!("public")));
    let mut wanted = scene.local();
    wanted.insert("media/picture.png".into(), Bytes::from_static(b"z"));
    assert_eq!(scene.shown("org/small"), wanted);
}

#[test]
fn visibility_and_listing_follow_the_flags() {
    let scene = Scene::new();
    let tagged = |repo: &str| scene.card(repo).contains("\n- tt-model-catalog\n");
    let (code, text) = scene.run(&["--publish", "--private"]);
    assert_eq!(code, 2, "{text}");
    let published = scene.json(&["--publish"]);
    assert!(
        published["listed"] == true && published["visibility"] == "public" && !scene.private("org/small")
    );
    assert!(tagged("org/small"));
    verify::verify(pulled(&scene.shown("org/small")).path()).expect("a listed package is a good one");
    let tags: Vec<String> =
        scene.card("org/small").lines().filter(|l| l.starts_with("- ")).map(str::to_owned).collect();
    assert!(tags[..5].is_sorted(), "{tags:?}");
    // A plain push keeps the listing; --private takes it away, and says so.
    assert_eq!(scene.json(&[])["listed"], true);
    assert!(tagged("org/small"));
    let (code, text) = scene.run(&["--private"]);
    assert!(code == 0 && text.contains("making org/small private"), "{text}");
    assert!(!tagged("org/small") && scene.private("org/small"));
    let (code, text) = scene.run(&["--public"]);
    assert!(code == 0 && text.contains("making org/small public"), "{text}");
    assert!(!tagged("org/small") && !scene.private("org/small"));
}

#[test]
fn a_listing_needs_performance_and_limitations_before_anything_changes() {
    let small = Small::new("unlisted");
    small.edit("manifest.yaml", "  performance: None.\n", "");
    small.ok(&["pin", "--offline"]);
    small.ok(&["build"]);
    let scene = Scene::new();
    fs::remove_dir_all(scene.package()).expect("the package");
    fs::create_dir(scene.package()).expect("dir");
    copy(&small.package(), &scene.package());
    let (code, text) = scene.run(&["--publish"]);
    assert!(
        code == 3 && text.contains("card.performance") && !text.contains("card.limitations"),
        "{code}: {text}"
    );
    assert_eq!(scene.hub.seen.lock().expect("hub").len(), 0);
    // The same for a plain push to a repository that is listed, also if its card cannot be read.
    for card in ["---\ntags:\n- tt-model-catalog\n---\n", "no front matter"] {
        scene.hub.commit("org/small", &[("README.md", Bytes::copy_from_slice(card.as_bytes()))]);
        let (code, text) = scene.run(&[]);
        assert!(code == 3 && text.contains("cannot be listed"), "{code}: {text}");
        assert_eq!(scene.asked("POST") + scene.asked("PUT"), 0);
    }
    assert_eq!(scene.run(&["--private"]).0, 0, "delisted, it may");
}

#[test]
fn exit_codes_tell_what_was_wrong_and_the_old_state_stays() {
    let scene = Scene::new();
    assert_eq!(scene.run(&[]).0, 0);
    let old = scene.shown("org/small");
    scene.grow("code/big.bin", &noise(5, 300_000));
    // The digests of code/ are others now: this is no good package, so make one that differs beside them.
    fs::remove_file(scene.package().join("code/big.bin")).expect("removed");
    fs::write(scene.package().join("requirements.lock"), noise(5, 300_000)).expect("written");
    verify::write_sums(&scene.package()).expect("sums");
    verify::verify(&scene.package()).expect("a good package");

    let fails = |code: i32, said: &str| {
        let (found, text) = scene.run(&[]);
        assert!(found == code && text.contains(said), "{found}: {text}");
        assert_eq!(scene.shown("org/small"), old, "{said}");
    };
    scene.whoami(account("me", "read", &[("org", "write")]));
    fails(6, "may only read");
    scene.whoami(account("me", "write", &[]));
    fails(6, "neither that account nor one of its organisations");
    scene.whoami(account("me", "write", &[("org", "write")]));
    scene.hub.break_with(|ask, _| ask.path.contains("/preupload/").then(|| error(403, "", "No.")));
    fails(6, "HF_TOKEN");
    scene.hub.break_with(|ask, _| ask.path.contains("/storage/").then(|| error(403, "", "No.")));
    fails(6, "at a fresh address too");
    scene
        .hub
        .break_with(|ask, _| ask.path.contains("/commit/").then(|| error(412, "", "A commit has happened")));
    fails(5, "got another commit meanwhile");
    scene.hub.break_with(|ask, _| {
        (ask.path.contains("/resolve/") && ask.path.ends_with("requirements.lock"))
            .then(|| crate::stand_in::file(ask, "c", &Bytes::from_static(b"other")))
    });
    fails(8, "again");
    scene.hub.mend();
    let offline = scene.command(&[]).env("HF_HUB_OFFLINE", "1").spawn().expect("starts");
    assert_eq!(end(offline).0, 5);
    let nobody = scene.command(&[]).env_remove("HF_TOKEN").spawn().expect("starts");
    let (code, text) = end(nobody);
    assert!(code == 6 && text.contains("needs a token"), "{text}");
    assert_eq!(scene.run(&["--repo", "noslash"]).0, 2);
    assert_eq!(scene.run(&["--repo", "a/b", "--registry", "localhost:1/x"]).0, 2);
    assert_eq!(scene.run(&[]).0, 0);
    assert!(scene.shown("org/small").contains_key("requirements.lock"));
}

#[test]
fn killed_at_random_moments_it_leaves_the_old_state_or_the_new_and_sends_no_finished_file_again() {
    let scene = Scene::new();
    assert_eq!(scene.run(&[]).0, 0);
    let old = scene.shown("org/small");
    for number in 0..4 {
        fs::write(scene.package().join(format!("extra-{number}")), noise(10 + number, 6_000_000))
            .expect("written");
    }
    verify::write_sums(&scene.package()).expect("sums");
    let new = scene.local();
    *scene.hub.write.slow.lock().expect("hub") = Duration::from_millis(2);
    let mut state = u64::from(std::process::id());
    let mut between = 0;
    for _ in 0..12 {
        let stored = scene.hub.write.storage.lock().expect("hub").len();
        let mut child = scene.command(&[]).spawn().expect("starts");
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_millis(100 + (state >> 33) % 900));
        let _ = child.kill();
        child.wait().expect("an end");
        // Whatever was on its way has settled.
        std::thread::sleep(Duration::from_millis(50));
        between += usize::from(scene.hub.write.storage.lock().expect("hub").len() > stored);
        let shown = scene.shown("org/small");
        assert!(shown == old || shown == new, "half a package");
    }
    let arrived = scene.hub.write.storage.lock().expect("hub").len();
    let before = scene.stored();
    let (code, text) = scene.run(&[]);
    assert_eq!(code, 0, "{text}");
    assert!(scene.shown("org/small") == new);
    let all = scene.hub.write.storage.lock().expect("hub").len();
    assert_eq!(
        scene.stored() - before,
        all - arrived,
        "only what was missing is sent ({between} runs got somewhere)"
    );
    let _ = &scene.runtime;
}

#[test]
fn a_cut_upload_goes_on_and_memory_stays_flat() {
    let scene = Scene::new();
    fs::write(scene.package().join("extra"), noise(7, 150_000_000)).expect("written");
    verify::write_sums(&scene.package()).expect("sums");
    *scene.hub.write.part.lock().expect("hub") = 40_000_000;
    scene.hub.break_with(|ask, _| {
        let cut = ask.path.ends_with("/2") && ask.before == 0;
        cut.then(|| {
            axum::response::IntoResponse::into_response(
                axum::http::StatusCode::from_u16(CUT).expect("a status"),
            )
        })
    });
    let child = scene.command(&[]).spawn().expect("starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0_u64;
    let waiting = std::thread::spawn(move || end(child));
    while !waiting.is_finished() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
        peak = peak.max(kilobytes.unwrap_or(0));
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, text) = waiting.join().expect("an end");
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("trying again"), "{text}");
    println!("150 MB pushed and read back; at most {} MB held", peak / 1000);
    assert!((1..80_000).contains(&peak), "{peak} kB");
    assert!(scene.shown("org/small") == scene.local());
}

// SPDX-License-Identifier: Apache-2.0
//! Consumers with our package: `tt-model` as `tests/consumers` acts it out, from the Hub's stand-in and from a real
//! registry, and the real `tt` from PyPI on top of it. Run together with `ours.rs`, whose image they take.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, LazyLock},
};

use axum::body::Bytes;
use packager::{files, verify};
use serde_json::{Value, json};

use crate::{
    consumer::{Container, curl, free_port, pixels, predict, succeed},
    engine::{ENGINE, docker, docker_text},
    ours::{EXPECTED, IMAGE, MINI, packager},
    registry_server::Registry,
    stand_in::{Hub, write::account},
    support::repository,
};

const REPO: &str = "flux2-tt/klein-mini";
/// Of the author; consumers have none.
const TOKEN: &str = "hf_test_token_of_the_author";
const CONTAINER: &str = "tt-model-klein-mini-default";

/// Files of a directory as the Hub would hold them.
fn content(dir: &Path) -> Vec<(String, Bytes)> {
    let entries = files::walk(dir).expect("walk").into_iter().filter(|entry| entry.full.is_file());
    entries.map(|entry| (entry.path, fs::read(&entry.full).expect("read").into())).collect()
}

/// A consumer's machine: a home, an engine, and a Hub that has the package and, at their pin, its weights.
struct Scene {
    home: tempfile::TempDir,
    hub: Arc<Hub>,
    endpoint: String,
    _runtime: tokio::runtime::Runtime,
    container: Container,
}

impl Scene {
    fn new(package: &Path) -> Self {
        let hub = Arc::new(Hub::default());
        *hub.page.lock().expect("hub") = 7;
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let endpoint = format!("http://{}", runtime.block_on(hub.start()));
        drop(docker(&["rm", "-f", CONTAINER]));
        let scene = Self {
            home: tempfile::tempdir().expect("home"),
            hub,
            endpoint,
            _runtime: runtime,
            container: Container(CONTAINER.into()),
        };
        // The author's push, as authors do it.
        let account = account("author", "write", &[("flux2-tt", "write")]);
        scene.hub.write.accounts.lock().expect("hub").insert(TOKEN.into(), account);
        let mut push = packager(&["push", "--public", "--json"]);
        push.env("HF_ENDPOINT", &scene.endpoint).env("HF_TOKEN", TOKEN);
        succeed(push.arg(package));
        let weights = verify::read_wire(package).expect("wire").weights;
        assert_eq!(weights.repo_id, REPO);
        let checkpoint = content(&repository().join("examples/klein-mini/checkpoint")).into_iter().collect();
        let mut repos = scene.hub.repos.lock().expect("hub");
        let commits = &mut repos.get_mut(REPO).expect("the repository").commits;
        commits.insert(weights.revision.expect("a pin"), checkpoint);
        drop(repos);
        scene
    }

    /// A commit of the package; its name.
    fn publish(&self, files: &[(String, Bytes)]) -> String {
        let files: Vec<(&str, Bytes)> =
            files.iter().map(|(path, bytes)| (path.as_str(), bytes.clone())).collect();
        self.hub.commit(REPO, &files)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.home.path().join(path)
    }

    /// The environment of both tools.
    fn prepare<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        for name in ["HF_HUB_CACHE", "HF_TOKEN", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"] {
            command.env_remove(name);
        }
        command
            .env("HOME", self.home.path())
            .env("HF_HOME", self.path("hf"))
            .env("HF_ENDPOINT", &self.endpoint);
        command.env("DOCKER_HOST", &*ENGINE).env("TT_MODEL_CARDS", "0").env("TT_MODEL_LOADER", "docker")
    }

    fn tt_model(&self) -> Command {
        let mut command = Command::new(repository().join("packager/tests/consumers/tt-model"));
        self.prepare(&mut command);
        command
    }

    fn index(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path(".cache/tt-model/installed.json")).expect("the index"))
            .expect("JSON")
    }
}

impl Drop for Scene {
    /// The engine has the image again, as the build left it.
    fn drop(&mut self) {
        let script = "docker rm -f \"$1\"; tar -C \"$0\" -cf - . | docker load";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(MINI.join("image")).arg(CONTAINER).env("DOCKER_HOST", &*ENGINE);
        drop(command.output());
    }
}

/// What a command says when it is refused.
fn refused(command: &mut Command) -> String {
    let Output { status, stderr, .. } = command.output().expect("it starts");
    assert_eq!(status.code(), Some(1), "{command:?}");
    String::from_utf8(stderr).expect("UTF-8")
}

/// The endpoint that a serve printed last is the port.
fn port(said: &str) -> String {
    said.lines().last().and_then(|line| line.rsplit(':').next()).expect("an endpoint").to_owned()
}

fn asks_for_a_picture(port: &str) {
    assert!(curl(&[&format!("http://127.0.0.1:{port}/v1/models")]).contains("\"data\":[{\"id\""));
    curl(&[&format!("http://127.0.0.1:{port}/health")]);
    assert!(
        pixels(&predict(port)) == *EXPECTED,
        "the container's picture has other pixels than the library's"
    );
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn tt_model_lives_its_whole_life_with_our_package_from_the_hub() {
    let _image = IMAGE.write();
    let scene = Scene::new(&MINI);
    let wire = verify::read_wire(&MINI).expect("wire");
    let (tag, digest) =
        (wire.container.image.tag.as_str(), wire.container.image.digest.as_deref().expect("digest"));
    let first = scene.hub.repos.lock().expect("hub")[REPO].main.clone();

    // Pull: the head is resolved, the snapshot comes, the layout is loaded, all is recorded. Both ways into the engine.
    for loader in ["skopeo", "docker"] {
        docker(&["rmi", "-f", tag]);
        drop(fs::remove_dir_all(scene.path(".cache")));
        succeed(scene.tt_model().args(["pull", REPO, "--with-weights"]).env("TT_MODEL_LOADER", loader));
        assert_eq!(docker_text(&["inspect", "-f", "{{.Id}}", tag]), digest, "by {loader}");
    }
    let entry = &scene.index()[REPO];
    assert_eq!(
        (&entry["revision"], &entry["image"], &entry["image_digest"], &entry["image_loaded_id"]),
        (&json!(first), &json!(tag), &json!(digest), &json!(digest))
    );
    let weights = scene
        .path("hf/hub/models--flux2-tt--klein-mini/snapshots")
        .join(wire.weights.revision.as_deref().expect("a pin"));
    for (path, bytes) in content(&repository().join("examples/klein-mini/checkpoint")) {
        assert!(fs::read(weights.join(&path)).expect("a weight file") == bytes, "{path}");
    }
    assert!(succeed(scene.tt_model().arg("list")).ends_with("ready"));
    assert_eq!(succeed(scene.tt_model().args(["profiles", REPO])), "default");

    // Serve: composed as packager composes it, ready by its line, and it draws what the library draws.
    let wanted = free_port();
    let printed = succeed(scene.tt_model().args(["serve", REPO, "--print", "--port", &wanted]));
    let mut ours = packager(&["serve", "--print", "--device", "cpu", "--port", &wanted]);
    scene.prepare(&mut ours);
    // The two forms of a bind mount are one to the engine.
    let binds = |line: &str| -> Vec<String> {
        let line = line.replace("--mount type=bind,src=", "--volume ").replace(",dst=", ":");
        line.split(' ').map(str::to_owned).collect()
    };
    assert_eq!(binds(&printed), binds(&succeed(ours.arg(&*MINI))));
    let served = port(&succeed(scene.tt_model().args(["serve", REPO, "--port", &wanted])));
    assert_eq!(served, wanted);
    asks_for_a_picture(&served);
    let logs = scene.tt_model().args(["logs", REPO]).output().expect("logs");
    let logs = String::from_utf8_lossy(&[logs.stdout, logs.stderr].concat()).into_owned();
    assert!(logs.contains("Application startup complete") && logs.contains("/predict"), "{logs}");
    assert!(succeed(scene.tt_model().args(["stop", REPO])).contains("exit code 0"));
    assert!(refused(scene.tt_model().args(["stop", REPO])).contains("is not served"));

    // Without network it still serves; the weights' absence is known before a container starts.
    let mut offline = scene.tt_model();
    offline.args(["serve", REPO, "--local-only"]).env("HF_ENDPOINT", "http://127.0.0.1:9");
    asks_for_a_picture(&port(&succeed(&mut offline)));
    succeed(scene.tt_model().args(["stop", REPO]));
    let aside = scene.path("hf-aside");
    fs::rename(scene.path("hf"), &aside).expect("moved");
    assert!(
        refused(scene.tt_model().args(["serve", REPO, "--local-only"])).contains("the weights are pinned")
    );
    drop(fs::remove_dir_all(scene.path("hf")));
    fs::rename(&aside, scene.path("hf")).expect("moved back");

    // Update: a new revision with the same image moves the record and loads nothing.
    let mut next = content(&MINI);
    next.push(("NEWS.md".into(), Bytes::from_static(b"A new revision.\n")));
    let second = scene.publish(&next);
    let said = succeed(scene.tt_model().args(["serve", REPO, "--refresh", "--detach"]));
    assert!(
        said.contains("has a newer revision") && said.contains("is here") && !said.contains("✓ image"),
        "{said}"
    );
    assert_eq!(scene.index()[REPO]["revision"], json!(second));
    scene.container.ready();
    succeed(scene.tt_model().args(["stop", REPO]));
    // An image that is gone comes from the recorded revision.
    docker_text(&["rmi", tag]);
    scene.publish(&[("README.md".into(), Bytes::from_static(b"no package any more\n"))]);
    let said = succeed(scene.tt_model().args(["serve", REPO, "--detach"]));
    assert!(said.contains(&second[..12]) && said.contains("✓ image"), "{said}");
    assert!(refused(scene.tt_model().args(["pull", REPO])).contains("is not a tt-model bundle"));

    // Remove: containers, image, record and caches; the weights stay.
    succeed(scene.tt_model().args(["rm", REPO]));
    assert!(docker_text(&["ps", "-aq", "--filter", &format!("name={CONTAINER}")]).is_empty());
    assert!(docker_text(&["images", "-q", tag]).is_empty());
    assert_eq!(scene.index(), json!({}));
    assert!(!scene.path(".cache/tt-model/klein-mini").exists() && weights.is_dir());
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn tt_model_lives_its_whole_life_with_our_package_whose_image_is_in_a_registry() {
    let _image = IMAGE.write();
    let registry = Registry::open();
    let work = tempfile::tempdir().expect("dir");
    let package = work.path().join("klein-mini");
    succeed(Command::new("cp").arg("-a").arg(&*MINI).arg(&package));
    let place = format!("{}/flux2-tt/klein-mini:1", registry.address());
    succeed(packager(&["push", "--registry", &place, "--drop-image"]).arg(&package));
    let wire = verify::read_wire(&package).expect("wire");
    let (image, id) = (&wire.container.image, wire.built("image_digest"));
    let scene = Scene::new(&package);
    docker(&["rmi", "-f", id]);

    succeed(scene.tt_model().args(["pull", REPO, "--with-weights"]));
    assert!(
        !scene.hub.downloads().iter().any(|ask| ask.path.contains("/image/")),
        "the image came from the Hub"
    );
    assert_eq!(docker_text(&["inspect", "-f", "{{.Id}}", &image.tag]), id);
    let entry = &scene.index()[REPO];
    assert_eq!((&entry["image_digest"], &entry["image_loaded_id"]), (&json!(image.digest), &json!(id)));
    let served = port(&succeed(scene.tt_model().args(["serve", REPO])));
    asks_for_a_picture(&served);
    assert!(succeed(scene.tt_model().args(["stop", REPO])).contains("exit code 0"));
    // A second pull knows that this digest was loaded as this id.
    let said = succeed(scene.tt_model().args(["pull", REPO]));
    assert!(said.contains("is here"), "{said}");
    succeed(scene.tt_model().args(["rm", REPO]));
    assert!(docker_text(&["images", "-q", &image.tag]).is_empty());
}

/// The real `tt`, in an environment of its own that later runs find again.
static TT: LazyLock<PathBuf> = LazyLock::new(|| {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tt-1.2.1");
    let tt = venv.join("bin/tt");
    if !tt.is_file() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        let packages = ["tenstorrent==1.2.1", "typer==0.27.2"];
        succeed(Command::new(venv.join("bin/python")).args(["-m", "pip", "install", "-q"]).args(packages));
    }
    tt
});

#[test]
#[ignore = "compiles our image; make test runs it"]
fn the_real_tt_pulls_lists_serves_watches_and_stops_our_package() {
    let _image = IMAGE.write();
    let scene = Scene::new(&MINI);
    let tag = verify::read_wire(&MINI).expect("wire").container.image.tag;
    docker(&["rmi", "-f", &tag]);
    let tt = |arguments: &[&str]| {
        let mut command = Command::new(&*TT);
        scene.prepare(&mut command).args(arguments).current_dir(scene.home.path());
        command.env(
            "TT_TOOL_BIN_TT_MODEL",
            repository().join("packager/tests/consumers/tt-model").canonicalize().expect("tt-model"),
        );
        command
            .env("TT_TELEMETRY_DISABLED", "1")
            .env("TT_SERVE_READY_TIMEOUT", "180")
            .env("HF_HUB_DISABLE_XET", "1");
        for (name, dir) in [("TT_CONFIG_DIR", "config"), ("TT_DATA_DIR", "data"), ("TT_CACHE_DIR", "cache")] {
            command.env(name, scene.path(dir));
        }
        succeed(&mut command)
    };
    let json_of = |arguments: &[&str]| -> Value {
        let said = tt(arguments);
        // What tt-model streams stands before the result.
        let start = said.find("\n{\n").map_or(0, |at| at + 1);
        serde_json::from_str(&said[start..]).unwrap_or_else(|_| panic!("{arguments:?}: {said}"))
    };

    // It asks the Hub whether this is a bundle, and has tt-model pull it with its weights.
    assert_eq!(json_of(&["model", "pull", REPO, "--json"])["kind"], "bundle");
    let models =
        json_of(&["--offline", "model", "list", "--community", "--include-unverified", "--all", "--json"]);
    let row = models["models"]
        .as_array()
        .expect("models")
        .iter()
        .find(|row| row["name"] == REPO)
        .expect("our package is listed");
    assert_eq!((&row["source"], &row["engines"]), (&json!("local"), &json!(["http-server"])), "{row}");
    let plan = json_of(&["serve", REPO, "--dry-run", "--json"]);
    assert_eq!(
        (&plan["bundle"]["engine"], &plan["bundle"]["hardware"]),
        (&json!("http-server"), &json!("p100a")),
        "{plan}"
    );

    // Ready by its own signs: /v1/models lists a model, /health is 200, the container publishes the port.
    let port = free_port();
    let ready = json_of(&["serve", REPO, "--yes", "--port", &port, "--json"]);
    assert_eq!(ready["endpoint"], format!("http://127.0.0.1:{port}/v1").as_str(), "{ready}");
    asks_for_a_picture(&port);
    let served = json_of(&["model", "ps", "--json"]);
    let row = served["served"]
        .as_array()
        .expect("rows")
        .iter()
        .find(|row| row["container"] == CONTAINER)
        .expect("a row");
    assert_eq!(
        (&row["health"], &row["backend"], &row["profile"], &row["port"].to_string()),
        (&json!("healthy"), &json!("model-manager"), &json!("default"), &port),
        "{row}"
    );
    assert!(row["served_id"].is_string(), "{row}");
    let mut logs = Command::new(&*TT);
    scene.prepare(&mut logs).args(["model", "logs", REPO]).env("TT_TELEMETRY_DISABLED", "1");
    logs.env(
        "TT_TOOL_BIN_TT_MODEL",
        repository().join("packager/tests/consumers/tt-model").canonicalize().expect("tt-model"),
    );
    let logs = logs.output().expect("logs");
    let text = String::from_utf8_lossy(&[logs.stdout, logs.stderr].concat()).into_owned();
    assert!(logs.status.success() && text.contains("Application startup complete"), "{text}");
    tt(&["model", "stop", REPO]);
    assert!(
        json_of(&["model", "ps", "--all", "--json"])["served"]
            .as_array()
            .expect("rows")
            .iter()
            .all(|row| row["container"] != CONTAINER)
    );
    assert_eq!(json_of(&["model", "rm", REPO, "--yes", "--json"])["removed_by"], "tt-model");
    assert!(docker_text(&["images", "-q", &tag]).is_empty());
}

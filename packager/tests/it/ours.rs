// SPDX-License-Identifier: Apache-2.0
//! Our own image, built from its manifest by a real engine, and a consumer's whole life with it: load,
//! run, ready, ask, compare with the library's picture, logs, stop, remove.
//!
//! Ignored by a plain `cargo test`, because the image compiles the server: minutes, once. `make test` runs
//! them as a step of their own. Cargo's profile in the image is `dev` unless `FLUX2_IMAGE_PROFILE` says
//! otherwise (`dist` is what is published): the same Dockerfile and pixels, in about half the time.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{LazyLock, RwLock},
};

use packager::{layout::normalize, verify, wire::Wire};
use serde_json::{Value, json};

use crate::{
    consumer::{Container, PROMPT, curl, free_port, pixels, predict, succeed},
    engine::{ENGINE, builder, docker, docker_text},
    support::{fixtures, repository},
};

/// Stands in the environment of every command here, and must stand in nothing that they make.
const TOKEN: &str = concat!("hf_", "pL4nT3dT0k3nThatMustNotBeFoundAnywhere");

/// The image by its name in the engine: tests that run it read, tests that remove it or start the one container write.
pub static IMAGE: RwLock<()> = RwLock::new(());

/// `target/ours`: the packages, and a Hugging Face cache with the small checkpoint.
static WORK: LazyLock<PathBuf> = LazyLock::new(|| {
    let work = repository().canonicalize().expect("repository").join("target/ours");
    fs::create_dir_all(&work).expect("directory");
    let manifest = fs::read_to_string(repository().join("examples/klein-mini/manifest.yaml")).expect("text");
    let revision = manifest.lines().find_map(|line| line.strip_prefix("  revision: ")).expect("revision");
    let snapshot = work.join("hf/hub/models--flux2-tt--klein-mini/snapshots").join(revision);
    fs::create_dir_all(&snapshot).expect("directory");
    let from = format!("{}/.", repository().join("examples/klein-mini/checkpoint").display());
    succeed(Command::new("cp").args(["-R", &from]).arg(&snapshot));
    work
});

/// The small example's package. Its manifest is copied as deep in the repository as the original is, so
/// that its lock is not the author's.
pub static MINI: LazyLock<PathBuf> = LazyLock::new(|| {
    let manifest = WORK.join("manifest.yaml");
    fs::copy(repository().join("examples/klein-mini/manifest.yaml"), &manifest).expect("copied");
    succeed(packager(&["pin", "--offline", "--manifest"]).arg(&manifest).args(BASES));
    build(&manifest, "klein-mini")
});

/// The published package with its committed lock: the same image under other labels, so nothing is
/// compiled again.
static KLEIN: LazyLock<PathBuf> = LazyLock::new(|| {
    LazyLock::force(&MINI);
    build(&repository().join("manifest.yaml"), "flux2-klein-p100a")
});

const BASES: [&str; 4] = [
    "--base-image",
    "BASE_IMAGE=flux2-base:bookworm",
    "--base-image",
    "BUILDER_IMAGE=flux2-builder:bookworm",
];

fn build(manifest: &Path, name: &str) -> PathBuf {
    builder();
    let mut command = packager(&["build", "--allow-unpinned", "--manifest"]);
    command.arg(manifest).arg("--out").arg(&*WORK).args(BASES);
    command.args(["--build-arg", &format!("PROFILE={}", profile())]);
    if let Some(ca) = certificates() {
        command.arg("--build-ca").arg(ca);
    }
    succeed(&mut command);
    WORK.join(name)
}

fn profile() -> String {
    std::env::var("FLUX2_IMAGE_PROFILE").unwrap_or_else(|_| "dev".into())
}

/// What this host trusts: its network may have certificates of its own.
fn certificates() -> Option<PathBuf> {
    let file =
        std::env::var_os("SSL_CERT_FILE").map_or("/etc/ssl/certs/ca-certificates.crt".into(), PathBuf::from);
    file.is_file().then_some(file)
}

pub fn packager(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_packager"));
    command.args(arguments).current_dir(repository()).env("DOCKER_HOST", &*ENGINE);
    command.env("HF_HOME", WORK.join("hf")).env("HF_TOKEN", TOKEN).env("HOME", WORK.join("home"));
    command.env_remove("HF_HUB_CACHE");
    command
}

fn wire(package: &Path) -> Wire {
    verify::read_wire(package).expect("a wire manifest")
}

/// The library's picture of the same request, made on this host.
pub static EXPECTED: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
    let program = Path::new(env!("CARGO_BIN_EXE_packager")).with_file_name("flux2-server");
    assert!(program.is_file(), "{} is missing: run this with `cargo test --workspace`", program.display());
    let out = WORK.join("library.png");
    let mut command = Command::new(program);
    command.args(["generate", PROMPT, "--width", "512", "--height", "512", "--seed", "1", "--checkpoint"]);
    succeed(command.arg(repository().join("examples/klein-mini/checkpoint")).arg("--out").arg(&out));
    pixels(&fs::read(out).expect("a picture"))
});

#[test]
#[ignore = "compiles our image; make test runs it"]
fn our_package_lives_a_consumers_whole_life() {
    let _image = IMAGE.write();
    let package = &*MINI;
    let image = wire(package).container.image;
    let (tag, digest) = (image.tag, image.digest.expect("digest"));

    // docker load, as after a pull: the image is only in the layout.
    drop(docker(&["rmi", "-f", &tag]));
    let loaded = succeed(
        Command::new("sh")
            .args(["-c", "tar -C \"$0\" -cf - . | docker load"])
            .arg(package.join("image"))
            .env("DOCKER_HOST", &*ENGINE),
    );
    assert!(loaded.contains(&tag), "{loaded}");
    assert_eq!(docker_text(&["inspect", "-f", "{{.Id}}", &tag]), digest);

    // The docker run that is composed, as it is printed.
    let port = free_port();
    let run = succeed(packager(&["serve", "--print", "--device", "cpu", "--port", &port]).arg(package));
    let container = Container("tt-model-klein-mini-default".into());
    drop(docker(&["rm", "-f", &container.0]));
    for directory in ["cache", "weights", "tensors"] {
        fs::create_dir_all(WORK.join("home/.cache/tt-model/klein-mini").join(directory)).expect("directory");
    }
    succeed(Command::new("sh").args(["-c", &run]).env("DOCKER_HOST", &*ENGINE).env("HF_TOKEN", ""));
    container.ready();
    assert!(curl(&[&format!("http://127.0.0.1:{port}/v1/models")]).contains("\"data\":[{\"id\""));
    curl(&[&format!("http://127.0.0.1:{port}/health")]);
    assert!(
        pixels(&predict(&port)) == *EXPECTED,
        "the container's picture has other pixels than the library's"
    );
    assert!(container.logs().contains("/predict"), "{}", container.logs());
    assert_eq!(container.stop(), "0", "{}", container.logs());
    drop(container);
    docker_text(&["rmi", &tag]);
    assert!(docker_text(&["images", "-q", &tag]).is_empty());

    // The other way into an engine, and the packager's own serve and stop.
    succeed(Command::new(repository().join("scripts/check-evidence.sh")).arg("--install"));
    succeed(
        Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--dest-daemon-host", &ENGINE])
            .arg(format!("oci:{}:latest", package.join("image").display()))
            .arg(format!("docker-daemon:{tag}")),
    );
    assert_eq!(docker_text(&["inspect", "-f", "{{.Id}}", &tag]), digest);
    let served = succeed(packager(&["serve", "--device", "cpu", "--json"]).arg(package));
    let served: Value = serde_json::from_str(&served).expect("JSON");
    assert!(pixels(&predict(&served["port"].to_string())) == *EXPECTED);
    assert!(succeed(packager(&["stop"]).arg(package)).contains("exit code 0"));
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn our_image_serves_as_any_user_with_nothing_writable() {
    let _image = IMAGE.read();
    let tag = wire(&MINI).container.image.tag;
    let hf = format!("{}:/hf:ro", WORK.join("hf").display());
    let snapshot = wire(&MINI).container.serve.env["KLEIN_SNAPSHOT"].clone();
    let strict = [
        "--user",
        "54321:54321",
        "--read-only",
        "--tmpfs",
        "/tmp",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--publish",
        "127.0.0.1::20000",
        "--volume",
        &hf,
        "--env",
    ];
    let variable = format!("KLEIN_SNAPSHOT={snapshot}");
    for argv in [
        ["flux2-server", "serve", "--host", "0.0.0.0", "--port", "20000"].as_slice(),
        // What tools start that know only Python servers.
        &[
            "python",
            "-m",
            "uvicorn",
            "--host",
            "0.0.0.0",
            "--port",
            "20000",
            "--lifespan",
            "on",
            "klein.server:app",
        ],
    ] {
        let arguments = [&strict[..], &[&variable, &tag], argv].concat();
        let container = Container::start("ours-strict", &arguments);
        container.ready();
        let address = docker_text(&["port", &container.0, "20000/tcp"]);
        let port =
            address.lines().next().and_then(|line| line.rsplit(':').next()).expect("a port").to_owned();
        assert!(pixels(&predict(&port)) == *EXPECTED);
        container.until("healthy", |container| container.state("Health.Status") == "healthy");
        assert_eq!(
            docker_text(&["exec", &container.0, "cat", "/proc/1/comm"]),
            "flux2-server",
            "it is process 1"
        );
        assert_eq!(container.stop(), "0", "{}", container.logs());
    }
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn our_image_explains_a_bare_run_and_holds_no_compiler_and_no_other_source() {
    let _image = IMAGE.read();
    let tag = wire(&MINI).container.image.tag;
    let bare = docker(&["run", "--rm", &tag]);
    let said = String::from_utf8_lossy(&bare.stderr);
    assert!(bare.status.code() == Some(1) && said.contains("docker run --rm -p 20000:20000"), "{said}");
    let script = "for tool in cc gcc c++ clang ld as cargo rustc python3 make git curl; do command -v $tool; done
        find / -xdev '(' -name '*.rs' -o -name 'Cargo.*' -o -name 'build-ca*' ')' -not -path '/opt/flux2/code/*'";
    let found = docker_text(&["run", "--rm", "--user", "0", "--entrypoint", "sh", &tag, "-c", script]);
    assert!(found.is_empty(), "{found}");
    let config: Value =
        serde_json::from_str(&docker_text(&["inspect", "-f", "{{json .Config}}", &tag])).expect("JSON");
    assert_eq!((config["User"].as_str(), config["StopSignal"].as_str()), (Some("tt"), Some("SIGTERM")));
    for label in ["", ".repo", ".weights", ".arch", ".kind", ".profiles"] {
        assert!(config["Labels"][format!("org.tenstorrent.tt-model{label}")].is_string(), "{label}");
    }
    for label in ["title", "description", "licenses", "source", "revision", "base.name"] {
        assert!(config["Labels"][format!("org.opencontainers.image.{label}")].is_string(), "{label}");
    }

    // Its code/ by the engine's own copy, not by our reader of layers.
    let copy = tempfile::tempdir().expect("directory");
    let container = Container("ours-code".into());
    drop(docker(&["rm", "-f", &container.0]));
    docker_text(&["create", "--name", &container.0, &tag]);
    docker_text(&["cp", &format!("{}:/opt/flux2/code", container.0), copy.path().to_str().expect("path")]);
    succeed(Command::new("diff").arg("-r").arg(copy.path().join("code")).arg(MINI.join("code")));
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn case_16_no_layer_and_no_history_of_our_image_holds_the_planted_token() {
    let _image = IMAGE.read();
    let history = docker_text(&["history", "--no-trunc", &wire(&MINI).container.image.tag]);
    let holds = |bytes: &[u8]| bytes.windows(TOKEN.len()).any(|part| part == TOKEN.as_bytes());
    for entry in packager::files::walk(&MINI).expect("walk") {
        if entry.full.is_file() {
            let mut content = Vec::new();
            normalize::open(&entry.full).expect("open").read_to_end(&mut content).expect("read");
            assert!(!holds(&content), "{}", entry.path);
        }
    }
    assert!(!holds(history.as_bytes()));
    assert!(!holds(&fs::read(WORK.join("klein-mini.log")).expect("the log")));
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn a_plain_docker_build_gives_the_same_code_and_server() {
    let _image = IMAGE.read();
    let tag = wire(&MINI).container.image.tag;
    // The files of the repository as they are now, and the certificates of this network.
    let context = WORK.join("plain");
    drop(fs::remove_dir_all(&context));
    fs::create_dir_all(&context).expect("directory");
    let copy =
        "git ls-files -z | tar --null --ignore-failed-read -T - -cf - 2>/dev/null | tar -xf - -C \"$0\"";
    succeed(Command::new("sh").args(["-c", copy]).arg(&context).current_dir(repository()));
    if let Some(ca) = certificates() {
        fs::copy(ca, context.join("build-ca.crt")).expect("copied");
    }
    // Either builder will do; BuildKit has the layers of the package's build.
    let has_buildkit = docker(&["buildx", "version"]).status.success()
        || docker_text(&["version", "-f", "{{.Client.Version}}"]).starts_with("20.");
    let mut command = Command::new("docker");
    command.env("DOCKER_HOST", &*ENGINE).env("DOCKER_BUILDKIT", if has_buildkit { "1" } else { "0" });
    command.args([
        "build",
        "--target",
        "cpu",
        "-t",
        "ours-plain:test",
        "--build-arg",
        "BASE_IMAGE=flux2-base:bookworm",
    ]);
    command.args(["--build-arg", "BUILDER_IMAGE=flux2-builder:bookworm", "--build-arg"]);
    succeed(command.arg(format!("PROFILE={}", profile())).arg(&context));
    let sums = |image: &str| {
        let script = "cd / && find opt/flux2/code usr/local/bin -type f | sort | xargs sha256sum";
        docker_text(&["run", "--rm", "--entrypoint", "sh", image, "-c", script])
    };
    assert_eq!(sums("ours-plain:test"), sums(&tag));
    docker_text(&["rmi", "ours-plain:test"]);
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn commands_on_our_card_are_the_ones_that_work() {
    let _image = IMAGE.read();
    let card = fs::read_to_string(KLEIN.join("README.md")).expect("the card");
    let fences =
        card.split("```sh\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(fence, _)| fence);
    let commands: Vec<&str> = fences.filter(|fence| fence.contains("curl ")).collect();
    assert_eq!(commands.len(), 1, "{card}");
    // The card is that of the published weights; the small ones stand in for them.
    let (hf, snapshot) = (WORK.join("hf"), wire(&MINI).container.serve.env["KLEIN_SNAPSHOT"].clone());
    let container = Container::start(
        "ours-card",
        &[
            "--publish",
            "127.0.0.1::20000",
            "--volume",
            &format!("{}:/hf:ro", hf.display()),
            "--env",
            &format!("KLEIN_SNAPSHOT={snapshot}"),
            &wire(&KLEIN).container.image.tag,
            "flux2-server",
            "serve",
            "--host",
            "0.0.0.0",
            "--port",
            "20000",
        ],
    );
    container.ready();
    let address = docker_text(&["port", &container.0, "20000/tcp"]);
    let address = address.lines().next().expect("an address");
    let command = commands[0].replace("localhost:20000", address);
    let answer = succeed(Command::new("sh").args(["-ec", &command]));
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(
        (&answer["width"], &answer["height"], &answer["seed"]),
        (&json!(1024), &json!(1024), &json!(42))
    );
    // The keys that the card promises.
    for key in ["image", "model", "license", "num_steps", "reference_count", "timing_ms"] {
        assert!(card.contains(&format!("\"{key}\"")) && !answer[key].is_null(), "{key}");
    }
}

#[test]
#[ignore = "compiles our image; make test runs it"]
fn our_package_is_proved_by_the_tools_of_others_and_built_only_once() {
    let _image = IMAGE.read();
    for package in [&*MINI, &*KLEIN] {
        succeed(packager(&["verify"]).arg(package));
        succeed(Command::new(repository().join("scripts/check-evidence.sh")).arg(package));
        crate::wire::read_strictly(&package.join("tt_kernel_manifest.json"));
    }
    let cards =
        [MINI.as_path(), KLEIN.as_path(), &fixtures().join("seeds/klein"), &fixtures().join("seeds/dev")];
    let cards = cards.map(|directory| directory.join("README.md"));
    succeed(Command::new(repository().join("scripts/check-cards.sh")).args(cards));
    let before = fs::read(MINI.join("SHA256SUMS")).expect("sums");
    assert!(build(&WORK.join("manifest.yaml"), "klein-mini").is_dir());
    assert!(
        fs::read(MINI.join("SHA256SUMS")).expect("sums") == before,
        "the same inputs made another package"
    );
}

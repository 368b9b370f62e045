// SPDX-License-Identifier: Apache-2.0
//! `packager build` against a real engine, with the small package.

use std::{
    fs,
    process::Stdio,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::engine::{ENGINE, Small, docker, docker_text};

fn json(small: &Small, file: &str) -> Value {
    serde_json::from_slice(&fs::read(small.package().join(file)).expect(file)).expect("JSON")
}

#[test]
fn case_1_unchanged_inputs_are_said_to_be_and_mint_nothing() {
    let small = Small::built("unchanged");
    let before = fs::read(small.package().join("SHA256SUMS")).expect("sums");
    let images = docker_text(&["images", "-q", &format!("tt-model/{}", small.name)]);
    let said = small.ok(&["build"]);
    assert!(said.starts_with("unchanged"), "{said}");
    assert_eq!(fs::read(small.package().join("SHA256SUMS")).expect("sums"), before);
    assert_eq!(docker_text(&["images", "-q", &format!("tt-model/{}", small.name)]), images);
    // A changed file of the code is a changed input, and `plan` says which.
    small.edit("code/pkg/model.py", "x = 1", "x = 2");
    assert!(small.ok(&["plan"]).contains("\"code/\""));
    assert!(!small.ok(&["build"]).starts_with("unchanged"));
}

#[test]
fn case_2_two_builds_from_scratch_have_one_identity() {
    let small = Small::new("twice");
    small.ok(&["pin", "--offline"]);
    let report: Value = serde_json::from_str(&small.ok(&["build", "--twice", "--json"])).expect("JSON");
    assert_eq!(report["reproduced"], true);
    // And the other builder, whose own image has other bytes, differs in nothing but its history.
    let digest = report["digest"].as_str().expect("digest").to_owned();
    let layers = json(&small, "tt_kernel_manifest.json")["container"]["built"]["diff_ids"].clone();
    let again: Value =
        serde_json::from_str(&small.ok(&["build", "--again", "--builder", "classic", "--json"]))
            .expect("JSON");
    assert_eq!(
        json(&small, "tt_kernel_manifest.json")["container"]["built"]["diff_ids"][0],
        layers[0],
        "the base is shared"
    );
    assert!(again["digest"].as_str().is_some_and(|other| other.len() == digest.len()));
}

#[test]
fn case_2_a_build_that_cannot_be_repeated_is_explained_by_layer_and_file() {
    let small = Small::new("random");
    small.edit(
        "Dockerfile",
        "USER 1000:1000",
        "RUN head -c 8 /dev/urandom > /var/lib/random-bytes\nUSER 1000:1000",
    );
    small.ok(&["pin", "--offline"]);
    let said = small.fails(8, &["build", "--twice"]);
    let end = said.rsplit_once("error:").expect("an error").1;
    assert!(
        end.contains("layer 2: /var/lib/random-bytes") || end.contains("layer 4: /var/lib/random-bytes"),
        "{end}"
    );
    assert!(!small.package().exists(), "nothing is left of a failed build");
}

#[test]
fn case_7_case_18_a_failed_step_is_the_last_thing_said_with_both_builders() {
    let small = Small::built("failing");
    let before = fs::read(small.package().join("SHA256SUMS")).expect("sums");
    for builder in ["buildkit", "classic"] {
        let said = small.fails(4, &["build", "--build-arg", "FAIL=17", "--builder", builder]);
        for part in ["exit code 17", "RUN if", "line before the end", "to stderr", "full log:"] {
            assert!(said.contains(part), "{builder}: no `{part}` in:\n{said}");
        }
        let end = said.trim_end().lines().last().expect("a line").to_owned();
        assert!(end.starts_with("next: full log:") && !said.contains('\x1b'), "{builder}: {said}");
        let log = end.rsplit(' ').next().expect("a path").to_owned();
        assert!(fs::read_to_string(small.path(&log)).expect("the log").contains("line before the end"));
    }
    assert_eq!(
        fs::read(small.package().join("SHA256SUMS")).expect("sums"),
        before,
        "the earlier package is as it was"
    );
    assert!(small.ok(&["verify", small.package().to_str().expect("path")]).contains("agrees with itself"));
}

#[test]
fn case_11_buildkit_features_are_refused_before_anything_is_sent() {
    let small = Small::new("features");
    small.edit("Dockerfile", "RUN if", "RUN --mount=type=cache,target=/c if");
    small.ok(&["pin", "--offline"]);
    let said = small.fails(4, &["build", "--builder", "classic"]);
    assert!(said.contains("Dockerfile:6 uses RUN --mount"), "{said}");
    assert!(!small.path("build").join(format!("{}.log", small.name)).exists(), "nothing was sent");
    small.ok(&["build"]);
}

#[test]
fn an_unpinned_package_is_refused_unless_allowed_and_then_says_so() {
    let small = Small::new("unpinned");
    assert!(small.fails(3, &["build"]).contains("packager pin"));
    small.edit("manifest.yaml", "ref: \"58648d44443223041148125843ca7c7d4780463e\"", "ref: main");
    small.ok(&["pin", "--offline"]);
    let said = small.fails(3, &["build"]);
    assert!(said.contains("does not pin everything") && said.contains("offline"), "{said}");
    small.ok(&["build", "--allow-unpinned"]);
    assert!(fs::read_to_string(small.package().join("README.md")).expect("card").contains("Not pinned"));
}

/// Sends a large file to the engine, gets it back in a layer, loads and proves it, and never holds it.
#[test]
fn case_8_a_large_image_goes_through_little_memory() {
    const SIZE: u64 = 400 << 20;
    const HELD: u64 = 64 << 20;
    let small = Small::new("large");
    fs::File::create(small.path("server/large.dat"))
        .and_then(|file| file.set_len(SIZE))
        .expect("a file of zeros");
    small.edit("Dockerfile", "COPY code", "COPY server/large.dat /var/large.dat\nCOPY code");
    small.ok(&["pin", "--offline"]);
    let package = small.package();
    for arguments in [["build"].as_slice(), &["verify", package.to_str().expect("path")]] {
        let said = fs::File::create(small.path("said")).expect("a file");
        let mut command = small.command();
        let mut child = command.args(arguments).stdout(Stdio::null()).stderr(said).spawn().expect("starts");
        let (status, mut peak) = (format!("/proc/{}/status", child.id()), 0);
        let ended = loop {
            let text = fs::read_to_string(&status).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
            let kilobytes = line.trim().trim_end_matches(" kB").parse().unwrap_or(0_u64);
            peak = peak.max(kilobytes << 10);
            if let Some(ended) = child.try_wait().expect("waits") {
                break ended;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(ended.success(), "{}", fs::read_to_string(small.path("said")).expect("text"));
        println!("{arguments:?}: peak {} MiB", peak >> 20);
        assert!(peak > 0 && peak < HELD, "{arguments:?} held {} MiB", peak >> 20);
    }
}

#[test]
fn case_16_a_secret_never_reaches_arguments_layers_or_history() {
    let small = Small::new("secrets");
    small.ok(&["pin", "--offline"]);
    let token = format!("hf_{}", "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA12");
    assert!(
        small.fails(2, &["build", "--build-arg", &format!("NAME={token}")]).contains("a Hugging Face token")
    );
    assert!(small.fails(2, &["build", "--build-arg", "HF_TOKEN=x"]).contains("history"));
    // A token in the environment of the build and of the user is nowhere in what is built.
    let output = small.command().env("HF_TOKEN", &token).args(["build"]).output().expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found = |bytes: &[u8]| bytes.windows(token.len()).any(|part| part == token.as_bytes());
    for entry in packager::files::walk(&small.package()).expect("walk") {
        if entry.full.is_file() {
            let mut content = Vec::new();
            let mut reader = packager::layout::normalize::open(&entry.full).expect("open");
            std::io::Read::read_to_end(&mut reader, &mut content).expect("read");
            assert!(!found(&content), "{}", entry.path);
        }
    }
    let image = json(&small, "tt_kernel_manifest.json")["container"]["image"]["tag"]
        .as_str()
        .expect("tag")
        .to_owned();
    assert!(!docker_text(&["history", "--no-trunc", &image]).contains(&token));
}

#[test]
fn an_interrupted_build_leaves_no_container_no_half_package_and_the_earlier_one_as_it_was() {
    let small = Small::built("interrupted");
    let before = fs::read(small.package().join("SHA256SUMS")).expect("sums");
    small.edit("Dockerfile", "USER 1000:1000", "RUN echo sleeping-now; sleep 300\nUSER 1000:1000");
    for builder in ["buildkit", "classic"] {
        let child = small
            .command()
            .args(["build", "--builder", builder])
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let log = small.path("build").join(format!("{}.log", small.name));
        let started = Instant::now();
        while !fs::read_to_string(&log).is_ok_and(|text| text.contains("\nsleeping-now")) {
            assert!(
                started.elapsed() < Duration::from_mins(2),
                "{builder}: the build never came to its step"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        let id = rustix::process::Pid::from_raw(child.id().cast_signed()).expect("pid");
        rustix::process::kill_process(id, rustix::process::Signal::INT).expect("interrupt");
        let output = child.wait_with_output().expect("ends");
        assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(Duration::from_secs(1));
        let running = docker_text(&["ps", "--no-trunc", "--format", "{{.Command}}"]);
        assert!(!running.contains("sleeping-now"), "{builder}: {running}");
        fs::write(&log, "").expect("emptied");
    }
    let left: Vec<String> = fs::read_dir(small.path("build"))
        .expect("build")
        .map(|e| e.expect("entry").file_name().into_string().expect("UTF-8"))
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(fs::read(small.package().join("SHA256SUMS")).expect("sums"), before);
    assert!(docker_text(&["images", "-q", &format!("packager-build/{}", small.name)]).is_empty());
}

#[test]
fn case_12_no_engine_lists_what_was_tried_and_why_each_failed() {
    let small = Small::new("noengine");
    small.ok(&["pin", "--offline"]);
    let run = |host: Option<&str>| {
        let mut command = small.command();
        command
            .env_remove("DOCKER_HOST")
            .env_remove("DOCKER_CONTEXT")
            .env("XDG_RUNTIME_DIR", small.path("runtime"));
        if let Some(host) = host {
            command.env("DOCKER_HOST", host);
        }
        command.args(["build", "--out", "elsewhere"]).output().expect("runs")
    };
    let output = run(Some("unix:///nowhere/docker.sock"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4));
    assert!(said.contains("unix:///nowhere/docker.sock (DOCKER_HOST): No such file"), "{said}");
    assert!(!said.contains("podman"), "an explicit choice is not passed over: {said}");
    assert!(ENGINE.starts_with("unix://") || ENGINE.starts_with("tcp://"));
    let text = String::from_utf8_lossy(&run(Some("ssh://host")).stderr).into_owned();
    assert!(text.contains("scheme ssh"), "{text}");
}

#[test]
fn the_code_in_the_image_is_the_code_of_the_package() {
    let small = Small::new("othercode");
    small.edit(
        "Dockerfile",
        "COPY code /opt/small/code",
        "COPY code /opt/small/code\nRUN echo tampered >> /opt/small/code/pkg/model.py",
    );
    small.ok(&["pin", "--offline"]);
    assert!(small.fails(8, &["build"]).contains("code/pkg/model.py differs"));
    assert!(!small.package().exists());
}

#[test]
fn a_check_that_fails_in_the_image_fails_the_build_and_takes_the_image_away() {
    let small = Small::new("check");
    small.edit(
        "manifest.yaml",
        "[[small-server, --version]]",
        "[[small-server, --version], [sh, -c, \"id -u; touch /x && echo writable; exit 5\"]]",
    );
    small.ok(&["pin", "--offline"]);
    let said = small.fails(4, &["build"]);
    assert!(
        said.contains("exit code 5") && said.contains("  54321\n") && !said.contains("  writable\n"),
        "{said}"
    );
    assert!(docker_text(&["images", "-q", &format!("tt-model/{}", small.name)]).is_empty());
    assert!(
        docker(&["ps", "-aq", "--filter", "label=org.tenstorrent.tt-model.packager-run"]).stdout.is_empty()
    );
}

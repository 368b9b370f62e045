// SPDX-License-Identifier: Apache-2.0
//! Faults that a healthy engine does not show on request: a stand-in answers the engine's API on a socket
//! and misbehaves as reports describe. What works is tested against a real engine in `build.rs`.

use std::{
    collections::HashMap,
    fs,
    io::{Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use packager::{
    image::{
        build::{Builder, Request, build},
        context::Context,
        engine::{Engine, Environment, find_in},
    },
    manifest::model::Build,
};
use tempfile::TempDir;

use crate::support::write;

/// In a body: what follows is sent a moment later, as a chunk of its own.
const PAUSE: &str = "<pause>";

type Answer = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// A socket that answers every request by its first line.
struct StandIn {
    dir: TempDir,
    asked: Arc<Mutex<Vec<String>>>,
}

impl StandIn {
    /// `answer` gives the JSON lines for a path, or none to stay silent for ever.
    fn start(answer: Answer) -> Self {
        let dir = tempfile::tempdir().expect("dir");
        let listener = UnixListener::bind(dir.path().join("docker.sock")).expect("socket");
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let answer = Arc::new(answer);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                std::thread::spawn(move || respond(stream, &seen, &**answer));
            }
        });
        Self { dir, asked }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }

    async fn engine(&self) -> Engine {
        let host = format!("unix://{}", self.socket().display());
        find_in(&Environment { docker_host: Some(host), ..Environment::default() })
            .await
            .expect("the stand-in answers")
    }

    fn asked(&self, part: &str) -> usize {
        self.asked.lock().expect("lock").iter().filter(|line| line.contains(part)).count()
    }
}

fn respond(mut stream: UnixStream, seen: &Mutex<Vec<String>>, answer: &dyn Fn(&str) -> Option<String>) {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 65536]);
    let ends = |bytes: &[u8], mark: &[u8]| bytes.windows(mark.len()).any(|part| part == mark);
    while !ends(&bytes, b"\r\n\r\n")
        || (ends(&bytes, b"transfer-encoding: chunked") && !bytes.ends_with(b"\r\n0\r\n\r\n"))
    {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    let line = String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned();
    seen.lock().expect("lock").push(line.clone());
    let body = match line.split(' ').nth(1).unwrap_or_default() {
        path if path.ends_with("/_ping") => Some("OK".to_owned()),
        path if path.ends_with("/version") => Some("{\"Version\":\"99.0\",\"ApiVersion\":\"1.41\",\"Components\":[{\"Name\":\"Engine\",\"Version\":\"99\"}],\"Novel\":1}".into()),
        path if path.ends_with("/info") => Some("{\"SecurityOptions\":[\"name=seccomp\"],\"Novel\":{}}".into()),
        path => answer(path),
    };
    match body {
        Some(body) => {
            let parts: Vec<&str> = body.split(PAUSE).collect();
            let head = format!(
                "HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                parts.iter().map(|part| part.len()).sum::<usize>()
            );
            let _ = stream.write_all(head.as_bytes());
            for part in parts {
                let _ = stream.write_all(part.as_bytes());
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        None => std::thread::sleep(Duration::from_secs(30)),
    }
}

fn request(builder: Builder) -> Request {
    Request {
        dockerfile: "Dockerfile".into(),
        target: None,
        args: HashMap::from([("BASE_IMAGE".into(), "some/base:1".into())]),
        labels: HashMap::new(),
        tag: "packager-build/x:1".into(),
        from_scratch: false,
        builder,
        idle: Duration::from_secs(20),
        host_network: false,
    }
}

fn context(dir: &Path) -> Context {
    write(dir, "Dockerfile", "FROM scratch\n");
    write(dir, "code/a", "1");
    let section: Build = serde_json::from_value(serde_json::json!({})).expect("defaults");
    Context::new(&section, dir, &dir.join("code"), None, 0).expect("a context").0
}

async fn run(stand_in: &StandIn, request: Request) -> Result<String, packager::error::Failure> {
    let dir = tempfile::tempdir().expect("dir");
    let engine = stand_in.engine().await;
    build(&engine, &context(dir.path()), &request, &dir.path().join("log"), true).await
}

const IMAGE: &str = "{\"Id\":\"sha256:abc\",\"Novel\":[1]}";

#[tokio::test]
async fn case_9_unknown_fields_in_messages_never_abort_a_build() {
    let stand_in = StandIn::start(Box::new(|path| {
        let lines = "{\"stream\":\"Step 1/1 : FROM x\\n\",\"novel\":{\"a\":[1]}}\n{\"status\":\"s\",\"progressDetail\":{\"current\":1,\"novel\":true}}\n{\"novel\":null}\n{\"aux\":{\"ID\":\"sha256:abc\"}}\n";
        Some(if path.contains("/build") { lines.into() } else { IMAGE.into() })
    }));
    assert_eq!(run(&stand_in, request(Builder::Classic)).await.expect("built"), "sha256:abc");
}

#[tokio::test]
async fn case_9_case_10_buildkit_that_cannot_be_followed_falls_back_to_the_classic_builder() {
    for fault in [
        "{\"aux\":[1,2]}\n",
        "{\"errorDetail\":{\"message\":\"no active session for x: context deadline exceeded\"},\"error\":\"no active session for x: context deadline exceeded\"}\n",
    ] {
        let stand_in = StandIn::start(Box::new(move |path| {
            Some(if path.contains("version=2") {
                fault.into()
            } else if path.contains("/build") {
                "{\"aux\":{\"ID\":\"sha256:abc\"}}\n".into()
            } else {
                IMAGE.into()
            })
        }));
        assert_eq!(run(&stand_in, request(Builder::Auto)).await.expect("built"), "sha256:abc", "{fault}");
        assert!(stand_in.asked("version=2") == 1 && stand_in.asked("/build?") == 2, "{fault}");
    }
}

#[tokio::test]
async fn a_line_that_ends_in_a_later_chunk_is_no_fault_and_a_cut_one_proves_nothing() {
    let built = "{\"aux\":{\"ID\":\"sha256:abc\"}}\r\n";
    let run_with = async |messages: String| {
        let stand_in = StandIn::start(Box::new(move |path| {
            Some(if path.contains("/build") { messages.clone() } else { IMAGE.into() })
        }));
        run(&stand_in, request(Builder::Classic)).await
    };
    let late = format!("{built}{{\"stream\":\"Successfully tagged x\"}}{PAUSE}\r\n");
    assert_eq!(run_with(late).await.expect("built"), "sha256:abc");
    // Cut before any image, and cut when the tag still names an older image.
    for messages in
        ["{\"stream\":\"Step 1".into(), format!("{}{{\"stream\":\"Succ", built.replace("abc", "def"))]
    {
        let failure = run_with(messages.clone()).await.expect_err("cut off");
        assert_eq!(failure.class.exit_code(), 4, "{messages}: {failure}");
    }
}

#[tokio::test]
async fn case_10_a_lost_session_names_the_base_image_and_the_way_out() {
    let stand_in = StandIn::start(Box::new(|_| {
        Some("{\"errorDetail\":{\"message\":\"no active session for x\"},\"error\":\"no active session for x\"}\n".into())
    }));
    let failure = run(&stand_in, request(Builder::Buildkit)).await.expect_err("lost");
    assert!(failure.why.contains("no active session") && failure.why.contains("some/base:1"), "{failure}");
    assert!(failure.next.contains("--builder classic"), "{}", failure.next);
}

#[tokio::test]
async fn case_7_a_stream_that_says_built_and_gives_no_image_is_a_failure() {
    let stand_in = StandIn::start(Box::new(|path| {
        Some(if path.contains("/build") {
            "{\"stream\":\"Successfully built abc\\n\"}\n".into()
        } else {
            "{\"message\":\"No such image\"}".into()
        })
    }));
    let failure = run(&stand_in, request(Builder::Classic)).await.expect_err("no image");
    assert_eq!(failure.class.exit_code(), 4);
    assert!(failure.why.contains("no image id") || failure.why.contains("without an image"), "{failure}");
}

#[tokio::test]
async fn a_full_disk_is_told_from_a_broken_build_whoever_says_it() {
    let stand_in = StandIn::start(Box::new(|_| {
        Some("{\"stream\":\"Step 1/1 : RUN x\\n\"}\n{\"stream\":\"ld: No space left on device\\n\"}\n{\"error\":\"x\",\"errorDetail\":{\"message\":\"returned a non-zero code: 1\"}}\n".into())
    }));
    let failure = run(&stand_in, request(Builder::Classic)).await.expect_err("full");
    assert_eq!(failure.class.exit_code(), 7, "{failure}");
    assert!(failure.next.contains("docker system df"), "{}", failure.next);
}

#[tokio::test]
async fn case_8_silence_is_ended_by_a_limit_that_the_message_states() {
    let stand_in = StandIn::start(Box::new(|_| None));
    let failure = run(&stand_in, Request { idle: Duration::from_secs(1), ..request(Builder::Classic) })
        .await
        .expect_err("silence");
    assert!(
        failure.what.contains("no sign of life for 1 s") && failure.next.contains("--idle-minutes"),
        "{failure}"
    );
}

#[tokio::test]
async fn case_12_sockets_are_tried_in_order_and_each_failure_is_told() {
    let dir = tempfile::tempdir().expect("dir");
    let runtime = dir.path().join("run");
    write(&runtime, "docker.sock", "a file, not a socket");
    let environment = Environment {
        runtime: Some(runtime.clone()),
        home: dir.path().into(),
        config: dir.path().join(".docker"),
        ..Environment::default()
    };
    let hosts: Vec<String> =
        environment.candidates().expect("candidates").into_iter().map(|candidate| candidate.host).collect();
    assert_eq!(hosts[0], "unix:///var/run/docker.sock");
    assert!(hosts.iter().any(|host| host.ends_with("run/podman/podman.sock")), "{hosts:?}");
    // Rootless Podman alone answers: it is found, whatever else does not.
    let stand_in = StandIn::start(Box::new(|_| None));
    fs::create_dir_all(runtime.join("podman")).expect("dir");
    std::os::unix::fs::symlink(stand_in.socket(), runtime.join("podman/podman.sock")).expect("link");
    if !Path::new("/var/run/docker.sock").exists() {
        let engine = find_in(&environment).await.expect("Podman's socket");
        assert!(engine.host.ends_with("podman/podman.sock"), "{}", engine.host);
        fs::remove_file(runtime.join("podman/podman.sock")).expect("removed");
        let failure = find_in(&environment).await.expect_err("none");
        for part in [
            "/var/run/docker.sock (Docker's socket): No such file",
            "docker.sock (rootless Docker's socket): this is no socket",
            "Podman's socket",
        ] {
            assert!(failure.why.contains(part), "{part}: {}", failure.why);
        }
    }
}

#[test]
fn case_12_the_current_docker_context_is_honoured() {
    let dir = tempfile::tempdir().expect("dir");
    let environment = |context: Option<&str>| Environment {
        docker_context: context.map(str::to_owned),
        config: dir.path().into(),
        home: "/nowhere".into(),
        ..Environment::default()
    };
    write(dir.path(), "config.json", "{\"currentContext\":\"remote\"}");
    assert!(environment(None).candidates().expect_err("not stored").what.contains("`remote`"));
    let meta = format!("contexts/meta/{}/meta.json", packager::files::sha256("remote"));
    write(
        dir.path(),
        &meta,
        "{\"Name\":\"remote\",\"Endpoints\":{\"docker\":{\"Host\":\"tcp://192.0.2.1:2375\"}}}",
    );
    let hosts = environment(None).candidates().expect("one");
    assert_eq!((hosts.len(), hosts[0].host.as_str()), (1, "tcp://192.0.2.1:2375"));
    assert!(environment(Some("default")).candidates().expect("list").len() > 1);
    let explicit = Environment { docker_host: Some("unix:///x".into()), ..environment(Some("remote")) };
    assert_eq!(explicit.candidates().expect("one")[0].from, "DOCKER_HOST");
}

#[test]
fn the_context_is_sorted_has_one_time_and_holds_what_is_listed() {
    let dir = tempfile::tempdir().expect("dir");
    write(dir.path(), "Dockerfile", "FROM scratch\n");
    write(dir.path(), "src/b", "2");
    write(dir.path(), "src/a", "1");
    write(dir.path(), "not-listed", "3");
    write(dir.path(), "staged/x", "4");
    let section: Build = serde_json::from_value(serde_json::json!({"context": ["src"]})).expect("a section");
    let (context, _) =
        Context::new(&section, dir.path(), &dir.path().join("staged"), None, 77).expect("a context");
    let mut bytes = Vec::new();
    context.write(&mut bytes).expect("written");
    let mut archive = tar::Archive::new(bytes.as_slice());
    let entries: Vec<(String, u64, u64)> = archive
        .entries()
        .expect("entries")
        .map(|entry| {
            let entry = entry.expect("entry");
            let header = entry.header();
            (
                entry.path().expect("path").display().to_string(),
                header.mtime().expect("time"),
                header.uid().expect("uid"),
            )
        })
        .collect();
    let names: Vec<&str> = entries.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["Dockerfile", "code/x", "src/", "src/a", "src/b"]);
    assert!(entries.iter().all(|(_, time, uid)| (*time, *uid) == (77, 0)));
    let mut again = Vec::new();
    context.write(&mut again).expect("written");
    assert_eq!(bytes, again);
}

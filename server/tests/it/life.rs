// SPDX-License-Identifier: Apache-2.0
//! From start to end: loading, faults of the device, shutting down, and the process as a supervisor sees it.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use flux2::{Pipeline, pipeline::OnLoad};
use serde_json::json;
use server::{exit::Exit, lifecycle::Phase};

use crate::{
    jobs::wait_until,
    scripted::{Gate, Scripted},
    support::{BINARY, TINY, TestServer, answer, client, refused, small},
};

#[tokio::test]
async fn health_is_red_while_loading_and_work_is_503() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let opener = move |_: &flux2::OpenOptions, progress: OnLoad<'_>| {
        progress(3, 4);
        wait.recv().unwrap();
        Ok(Box::new(Scripted::new(Gate::opened(), Duration::ZERO)) as Box<dyn Pipeline>)
    };
    let server = TestServer::begin(&[], Box::new(opener));
    wait_until(|| matches!(server.app.life.phase(), Phase::Loading { progress: Some(_), .. })).await;
    let response = server.get("/health").send().await.unwrap();
    assert!(response.headers().contains_key("retry-after"));
    let (status, health) = answer(response).await;
    assert_eq!(status, 503);
    assert_eq!(
        (&health["status"], &health["phase"], &health["progress"], &health["ready"]),
        (&json!("loading"), &json!("load"), &json!(0.75), &json!(false))
    );
    let (status, alive) = server.get_json("/tt-liveness").await;
    assert_eq!((status.as_u16(), &alive["model_ready"]), (200, &json!(false)));
    let response = server.post("/predict").json(&small("early")).send().await.unwrap();
    assert!(response.headers().contains_key("retry-after"));
    refused(&answer(response).await, 503, "");
    go.send(()).unwrap();
    server.warm().await;
    assert_eq!(server.get_json("/health").await.0, 200);
    server.end().await.unwrap();
}

/// Every byte of the weights is counted once, up to all of them.
#[tokio::test]
async fn loading_tells_how_far_it_is() {
    let (tell, told) = std::sync::mpsc::channel();
    let opener = move |options: &flux2::OpenOptions, _: OnLoad<'_>| {
        flux2::open(options, &mut |done, total| tell.send((done, total)).unwrap())
    };
    let server = TestServer::begin(&[], Box::new(opener));
    server.warm().await;
    let told: Vec<(u64, u64)> = told.iter().collect();
    let (_, total) = told[0];
    assert_eq!((told[0].0, told[told.len() - 1]), (0, (total, total)));
    assert!(told.iter().all(|(_, all)| *all == total) && told.is_sorted(), "{told:?}");
    assert!(told.len() > 100, "each tensor is a step: {}", told.len());
    server.end().await.unwrap();
}

#[tokio::test]
async fn a_load_that_fails_ends_the_process_with_its_own_code() {
    let opener =
        |_: &flux2::OpenOptions, _: OnLoad<'_>| Err(flux2::Error::checkpoint("/nowhere", "is not there"));
    let error = TestServer::begin(&[], Box::new(opener)).ended().await.unwrap_err();
    assert_eq!(error.exit, Exit::Checkpoint);
    let panics = |_: &flux2::OpenOptions, _: OnLoad<'_>| panic!("scripted");
    let error = TestServer::begin(&[], Box::new(panics)).ended().await.unwrap_err();
    assert_eq!(error.exit, Exit::Device);
}

#[tokio::test]
async fn case_50_values_that_are_not_finite_are_500_with_the_stage_and_a_count() {
    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &[]).await;
    let (status, body) = server.post_json("/predict", &small("nan")).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (500, &json!("non_finite")));
    assert!(body["detail"].as_str().unwrap().contains("dit"), "{body}");
    let metrics = server.get("/metrics").send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("tt_media_server_failures_total{code=\"non_finite\"} 1"), "{metrics}");
    server.end().await.unwrap();
}

#[tokio::test]
async fn case_77_running_over_time_is_504_with_request_stage_and_limit() {
    let server = TestServer::scripted(Gate::closed(), Duration::ZERO, &["--execution-limit", "0.2"]).await;
    let request = server.post("/predict").header("x-request-id", "slow-one").json(&small("slow"));
    let message = refused(&answer(request.send().await.unwrap()).await, 504, "");
    for part in ["slow-one", "stage dit", "0.2 s"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(server.get_json("/health").await.0, 200, "the device answered: it is well");
    server.end().await.unwrap();
}

#[tokio::test]
async fn case_82_a_failure_stays_with_its_request() {
    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &[]).await;
    for (prompt, code) in [("panic", "panic"), ("nan", "non_finite"), ("hiccup", "device")] {
        let (status, body) = server.post_json("/predict", &small(prompt)).await;
        assert_eq!((status.as_u16(), &body["error"]["code"]), (500, &json!(code)), "{body}");
        assert_eq!(server.post_json("/predict", &small("well")).await.0, 200);
        assert_eq!(server.get_json("/health").await.0, 200);
    }
    server.end().await.unwrap();
}

#[tokio::test]
async fn case_82_a_dead_device_turns_readiness_red_and_ends_the_process() {
    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &[]).await;
    let (status, body) = server.post_json("/predict", &small("die")).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (500, &json!("device")));
    let app = server.app.clone();
    let error = server.ended().await.unwrap_err();
    assert_eq!(error.exit, Exit::Device);
    assert_eq!(app.life.phase().name(), "lost");
}

#[tokio::test]
async fn case_82_a_device_that_never_answers_is_given_up() {
    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &["--execution-limit", "0.2"]).await;
    let stalled = server.post("/predict").json(&small("stall")).send();
    let waiting = async {
        wait_until(|| server.app.queue.running().is_some()).await;
        server.post_json("/predict", &small("behind it")).await
    };
    let (stalled, waiting) = tokio::join!(stalled, waiting);
    refused(&answer(stalled.unwrap()).await, 504, "");
    assert!(refused(&waiting, 503, "").contains("device"));
    assert_eq!(server.ended().await.unwrap_err().exit, Exit::Device);
}

#[tokio::test]
async fn case_84_draining_finishes_the_running_picture_and_nothing_else() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &[]).await;
    let running = server.post("/predict").json(&small("running")).send();
    let rest = async {
        wait_until(|| server.app.queue.running().is_some()).await;
        let waiting = server.post("/predict").json(&small("waiting")).send();
        let drained = async {
            wait_until(|| server.app.queue.depth() == 1).await;
            server::serve::drain(&server.app);
            let (status, health) = server.get_json("/health").await;
            assert_eq!((status.as_u16(), &health["status"]), (503, &json!("draining")));
            refused(&server.post_json("/predict", &small("new")).await, 503, "");
            assert_eq!(server.get_json("/tt-liveness").await.0, 200);
        };
        let (waiting, ()) = tokio::join!(waiting, drained);
        let waiting = waiting.unwrap();
        assert!(waiting.headers().contains_key("retry-after"));
        refused(&answer(waiting).await, 503, "");
        gate.open();
    };
    let (running, ()) = tokio::join!(running, rest);
    assert_eq!(running.unwrap().status(), 200);
    server.ended().await.unwrap();
}

#[tokio::test]
async fn case_84_a_picture_over_the_drain_limit_is_stopped() {
    let server = TestServer::scripted(Gate::closed(), Duration::ZERO, &["--drain-limit", "0.3"]).await;
    let running = server.post("/predict").json(&small("endless")).send();
    let drain = async {
        wait_until(|| server.app.queue.running().is_some()).await;
        server::serve::drain(&server.app);
    };
    let (running, ()) = tokio::join!(running, drain);
    refused(&answer(running.unwrap()).await, 503, "");
    server.ended().await.unwrap();
}

/// A server process on the small checkpoint.
pub fn spawn(flags: &[&str], environment: &[(&str, &str)]) -> Child {
    let mut command = Command::new(BINARY);
    command
        .args(["serve", "--small-sizes", "--warm-up", "16", "--threads", "1", "--checkpoint", TINY])
        .args(flags);
    if !flags.contains(&"--port") {
        command.args(["--port", "0"]);
    }
    command.envs(environment.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the ready line; returns the server's address.
pub fn ready(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(
        line.contains("Application startup complete") && line.contains("\"event\": \"ready\""),
        "{line:?}"
    );
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    line["address"].as_str().unwrap().to_owned()
}

pub fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

/// Exit code and standard error of a process that ends within `limit`.
pub fn ended(mut child: Child, limit: Duration) -> (i32, String) {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > limit {
            child.kill().unwrap();
            panic!("the process did not end within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test]
async fn case_84_sigterm_during_a_picture_lets_it_finish_and_exits_0() {
    let mut child = spawn(&[], &[]);
    let url = ready(&mut child);
    let client = client();
    let running =
        client.post(format!("{url}/predict")).json(&json!({"prompt": "x", "width": 64, "height": 64})).send();
    let terminate = async {
        loop {
            let (_, list) = answer(client.get(format!("{url}/jobs")).send().await.unwrap()).await;
            if list["jobs"][0]["state"] == "running" {
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        signal(&child, "-TERM");
    };
    let (running, ()) = tokio::join!(running, terminate);
    assert_eq!(running.unwrap().status(), 200);
    let (code, log) = ended(child, Duration::from_secs(30));
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("draining"), "{log}");
}

#[tokio::test]
async fn case_84_a_second_signal_is_immediate() {
    let mut child = spawn(&["--drain-limit", "90"], &[]);
    let url = ready(&mut child);
    let request =
        client().post(format!("{url}/generate")).json(&json!({"prompt": "x", "width": 1024, "height": 1024}));
    let (status, accepted) = answer(request.send().await.unwrap()).await;
    assert_eq!(status, 202);
    let job = format!("{url}/jobs/{}", accepted["job_id"].as_str().unwrap());
    while answer(client().get(&job).send().await.unwrap()).await.1["state"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    signal(&child, "-TERM");
    std::thread::sleep(Duration::from_millis(100));
    signal(&child, "-TERM");
    assert_eq!(ended(child, Duration::from_secs(2)).0, Exit::Interrupted as i32);
}

#[test]
fn case_85_sigterm_at_any_moment_of_the_start_exits_0() {
    for delay in [80, 200, 400, 800] {
        let child = spawn(&[], &[]);
        std::thread::sleep(Duration::from_millis(delay));
        signal(&child, "-TERM");
        let output = ended(child, Duration::from_secs(10));
        assert!(output.0 == 0 || (output.0 == -1 && delay == 80), "after {delay} ms: {output:?}");
    }
}

#[tokio::test]
async fn a_process_killed_in_the_middle_of_a_picture_starts_clean() {
    let mut child = spawn(&[], &[]);
    let url = ready(&mut child);
    let port = url.rsplit(':').next().unwrap().to_owned();
    for prompt in ["running", "waiting"] {
        let request = client()
            .post(format!("{url}/generate"))
            .json(&json!({"prompt": prompt, "width": 1024, "height": 1024}));
        assert_eq!(answer(request.send().await.unwrap()).await.0, 202);
    }
    while answer(client().get(format!("{url}/jobs")).send().await.unwrap()).await.1["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .all(|job| job["state"] != "running")
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    signal(&child, "-KILL");
    child.wait().unwrap();

    let mut again = spawn(&["--port", &port], &[]);
    assert_eq!(ready(&mut again), url);
    assert_eq!(answer(client().get(format!("{url}/jobs")).send().await.unwrap()).await.1["jobs"], json!([]));
    let picture =
        client().post(format!("{url}/predict")).json(&json!({"prompt": "x", "width": 64, "height": 64}));
    assert_eq!(picture.send().await.unwrap().status(), 200);
    signal(&again, "-TERM");
    assert_eq!(ended(again, Duration::from_secs(30)).0, 0);
}

#[test]
fn what_cannot_start_says_why_in_one_sentence_within_two_seconds() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let half = tempfile::tempdir().unwrap();
    copy(TINY.as_ref(), half.path());
    let weights = half.path().join("transformer/diffusion_pytorch_model.safetensors");
    let length = std::fs::metadata(&weights).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(length / 2).unwrap();
    let half_path = half.path().to_str().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let not_a_directory = file.path().join("cache");
    let not_a_directory = not_a_directory.to_str().unwrap();
    #[allow(clippy::type_complexity)] // A table.
    let cases: [(&[&str], &[(&str, &str)], Exit, &str); 6] = [
        (&["--port", &port], &[], Exit::Address, &port),
        (&["--checkpoint", "/nowhere"], &[], Exit::Checkpoint, "/nowhere"),
        (&["--checkpoint", half_path], &[], Exit::Checkpoint, "diffusion_pytorch_model.safetensors"),
        (&[], &[("TT_DIT_CACHE_DIR", not_a_directory)], Exit::Storage, "TT_DIT_CACHE_DIR"),
        (&["--drain-limit", "0"], &[], Exit::Usage, "drain-limit"),
        (&["--api-key-file", "/nowhere/keys"], &[], Exit::Storage, "/nowhere/keys"),
    ];
    for (flags, environment, exit, part) in cases {
        let mut command = Command::new(BINARY);
        command.args(["serve", "--small-sizes", "--log", "off"]);
        if !flags.contains(&"--checkpoint") {
            command.args(["--checkpoint", TINY]);
        }
        if !flags.contains(&"--port") {
            command.args(["--port", "0"]);
        }
        command.args(flags).envs(environment.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
        let start = Instant::now();
        let (code, message) = ended(command.spawn().unwrap(), Duration::from_secs(10));
        assert_eq!(code, exit as i32, "{flags:?}: {message}");
        assert!(message.contains(part) && message.trim_end().lines().count() == 1, "{flags:?}: {message}");
        assert!(start.elapsed() < Duration::from_secs(2), "{flags:?} took {:?}", start.elapsed());
    }
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir_all(&target).unwrap();
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

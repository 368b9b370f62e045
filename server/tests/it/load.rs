// SPDX-License-Identifier: Apache-2.0
//! Mixed load and abuse over many connections against a real process: no wrong answer, none lost, no 5xx, no leak.
//!
//! `tests/load/run.sh` is the full run, against the release build: `FLUX2_LOAD_REQUESTS` says how many requests,
//! `FLUX2_LOAD_BINARY` which server.

use std::{
    collections::{BTreeMap, HashMap},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::StreamExt;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::support::{BINARY, TINY, answer, base64, client, client_for, png};

const CONNECTIONS: usize = 64;
/// Distinct pictures: each is made once in a serial run, to compare with.
const PICTURES: usize = 24;

/// A server in a process of its own, ended with the test.
struct Process {
    child: Child,
    url: String,
    address: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    async fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let binary = std::env::var("FLUX2_LOAD_BINARY").unwrap_or_else(|_| BINARY.into());
        let child = Command::new(binary)
            .args([
                "serve",
                "--checkpoint",
                TINY,
                "--small-sizes",
                "--warm-up",
                "16",
                "--log",
                "off",
                "--threads",
                "1",
            ])
            .args(["--port", &port.to_string(), "--queue-size", "100", "--queue-per-client", "100"])
            .args(["--max-wait", "100000", "--job-count", "50", "--body-limit", "5"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let address = format!("127.0.0.1:{port}");
        let process = Self { child, url: format!("http://{address}"), address };
        let start = Instant::now();
        while !matches!(client().get(format!("{}/health", process.url)).send().await, Ok(answer) if answer.status() == 200)
        {
            assert!(start.elapsed() < Duration::from_mins(2));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        process
    }

    /// Resident memory in MiB.
    fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
}

/// Request number `index` of the pictures: sizes, seeds and references, repeated and new.
fn picture_request(index: usize) -> Value {
    let sizes = [(16, 16), (32, 16), (16, 32), (24, 24)];
    let (width, height) = sizes[index % sizes.len()];
    let mut request =
        json!({"prompt": format!("picture {index}"), "width": width, "height": height, "seed": index * 31});
    if index.is_multiple_of(3) {
        let reference = |colour: usize| base64(&png(64, 64, [(colour * 40) as u8, 90, 200]));
        request["images"] =
            json!((0..=index % 2).map(|extra| reference(index % 6 + extra)).collect::<Vec<_>>());
    }
    request
}

/// What went through, by kind, and everything that was wrong.
#[derive(Default)]
struct Tally {
    kinds: Mutex<BTreeMap<&'static str, usize>>,
    wrong: Mutex<Vec<String>>,
}

impl Tally {
    fn count(&self, kind: &'static str) {
        *self.kinds.lock().unwrap().entry(kind).or_default() += 1;
    }

    fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.wrong.lock().unwrap().push(what());
        }
    }
}

struct Load {
    client: Client,
    process: Process,
    wanted: HashMap<usize, Value>,
    tally: Tally,
}

impl Load {
    /// Sends until it is not 429; nothing may be lost.
    async fn post(&self, path: &str, body: &Value, key: Option<&str>) -> (u16, Value) {
        loop {
            let mut request = self.client.post(format!("{}{path}", self.process.url)).json(body);
            if let Some(key) = key {
                request = request.header("idempotency-key", key);
            }
            let response = request.send().await.unwrap_or_else(|error| panic!("{path}: lost: {error}"));
            if response.status() == 429 {
                self.tally.count("told to wait (429)");
                self.tally.check(response.headers().contains_key("retry-after"), || {
                    "429 without Retry-After".into()
                });
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
            let (status, body) = answer(response).await;
            return (status.as_u16(), body);
        }
    }

    async fn one(&self, number: usize) {
        let picture = number * 7 % PICTURES;
        match number % 20 {
            0 | 1 => {
                self.tally.count("picture");
                let (status, body) = self.post("/predict", &picture_request(picture), None).await;
                self.tally.check(status == 200 && body["image"] == self.wanted[&picture], || {
                    format!(
                        "picture {picture}: {status} {}",
                        &body.to_string()[..200.min(body.to_string().len())]
                    )
                });
            }
            2 => self.repeat(number, picture).await,
            3 => self.job(picture).await,
            4 => self.cancelled_job().await,
            5 => self.disconnect(picture).await,
            6 => self.stalled_reader(picture).await,
            7 => self.slow_body().await,
            8..=16 => self.invalid(number).await,
            _ => {
                self.tally.count("question");
                let path =
                    ["/health", "/info", "/jobs", "/metrics", "/v1/models", "/", "/openapi.json"][number % 7];
                let response = self.client.get(format!("{}{path}", self.process.url)).send().await;
                let status = response.map(|response| response.status().as_u16());
                self.tally.check(matches!(status, Ok(200)), || format!("{path}: {status:?}"));
            }
        }
    }

    async fn repeat(&self, number: usize, picture: usize) {
        self.tally.count("idempotent repeat");
        let (key, request) = (format!("key {number}"), picture_request(picture));
        let both = tokio::join!(
            self.post("/predict", &request, Some(&key)),
            self.post("/predict", &request, Some(&key))
        );
        for (status, body) in [both.0, both.1] {
            self.tally.check(status == 200 && body["image"] == self.wanted[&picture], || {
                format!("repeat: {status}")
            });
        }
    }

    async fn job(&self, picture: usize) {
        self.tally.count("job with events");
        let (status, accepted) = self.post("/generate", &picture_request(picture), None).await;
        self.tally.check(status == 202, || format!("generate: {status} {accepted}"));
        let id = accepted["job_id"].as_str().unwrap_or_default();
        let events = self.client.get(format!("{}/jobs/{id}/events", self.process.url)).send().await.unwrap();
        let text = events.text().await.unwrap();
        self.tally.check(text.contains("event: done"), || format!("events: {text}"));
        let image = self.client.get(format!("{}/jobs/{id}/image", self.process.url)).send().await.unwrap();
        let status = image.status().as_u16();
        // With many jobs it may have been reaped by count meanwhile.
        let same = image.bytes().await.is_ok_and(|file| base64(&file) == self.wanted[&picture]);
        self.tally.check(status == 410 || (status == 200 && same), || format!("job image: {status}"));
    }

    async fn cancelled_job(&self) {
        self.tally.count("cancelled job");
        let (_, accepted) =
            self.post("/generate", &json!({"prompt": "cancel", "width": 32, "height": 32}), None).await;
        let id = accepted["job_id"].as_str().unwrap_or_default();
        let (status, view) = self.post(&format!("/jobs/{id}/cancel"), &json!({}), None).await;
        self.tally.check([200, 409, 410].contains(&status), || format!("cancel: {status} {view}"));
    }

    async fn send_raw(&self, picture: usize, path: &str, extra: &Value) -> TcpStream {
        let mut body = picture_request(picture);
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        let body = body.to_string();
        let mut socket = TcpStream::connect(&self.process.address).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all((head + &body).as_bytes()).await.unwrap();
        socket
    }

    async fn disconnect(&self, picture: usize) {
        self.tally.count("disconnect");
        let socket = self.send_raw(picture, "/predict", &json!({})).await;
        tokio::time::sleep(Duration::from_millis((picture * 13 % 200) as u64)).await;
        drop(socket);
    }

    /// Reads a little of a stream, then nothing for a while, then leaves.
    async fn stalled_reader(&self, picture: usize) {
        self.tally.count("stalled reader");
        let mut socket = self.send_raw(picture, "/predict", &json!({})).await;
        let mut little = [0; 16];
        let _ = tokio::time::timeout(Duration::from_secs(2), socket.read(&mut little)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }

    async fn slow_body(&self) {
        self.tally.count("slow body");
        let mut socket = TcpStream::connect(&self.process.address).await.unwrap();
        let head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n";
        for byte in head.bytes().step_by(1).take(30) {
            let _ = socket.write_all(&[byte]).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    async fn invalid(&self, number: usize) {
        self.tally.count("invalid");
        let bad = "!".repeat(100);
        let cases = [
            (json!({"prompt": ""}), 422),
            (json!({"prompt": "x", "width": 7}), 422),
            (json!({"prompt": "x", "seed": -1}), 422),
            (json!({"prompt": "x", "seeed": 1}), 422),
            (json!({"prompt": "x", "images": [bad]}), 422),
            (json!({"prompt": "x", "images": [base64(b"BM this is no picture that is taken")]}), 422),
            (json!({"prompt": "x", "num_steps": 50}), 422),
            (json!([1, 2, 3]), 422),
        ];
        let (body, wanted) = &cases[number / 20 % cases.len()];
        let (status, body) = self.post("/predict", body, None).await;
        self.tally
            .check(status == *wanted && body["detail"].is_string(), || format!("invalid: {status} {body}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_and_abuse_give_no_wrong_answer_and_leak_nothing() {
    let requests: usize = std::env::var("FLUX2_LOAD_REQUESTS").map_or(600, |count| count.parse().unwrap());
    let process = Process::start().await;
    let client = client_for(Duration::from_mins(10));
    let mut load = Load { client, process, wanted: HashMap::new(), tally: Tally::default() };
    let descriptors = load.process.descriptors();
    for index in 0..PICTURES {
        let (status, body) = load.post("/predict", &picture_request(index), None).await;
        assert_eq!(status, 200, "{body}");
        load.wanted.insert(index, body["image"].clone());
    }
    let (load, next) = (Arc::new(load), Arc::new(AtomicUsize::new(0)));
    let start = Instant::now();
    let mut memory = Vec::new();
    // The first tenth is the warm-up after which memory stands still.
    for (part, share) in [(requests / 10, "warm-up"), (requests, "load")] {
        let workers = (0..CONNECTIONS).map(|_| {
            let (load, next) = (load.clone(), next.clone());
            tokio::spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= part {
                        break;
                    }
                    load.one(number).await;
                }
            })
        });
        let mut running: futures_util::stream::FuturesUnordered<_> = workers.collect();
        while let Some(ended) = running.next().await {
            ended.unwrap();
        }
        next.store(part, Ordering::Relaxed);
        memory.push(load.process.memory());
        println!(
            "{share}: {part} requests, {:.0} s, {:.0} MiB",
            start.elapsed().as_secs_f64(),
            memory[memory.len() - 1]
        );
    }
    for (kind, count) in load.tally.kinds.lock().unwrap().iter() {
        println!("{count:6} {kind}");
    }
    let wrong = std::mem::take(&mut *load.tally.wrong.lock().unwrap());
    assert!(wrong.is_empty(), "{} wrong, the first: {}", wrong.len(), wrong[0]);
    let metrics = client_text(&load, "/metrics").await;
    let server_errors = metrics
        .lines()
        .filter(|line| line.starts_with("tt_media_server_requests_total") && line.contains("status=\"5"));
    // Readiness was asked for while loading, and rightly said no.
    let server_errors = server_errors.filter(|line| !line.contains("route=\"/health\""));
    assert_eq!(server_errors.collect::<Vec<_>>(), [""; 0]);
    let growth = memory[1] / memory[0] - 1.0;
    println!("memory after warm-up: {:+.1} %", growth * 100.0);
    // A short run has not settled; the full one is held to ±5 %.
    assert!(
        growth.abs() < if requests >= 10_000 { 0.05 } else { 0.5 },
        "memory grew by {:.1} %",
        growth * 100.0
    );
    let Ok(load) = Arc::try_unwrap(load).map_err(|_| ()) else { panic!("all workers have ended") };
    let Load { client, process, .. } = load;
    drop(client);
    let settle = Instant::now();
    while process.descriptors() > descriptors {
        let (now, limit) = (process.descriptors(), Duration::from_secs(20));
        assert!(settle.elapsed() < limit, "{now} descriptors are open, {descriptors} were at the start");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn client_text(load: &Load, path: &str) -> String {
    load.client.get(format!("{}{path}", load.process.url)).send().await.unwrap().text().await.unwrap()
}

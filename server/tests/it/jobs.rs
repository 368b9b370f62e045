// SPDX-License-Identifier: Apache-2.0
//! The job API: states, events, cancelling, reaping.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    scripted::Gate,
    support::{TestServer, answer, picture, refused, shared, small, with},
};

/// Events of a stream as name, id and data.
pub fn parse_events(text: &str) -> Vec<(String, Option<usize>, Value)> {
    let blocks = text.split("\n\n").filter(|block| !block.trim().is_empty() && !block.starts_with(':'));
    let parse = |block: &str| {
        let field = |name: &str| {
            block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim_start)
        };
        let data = serde_json::from_str(field("data").unwrap_or("null")).unwrap();
        (field("event").unwrap_or_default().to_owned(), field("id").map(|id| id.parse().unwrap()), data)
    };
    blocks.map(parse).collect()
}

async fn events(server: &TestServer, job: &str, after: Option<usize>) -> Vec<(String, Option<usize>, Value)> {
    let mut request = server.get(&format!("/jobs/{job}/events"));
    if let Some(id) = after {
        request = request.header("last-event-id", id.to_string());
    }
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    parse_events(&response.text().await.unwrap())
}

#[tokio::test]
async fn a_job_goes_from_queued_to_done_and_its_picture_is_predicts() {
    let server = shared();
    let request = with(small("a job"), &json!({"seed": 11}));
    let response = server.post("/generate").json(&request).send().await.unwrap();
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let (status, accepted) = answer(response).await;
    assert_eq!(status, 202);
    let job = accepted["job_id"].as_str().unwrap();
    assert_eq!(location, format!("/jobs/{job}"));
    let view = server.wait_for(job, &["done"]).await;
    assert_eq!((&view["job_id"], &view["status"], &view["step"]), (&json!(job), &json!("done"), &json!(4)));
    assert_eq!(view["parameters"]["seed"], 11);
    assert!(view["timing_ms"]["dit_s"].as_f64().unwrap() > 0.0);
    assert!(view["finished_at"].as_f64() >= view["started_at"].as_f64());
    let image = server.get(&format!("/jobs/{job}/image")).send().await.unwrap();
    assert_eq!(image.headers()["content-type"], "image/png");
    let file = image.bytes().await.unwrap();
    let (_, predicted) = server.post_json("/predict", &request).await;
    assert_eq!(image::load_from_memory(&file).unwrap().into_rgb8(), picture(&predicted));
    let (_, list) = server.get_json("/jobs").await;
    assert!(list["jobs"].as_array().unwrap().iter().any(|listed| listed["id"] == job));
}

#[tokio::test]
async fn events_tell_each_step_and_replay_what_was_missed() {
    let server = shared();
    let job = server.generate(&with(small("events"), &json!({"previews": 3}))).await;
    let live = events(&server, &job, None).await;
    let names: Vec<&str> =
        live.iter().map(|(name, ..)| name.as_str()).filter(|name| *name != "queued").collect();
    assert_eq!(names.first(), Some(&"started"));
    assert_eq!(names.last(), Some(&"done"));
    assert_eq!(names.iter().filter(|name| **name == "step").count(), 4);
    let previews: Vec<&Value> =
        live.iter().filter(|(name, ..)| name == "preview").map(|(.., data)| data).collect();
    assert_eq!(previews.iter().map(|data| data["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    // A preview is the model's estimate: a picture of the final size, and not the final one.
    let preview = picture(&json!({"image": previews[0]["b64_json"]}));
    assert_eq!(preview.dimensions(), (32, 32));
    let (_, done) = server.get_json(&format!("/jobs/{job}")).await;
    assert_eq!(live.last().unwrap().2["id"], done["id"]);

    let kept: Vec<_> = live.into_iter().filter(|(name, ..)| name != "queued").collect();
    assert_eq!(events(&server, &job, None).await, kept, "the whole life can be read again");
    assert_eq!(events(&server, &job, Some(1)).await, kept[2..], "and from any event on");
    assert_eq!(events(&server, &job, Some(999)).await, []);
}

#[tokio::test]
async fn waiting_jobs_tell_their_position_as_it_changes() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &[]).await;
    let mut jobs = Vec::new();
    for index in 0..3 {
        jobs.push(server.generate(&small(&format!("job {index}"))).await);
    }
    let (_, last) = server.get_json(&format!("/jobs/{}", jobs[2])).await;
    assert_eq!((&last["state"], &last["position"]), (&json!("queued"), &json!(1)));
    assert!(last["estimated_wait_s"].is_number(), "the warm-up was measured");
    let following = tokio::spawn({
        let request = server.get(&format!("/jobs/{}/events", jobs[2]));
        async move { parse_events(&request.send().await.unwrap().text().await.unwrap()) }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    gate.open();
    let followed = following.await.unwrap();
    let positions: Vec<u64> = followed
        .iter()
        .filter(|(name, ..)| name == "queued")
        .map(|(.., data)| data["position"].as_u64().unwrap())
        .collect();
    assert!(positions.starts_with(&[1]) && positions.is_sorted_by(|a, b| a > b), "{positions:?}");
    server.end().await.unwrap();
}

/// A synchronous call goes with its client; a job stays.
#[tokio::test]
async fn case_73_a_disconnect_cancels_predict_and_not_generate() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &[]).await;
    let running = hang_up_after_sending(&server, "/predict", "leaves while running").await;
    let job = server.generate(&small("stays")).await;
    let waiting = hang_up_after_sending(&server, "/predict", "leaves while waiting").await;
    drop(waiting);
    wait_until(|| server.app.queue.depth() == 1).await;
    drop(running);
    wait_until(|| server.app.queue.running().is_some_and(|(running, _)| running.id == job)).await;
    gate.open();
    server.wait_for(&job, &["done"]).await;
    let (_, list) = server.get_json("/jobs").await;
    assert_eq!(list["jobs"].as_array().unwrap().len(), 1, "what nobody can ask for is forgotten: {list}");
    server.end().await.unwrap();
}

/// Sends a request on a raw socket and returns the open socket once the job is known.
async fn hang_up_after_sending(server: &TestServer, path: &str, prompt: &str) -> tokio::net::TcpStream {
    let known = server.app.queue.all().len();
    let body = small(prompt).to_string();
    let mut socket = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    wait_until(|| server.app.queue.all().len() > known).await;
    let mut nothing = [0; 1];
    let quiet = tokio::time::timeout(Duration::from_millis(20), socket.read(&mut nothing)).await;
    assert!(quiet.is_err(), "no answer yet");
    socket
}

pub async fn wait_until(done: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited too long");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Clients and proxies give up on a silent connection at about a minute: streams speak while nothing happens, and how long
/// it will take can be known before.
#[tokio::test]
async fn case_78_streams_are_kept_alive_and_the_time_is_told() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &["--keep-alive", "0.05"]).await;
    let (_, info) = server.get_json("/info").await;
    assert!(info["estimated_run_s"].is_number() && info["estimated_wait_s"].is_number(), "{info}");
    let job = server.generate(&small("a long one")).await;
    let stream = json!({"prompt": "behind it", "size": "32x32", "stream": true});
    for request in
        [server.get(&format!("/jobs/{job}/events")), server.post("/v1/images/generations").json(&stream)]
    {
        let mut response = request.send().await.unwrap();
        let mut text = String::new();
        while text.matches("\n:\n\n").count() < 3 && !text.starts_with(":\n\n:\n\n:\n\n") {
            text += std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap();
        }
        assert!(!text.contains("event: step") && !text.contains("completed"), "still waiting: {text}");
    }
    let stream = server.post("/v1/images/generations").json(&stream).send().await.unwrap();
    gate.open();
    assert!(stream.text().await.unwrap().contains("image_generation.completed"));
    server.end().await.unwrap();
}

#[tokio::test]
async fn case_74_cancel_works_in_every_state() {
    let gate = Gate::closed();
    let flags = ["--job-ttl", "1.5"];
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &flags).await;
    let running = server.generate(&small("running")).await;
    wait_until(|| server.app.queue.running().is_some()).await;
    let waiting = server.generate(&small("waiting")).await;
    let cancel = async |job: &str| server.post_json(&format!("/jobs/{job}/cancel"), &json!({})).await;
    for job in [&waiting, &running] {
        let (status, view) = cancel(job).await;
        assert_eq!((status.as_u16(), &view["state"]), (200, &json!("cancelled")), "{view}");
    }
    assert_eq!(server.app.queue.depth(), 0);
    gate.open();
    let done = server.generate(&small("done")).await;
    server.wait_for(&done, &["done"]).await;
    for job in [&waiting, &running, &done] {
        refused(&cancel(job).await, 409, "id");
    }
    refused(&cancel("0123").await, 404, "id");
    wait_until(|| server.app.queue.all().is_empty()).await;
    for job in [&waiting, &done] {
        refused(&cancel(job).await, 410, "id");
        refused(&server.get_json(&format!("/jobs/{job}/image")).await, 410, "id");
    }
    server.end().await.unwrap();
}

#[tokio::test]
async fn a_picture_is_409_while_there_is_none() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &[]).await;
    let job = server.generate(&small("nan")).await;
    let path = format!("/jobs/{job}/image");
    refused(&server.get_json(&path).await, 409, "id");
    gate.open();
    let view = server.wait_for(&job, &["error"]).await;
    assert_eq!(view["error"]["code"], "non_finite");
    assert!(refused(&server.get_json(&path).await, 409, "id").contains("not finite"));
    server.end().await.unwrap();
}

#[tokio::test]
async fn ended_jobs_are_reaped_by_count_and_memory_oldest_first() {
    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &["--job-count", "2"]).await;
    let mut jobs = Vec::new();
    for index in 0..4 {
        let job = server.generate(&small(&format!("{index}"))).await;
        server.wait_for(&job, &["done"]).await;
        jobs.push(job);
    }
    wait_until(|| server.app.queue.all().len() == 2).await;
    let left: Vec<String> = server.app.queue.all().iter().map(|job| job.id.clone()).collect();
    assert_eq!(left, jobs[2..]);
    server.end().await.unwrap();

    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &["--job-memory", "1"]).await;
    let large = json!({"prompt": "noise", "width": 512, "height": 512});
    for _ in 0..3 {
        let job = server.generate(&large).await;
        server.wait_for(&job, &["done", "error"]).await;
    }
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let held: usize = server.app.queue.all().iter().map(|job| job.memory()).sum();
    assert!(held <= 1 << 20, "{held}");
    server.end().await.unwrap();
}

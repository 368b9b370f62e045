// SPDX-License-Identifier: Apache-2.0
//! Room, waiting, turns, and idempotency.

use std::{collections::HashSet, time::Duration};

use serde_json::json;

use crate::{
    jobs::wait_until,
    scripted::Gate,
    support::{TestServer, answer, picture, refused, small, with},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_54_each_of_64_concurrent_requests_gets_its_own_answer() {
    let flags = ["--queue-size", "64", "--queue-per-client", "64"];
    let server = TestServer::scripted(Gate::opened(), Duration::from_millis(1), &flags).await;
    let calls = (0..64_u64).map(|index| {
        let request = with(small(&format!("prompt {index}")), &json!({"seed": index * 7}));
        let call = server.post("/predict").json(&request).send();
        async move { (index, answer(call.await.unwrap()).await) }
    });
    for (index, (status, body)) in futures_util::future::join_all(calls).await {
        assert_eq!(status, 200, "{body}");
        let mut wanted = flux2::Request::new(format!("prompt {index}"));
        (wanted.width, wanted.height, wanted.seed) = (32, 32, index * 7);
        assert_eq!(body["seed"], index * 7);
        assert_eq!(picture(&body), crate::scripted::picture(&wanted));
    }
    server.end().await.unwrap();
}

#[tokio::test]
async fn case_76_a_full_queue_and_a_long_wait_are_429_with_the_time() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &["--queue-size", "2"]).await;
    for _ in 0..3 {
        server.generate(&small("fills")).await;
        wait_until(|| server.app.queue.running().is_some()).await;
    }
    let response = server.post("/predict").json(&small("one too many")).send().await.unwrap();
    let retry: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!(retry >= 1);
    let message = refused(&answer(response).await, 429, "");
    assert!(message.contains("2 of 2"), "{message}");
    gate.open();
    server.end().await.unwrap();

    // The warm-up of 16 × 16 took its steps; a picture of 1920 × 1088 is some thousand times that.
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &["--max-wait", "5"]).await;
    let mut square = flux2::Request::new("");
    (square.width, square.height) = (64, 64);
    server.app.queue.measured(server.app.work(&square), 10.0);
    let sized = |side: u64| json!({"prompt": "x", "width": side, "height": side});
    server.generate(&sized(64)).await;
    let response = server.post("/generate").json(&sized(64)).send().await.unwrap();
    let retry: f64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((3.0..=5.0).contains(&retry), "10 s of work ahead, 5 s allowed: {retry}");
    assert!(refused(&answer(response).await, 429, "").contains("estimated wait"));
    gate.open();
    server.end().await.unwrap();
}

#[tokio::test]
async fn case_76_the_time_limit_counts_from_the_start_of_execution() {
    let server =
        TestServer::scripted(Gate::opened(), Duration::from_millis(60), &["--execution-limit", "0.6"]).await;
    let calls = (0..6).map(|index| server.post("/predict").json(&small(&format!("{index}"))).send());
    for response in futures_util::future::join_all(calls).await {
        assert_eq!(response.unwrap().status(), 200, "the last one waits longer than the limit and is well");
    }
    server.end().await.unwrap();
}

#[tokio::test]
async fn one_client_cannot_starve_another() {
    let gate = Gate::closed();
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "# keys\nhog:hog-key-123\nguest:guest-key-123\n").unwrap();
    let file = keys.path().to_str().unwrap();
    let flags = ["--api-key-file", file, "--queue-size", "20", "--queue-per-client", "15"];
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &flags).await;
    let send = async |key: &str, index: usize| {
        let request = server.post("/generate").bearer_auth(key).json(&small(&format!("{key} {index}")));
        answer(request.send().await.unwrap()).await
    };
    let mut hog = Vec::new();
    for index in 0..16 {
        hog.push(send("hog-key-123", index).await);
        wait_until(|| server.app.queue.running().is_some()).await;
    }
    assert!(hog.iter().all(|(status, _)| *status == 202));
    let message = refused(&send("hog-key-123", 99).await, 429, "");
    assert!(message.contains("of this client"), "{message}");
    let (status, guest) = send("guest-key-123", 0).await;
    assert_eq!(
        (status.as_u16(), &guest["position"]),
        (202, &json!(1)),
        "its turn comes after one of the other's"
    );
    // And nobody sees the other's jobs.
    let id = guest["job_id"].as_str().unwrap();
    let foreign = server.get(&format!("/jobs/{id}")).bearer_auth("hog-key-123").send().await.unwrap();
    assert_eq!(foreign.status(), 404);
    let own = server.get("/jobs").bearer_auth("guest-key-123").send().await.unwrap();
    assert_eq!(answer(own).await.1["jobs"].as_array().unwrap().len(), 1);
    gate.open();
    server.end().await.unwrap();
}

#[tokio::test]
async fn an_idempotency_key_attaches_to_the_same_job() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &[]).await;
    let send = async |path: &str, key: &str, body: &serde_json::Value| {
        answer(server.post(path).header("idempotency-key", key).json(body).send().await.unwrap()).await
    };
    let request = with(small("once"), &json!({"seed": 1}));
    let (_, first) = send("/generate", "k1", &request).await;
    let (_, again) = send("/generate", "k1", &request).await;
    assert_eq!(first["job_id"], again["job_id"]);
    let conflict = send("/generate", "k1", &with(request.clone(), &json!({"seed": 2}))).await;
    assert!(refused(&conflict, 422, "Idempotency-Key").contains("k1"));
    let conflict = send("/predict", "k1", &request).await;
    refused(&conflict, 422, "Idempotency-Key");
    let both = async { tokio::join!(send("/predict", "k2", &request), send("/predict", "k2", &request)) };
    let opener = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        gate.open();
    };
    let (((_, one), (_, two)), ()) = tokio::join!(both, opener);
    assert_eq!(one["image"], two["image"]);
    let (_, late) = send("/predict", "k2", &request).await;
    assert_eq!(late["image"], one["image"]);
    assert_eq!(gate.begun.load(std::sync::atomic::Ordering::SeqCst), 2, "one run for k1, one for k2");
    // An omitted seed is drawn once.
    let random = json!({"prompt": "r", "size": "32x32"});
    let (_, a) = send("/v1/images/generations", "k3", &random).await;
    let (_, b) = send("/v1/images/generations", "k3", &random).await;
    assert_eq!(a["data"][0]["seed"], b["data"][0]["seed"]);
    // A failed run is not kept: the retry runs again.
    let (status, _) = send("/predict", "k4", &small("nan")).await;
    assert_eq!(status, 500);
    let (status, _) = send("/predict", "k4", &small("now well")).await;
    assert_eq!(status, 200);
    server.end().await.unwrap();
}

#[tokio::test]
async fn n_pictures_count_their_seeds_up() {
    let server = TestServer::scripted(Gate::opened(), Duration::ZERO, &[]).await;
    let request = json!({"prompt": "n", "size": "32x32", "seed": 5, "n": 3});
    let (status, body) = server.post_json("/v1/images/generations", &request).await;
    assert_eq!(status, 200, "{body}");
    let seeds: Vec<u64> =
        body["data"].as_array().unwrap().iter().map(|data| data["seed"].as_u64().unwrap()).collect();
    assert_eq!(seeds, [5, 6, 7]);
    let mut by_seed = HashSet::new();
    for data in body["data"].as_array().unwrap() {
        by_seed.insert(data["b64_json"].as_str().unwrap().to_owned());
    }
    assert_eq!(by_seed.len(), 3);
    let over = server.post_json("/v1/images/generations", &with(request, &json!({"n": 11}))).await;
    refused(&over, 422, "n");
    server.end().await.unwrap();
}

// SPDX-License-Identifier: Apache-2.0
//! Keys, origins, slow clients, broken requests, counters and the description.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    scripted::Gate,
    support::{TestServer, answer, refused, shared, small},
};

async fn fast(flags: &[&str]) -> TestServer {
    TestServer::scripted(Gate::opened(), Duration::ZERO, flags).await
}

#[tokio::test]
async fn with_a_key_everything_but_probes_and_pages_needs_it() {
    let server = fast(&["--api-key", "secret-key"]).await;
    for path in ["/health", "/tt-liveness", "/", "/docs", "/openapi.json"] {
        assert_eq!(server.get(path).send().await.unwrap().status(), 200, "{path}");
    }
    for path in ["/info", "/jobs", "/jobs/x", "/metrics", "/v1/models", "/nowhere"] {
        let response = server.get(path).send().await.unwrap();
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        refused(&answer(response).await, 401, "");
    }
    for header in ["secret-key", "Basic secret-key", "Bearer", "Bearer secret-keyy", "Bearer secret-ke"] {
        let response = server.get("/info").header("authorization", header).send().await.unwrap();
        assert_eq!(response.status(), 401, "{header}");
    }
    let with_key = server.post("/predict").bearer_auth("secret-key").json(&small("x")).send().await.unwrap();
    assert_eq!(with_key.status(), 200);
    server.end().await.unwrap();
}

#[tokio::test]
async fn origins_are_closed_unless_listed() {
    let server = fast(&[]).await;
    let response = server.get("/health").header("origin", "https://a.example").send().await.unwrap();
    assert!(!response.headers().contains_key("access-control-allow-origin"));
    server.end().await.unwrap();
    let server =
        fast(&["--cors-origins", "https://a.example,https://b.example", "--api-key", "secret-key"]).await;
    for (origin, allowed) in [("https://a.example", true), ("https://c.example", false)] {
        let preflight = server
            .client
            .request(reqwest::Method::OPTIONS, format!("{}/predict", server.url))
            .header("origin", origin)
            .header("access-control-request-method", "POST");
        let response = preflight.send().await.unwrap();
        assert_eq!(response.headers().get("access-control-allow-origin").is_some(), allowed, "{origin}");
    }
    server.end().await.unwrap();
}

/// Sends raw bytes, then reads until the server closes.
async fn raw(server: &TestServer, bytes: &[u8]) -> String {
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    socket.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(20), socket.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn slow_clients_are_given_up() {
    let server = fast(&["--header-limit", "0.3", "--body-limit", "0.3"]).await;
    let start = std::time::Instant::now();
    raw(&server, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ").await;
    let head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{";
    let answer = raw(&server, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("0 s"), "{answer}");
    assert!(start.elapsed() < Duration::from_secs(10));
    server.end().await.unwrap();
}

#[tokio::test]
async fn broken_requests_end_their_connection_alone() {
    let server = fast(&[]).await;
    let long = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "X-H: 1\r\n".repeat(500));
    for bytes in [
        &b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"[..],
        b"GET\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        long.as_bytes(),
        many.as_bytes(),
    ] {
        let answer = raw(&server, bytes).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let cut = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"prompt\"";
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    socket.write_all(cut).await.unwrap();
    drop(socket);
    assert_eq!(server.get_json("/health").await.0, 200);
    server.end().await.unwrap();
}

#[tokio::test]
async fn counters_follow_the_requests() {
    let server = fast(&[]).await;
    server.post_json("/predict", &small("counted")).await;
    server.post_json("/predict", &json!({})).await;
    let response = server.get("/metrics").send().await.unwrap();
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    let text = response.text().await.unwrap();
    for line in [
        "tt_media_server_requests_total{method=\"POST\",route=\"/predict\",status=\"200\"} 1",
        "tt_media_server_requests_total{method=\"POST\",route=\"/predict\",status=\"422\"} 1",
        "tt_media_server_request_duration_seconds_bucket{le=\"1200.0\",route=\"/predict\"} 2",
        "tt_media_server_rejections_total{code=\"invalid_value\"} 1",
        "tt_media_server_images_total 1",
        "tt_media_server_jobs_in_progress 0",
        "tt_media_server_queue_size 0",
        "tt_media_server_queue_wait_seconds_count 1",
        "tt_media_server_image_denoise_step_duration_seconds_count 4",
        "tt_media_server_model_load_total{status=\"success\"} 1",
        "tt_media_server_device_warmup_duration_seconds",
        "tt_media_server_device_memory_bytes",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    server.end().await.unwrap();
}

/// `UPDATE_OPENAPI=1 cargo test -p server --test it openapi` writes the file anew.
#[tokio::test]
async fn case_80_the_committed_openapi_is_what_klein_serves() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
    let document = server::openapi::document(&flux2::request::Limits::KLEIN);
    let text = serde_json::to_string_pretty(&document).unwrap() + "\n";
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), text, "see this test's comment");
    let served: Value = shared().get_json("/openapi.json").await.1;
    let width = &served["components"]["schemas"]["PredictRequest"]["properties"]["width"];
    assert_eq!(
        (&width["minimum"], &width["maximum"], &width["multipleOf"]),
        (&json!(16), &json!(1920), &json!(8))
    );
    let paths: Vec<&String> = served["paths"].as_object().unwrap().keys().collect();
    assert_eq!(paths.len(), 17, "{paths:?}");
}

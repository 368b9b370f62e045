// SPDX-License-Identifier: Apache-2.0
//! Spans as a collector receives them: protobuf over HTTP, decoded with OpenTelemetry's own messages.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use axum::{Router, body::Bytes, http::StatusCode, routing::post};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message;
use serde_json::json;

use crate::{
    scripted::Gate,
    support::{TestServer, small, with},
};

/// What a collector got: the attributes of the resource, and the spans.
type Received = Arc<Mutex<(HashMap<String, String>, Vec<Span>)>>;

/// A collector that keeps what it gets; its address.
async fn collector() -> (String, Received) {
    let received = Received::default();
    let kept = received.clone();
    let traces = move |body: Bytes| async move {
        let request = ExportTraceServiceRequest::decode(body).unwrap();
        let mut kept = kept.lock().unwrap();
        for resource_spans in request.resource_spans {
            kept.0 = attributes(&resource_spans.resource.unwrap().attributes);
            kept.1.extend(resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
        StatusCode::OK
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/traces", post(traces));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, received)
}

fn attributes(list: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &KeyValue| match value.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{other:?}"),
    };
    list.iter().map(|value| (value.key.clone(), text(value))).collect()
}

#[tokio::test]
async fn spans_of_a_request_reach_a_collector_in_the_callers_trace() {
    let (endpoint, received) = collector().await;
    let server = TestServer::real(&["--otlp-endpoint", &endpoint]).await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let request = server
        .post("/predict")
        .header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"))
        .header("x-request-id", "r-7")
        .json(&with(small("a private thing"), &json!({"seed": 9_007_199_254_740_991_u64})));
    assert_eq!(request.send().await.unwrap().status(), 200);
    // Asked not to be recorded by its caller, who decides that for the whole trace.
    let request = server.get("/info").header("traceparent", format!("00-{trace}-00f067aa0ba902b7-00"));
    assert_eq!(request.send().await.unwrap().status(), 200);
    server.end().await.unwrap();

    let (resource, spans) = &*received.lock().unwrap();
    assert_eq!(resource["service.name"], "flux2-server");
    assert!(!format!("{spans:?}").contains("private"), "prompts are not exported");
    let [request, queue, picture] = ["POST /predict", "queue", "picture"].map(|name| {
        spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:?}"))
    });
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert!(spans.iter().all(|span| hex(&span.trace_id) == trace), "{spans:?}");
    assert_eq!(hex(&request.parent_span_id), "00f067aa0ba902b7");
    assert_eq!((&queue.parent_span_id, &picture.parent_span_id), (&request.span_id, &request.span_id));
    let told = attributes(&request.attributes);
    for (key, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/predict"),
        ("http.response.status_code", "200"),
        ("flux2.request_id", "r-7"),
    ] {
        assert_eq!(told[key], value);
    }
    let told = attributes(&picture.attributes);
    assert_eq!((&*told["flux2.width"], &*told["flux2.seed"]), ("32", "9007199254740991"));
    let mut stages: Vec<&Span> = spans.iter().filter(|span| span.parent_span_id == picture.span_id).collect();
    stages.sort_by_key(|span| span.start_time_unix_nano);
    let names: Vec<&str> = stages.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["text_encoder", "context", "dit", "vae_decode"]);
    for pair in stages.windows(2) {
        assert!(pair[0].end_time_unix_nano <= pair[1].start_time_unix_nano + 1_000_000, "{pair:?}");
    }
    assert!(request.start_time_unix_nano <= picture.start_time_unix_nano);
}

#[tokio::test]
async fn failures_are_told_to_a_collector() {
    let (endpoint, received) = collector().await;
    let flags = ["--otlp-endpoint", &endpoint];
    let server = TestServer::scripted(Gate::opened(), std::time::Duration::ZERO, &flags).await;
    assert_eq!(server.post_json("/predict", &small("nan")).await.0, 500);
    server.end().await.unwrap();
    let (_, spans) = &*received.lock().unwrap();
    for name in ["POST /predict", "picture"] {
        let span = spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{spans:?}"));
        assert_eq!(span.status.as_ref().unwrap().code, 2, "{span:?}");
    }
}

/// A collector that is not there costs nothing but the spans.
#[tokio::test]
async fn an_absent_collector_disturbs_nobody() {
    let server = TestServer::real(&["--otlp-endpoint", "http://127.0.0.1:9"]).await;
    assert_eq!(server.post_json("/predict", &small("x")).await.0, 200);
    server.end().await.unwrap();
}

#[test]
fn endpoints_are_plain_http_without_a_password() {
    for endpoint in ["https://collector:4318", "http://user:word@collector:4318", "collector:4318"] {
        let error = crate::support::config(&["--otlp-endpoint", endpoint]).check().unwrap_err().to_string();
        assert!(error.contains("otlp-endpoint"), "{error}");
    }
}

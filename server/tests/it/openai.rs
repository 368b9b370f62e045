// SPDX-License-Identifier: Apache-2.0
//! The OpenAI-shaped routes: answers, formats, streams.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::{
    jobs::{parse_events, wait_until},
    scripted::Gate,
    support::{TestServer, base64, png, refused, shared, with},
};

fn request(more: &Value) -> Value {
    with(json!({"prompt": "a circle", "size": "48x32", "seed": 6}), more)
}

fn file(data: &Value) -> Vec<u8> {
    STANDARD.decode(data["b64_json"].as_str().unwrap_or_else(|| panic!("{data}"))).unwrap()
}

#[tokio::test]
async fn generations_answer_in_openais_shape() {
    let server = shared();
    let (status, body) = server.post_json("/v1/images/generations", &request(&json!({}))).await;
    assert_eq!(status, 200, "{body}");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    for (field, value) in
        [("size", "48x32"), ("size_source", "request"), ("output_format", "png"), ("background", "opaque")]
    {
        assert_eq!(body[field], value, "{field}");
    }
    assert_eq!(body["usage"]["input_tokens"], body["usage"]["total_tokens"]);
    assert_eq!((&body["data"][0]["seed"], &body["data"][0]["seed_text"]), (&json!(6), &json!("6")));
    let picture = image::load_from_memory(&file(&body["data"][0])).unwrap();
    assert_eq!((picture.width(), picture.height()), (48, 32));
    let (_, predicted) = server
        .post_json("/predict", &json!({"prompt": "a circle", "width": 48, "height": 32, "seed": 6}))
        .await;
    assert_eq!(picture.into_rgb8(), crate::support::picture(&predicted), "one model behind all routes");
}

#[tokio::test]
async fn formats_are_png_jpeg_and_webp_with_their_metadata() {
    let server = shared();
    let mut sizes = Vec::new();
    for (format, compression, guess) in [
        ("png", 100, image::ImageFormat::Png),
        ("jpeg", 100, image::ImageFormat::Jpeg),
        ("jpeg", 5, image::ImageFormat::Jpeg),
        ("webp", 100, image::ImageFormat::WebP),
    ] {
        let body = request(&json!({"output_format": format, "output_compression": compression}));
        let (status, body) = server.post_json("/v1/images/generations", &body).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["output_format"], format);
        let file = file(&body["data"][0]);
        assert_eq!(image::guess_format(&file).unwrap(), guess);
        let picture = image::load_from_memory(&file).unwrap();
        assert_eq!((picture.width(), picture.height()), (48, 32));
        let text = String::from_utf8_lossy(&file);
        assert!(text.contains("a circle") && text.contains("seed"), "{format} says how it was made");
        sizes.push(file.len());
    }
    assert!(sizes[2] < sizes[1], "compression is used: {sizes:?}");
}

#[tokio::test]
async fn fields_out_of_range_name_themselves() {
    let server = shared();
    for (field, value) in [
        ("size", json!("64")),
        ("size", json!("64x")),
        ("size", json!("33x32")),
        ("size", json!("8x8")),
        ("size", json!(64)),
        ("n", json!(0)),
        ("n", json!(2.0)),
        ("response_format", json!("url")),
        ("output_format", json!("gif")),
        ("output_compression", json!(101)),
        ("partial_images", json!(4)),
        ("background", json!("transparent")),
        ("stream", json!("yes")),
        ("seed", json!(-1)),
        ("mask", json!("x")),
        ("prompt", json!("")),
    ] {
        let message = refused(
            &server.post_json("/v1/images/generations", &request(&json!({field: value}))).await,
            422,
            field,
        );
        assert!(message.starts_with(field), "{message}");
    }
    refused(
        &server.post_json("/v1/images/generations", &request(&json!({"stream": true, "n": 2}))).await,
        422,
        "n",
    );
    let auto = request(&json!({"size": "auto", "prompt": ""}));
    refused(&server.post_json("/v1/images/generations", &auto).await, 422, "prompt");
}

#[tokio::test]
async fn streams_give_partial_images_from_the_real_latents() {
    let server = shared();
    let (_, whole) = server.post_json("/v1/images/generations", &request(&json!({}))).await;
    for partials in 0..=3 {
        let body = request(&json!({"stream": true, "partial_images": partials}));
        let response = server.post("/v1/images/generations").json(&body).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let events = parse_events(&response.text().await.unwrap());
        let names: Vec<&str> = events.iter().map(|(name, ..)| name.as_str()).collect();
        let mut wanted = vec!["image_generation.partial_image"; partials];
        wanted.push("image_generation.completed");
        assert_eq!(names, wanted);
        let (.., last) = events.last().unwrap();
        assert_eq!(last["type"], "image_generation.completed");
        assert_eq!(last["b64_json"], whole["data"][0]["b64_json"], "previews change nothing");
        for (index, (.., data)) in events[..partials].iter().enumerate() {
            assert_eq!(data["partial_image_index"], index);
            let partial = image::load_from_memory(&file(data)).unwrap().into_rgb8();
            assert_eq!(partial.dimensions(), (48, 32));
            assert_ne!(data["b64_json"], last["b64_json"]);
        }
    }
    let edit =
        request(&json!({"stream": true, "partial_images": 1, "image": base64(&png(64, 64, [1, 2, 3]))}));
    let response = server.post("/v1/images/edits").json(&edit).send().await.unwrap();
    let events = parse_events(&response.text().await.unwrap());
    assert_eq!(events[0].0, "image_edit.partial_image");
    assert_eq!(events[1].0, "image_edit.completed");
}

#[tokio::test]
async fn a_stream_that_fails_says_so_in_an_event_and_one_that_is_left_stops_the_run() {
    let gate = Gate::opened();
    let server = TestServer::scripted(gate, Duration::ZERO, &[]).await;
    let body = json!({"prompt": "nan", "size": "32x32", "stream": true});
    let text = server.post("/v1/images/generations").json(&body).send().await.unwrap().text().await.unwrap();
    let events = parse_events(&text);
    assert_eq!((events[0].0.as_str(), &events[0].2["error"]["code"]), ("error", &json!("non_finite")));
    server.end().await.unwrap();

    let server = TestServer::scripted(Gate::closed(), Duration::ZERO, &[]).await;
    let body = json!({"prompt": "left", "size": "32x32", "stream": true});
    let response = server.post("/v1/images/generations").json(&body).send().await.unwrap();
    wait_until(|| server.app.queue.running().is_some()).await;
    drop(response);
    wait_until(|| server.app.queue.running().is_none()).await;
    server.end().await.unwrap();
}

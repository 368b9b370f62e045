// SPDX-License-Identifier: Apache-2.0
//! What `/predict` takes and answers, and what the server says about itself.

use serde_json::{Value, json};

use crate::support::{TINY, TestServer, answer, base64, picture, png, refused, shared, small, with};

#[tokio::test]
async fn predict_answers_the_keys_of_the_klein_card() {
    let server = shared();
    let (status, body) = server.post_json("/predict", &small("a red circle")).await;
    assert_eq!(status, 200, "{body}");
    let mut keys: Vec<&str> = body.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    let card =
        ["height", "image", "license", "model", "num_steps", "reference_count", "seed", "timing_ms", "width"];
    let beyond = ["package_digest", "prompt_tokens", "prompt_truncated", "request_id"];
    let mut wanted: Vec<&str> = card.into_iter().chain(beyond).collect();
    wanted.sort_unstable();
    assert_eq!(keys, wanted);
    let mut stages: Vec<&str> = body["timing_ms"].as_object().unwrap().keys().map(String::as_str).collect();
    stages.sort_unstable();
    assert_eq!(
        stages,
        ["context_s", "dit_s", "reference_encode_s", "text_encoder_s", "total_ms", "vae_decode_s"]
    );
    assert_eq!(
        (&body["seed"], &body["num_steps"], &body["reference_count"]),
        (&json!(42), &json!(4), &json!(0))
    );
    assert!(body["timing_ms"]["total_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(picture(&body).dimensions(), (32, 32));
}

#[tokio::test]
async fn the_same_request_gives_the_same_bytes() {
    let server = shared();
    let request = with(small("same"), &json!({"seed": 7}));
    let (_, first) = server.post_json("/predict", &request).await;
    let (_, second) = server.post_json("/predict", &request).await;
    assert_eq!(first["image"], second["image"]);
    let (_, other) = server.post_json("/predict", &with(request, &json!({"seed": 8}))).await;
    assert_ne!(first["image"], other["image"]);
}

#[tokio::test]
async fn case_44_the_picture_has_exactly_the_size_asked_for() {
    let server = shared();
    for (width, height) in [(32, 16), (16, 48), (24, 40), (40, 24), (64, 16)] {
        let (status, body) =
            server.post_json("/predict", &json!({"prompt": "size", "width": width, "height": height})).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(picture(&body).dimensions(), (width, height));
        assert_eq!((&body["width"], &body["height"]), (&json!(width), &json!(height)));
    }
}

#[tokio::test]
async fn case_44_sizes_off_the_range_or_the_grid_are_refused_with_both() {
    let server = shared();
    for (field, value, range) in
        [("width", 1928, "1920"), ("height", 33, "8"), ("width", 8, "16"), ("height", 0, "16")]
    {
        let message = refused(
            &server.post_json("/predict", &with(small("x"), &json!({field: value}))).await,
            422,
            field,
        );
        assert!(message.contains(&value.to_string()) && message.contains(range), "{message}");
    }
    let large = json!({"prompt": "x", "width": 1920, "height": 1096});
    let message = refused(&server.post_json("/predict", &large).await, 422, "height");
    assert!(message.contains("1088"), "{message}");
}

/// The size is the documented default, whatever was uploaded; where it came from is said.
#[tokio::test]
async fn case_48_and_49_the_size_never_comes_from_an_upload() {
    let gate = crate::scripted::Gate::opened();
    let server = TestServer::scripted(gate, std::time::Duration::ZERO, &[]).await;
    let upload = base64(&png(640, 200, [9, 9, 9]));
    let response =
        server.post("/predict").json(&json!({"prompt": "x", "images": [upload]})).send().await.unwrap();
    assert_eq!(response.headers()["x-size-source"], "default");
    let (_, body) = answer(response).await;
    assert_eq!(picture(&body).dimensions(), (1024, 1024));
    let sized = json!({"prompt": "x", "images": [upload], "width": 64, "height": 96});
    let response = server.post("/predict").json(&sized).send().await.unwrap();
    assert_eq!(response.headers()["x-size-source"], "request");
    assert_eq!(picture(&answer(response).await.1).dimensions(), (64, 96));
    server.end().await.unwrap();
}

/// The noise comes from the host's generator: how the device is split up changes nothing.
#[tokio::test]
async fn case_52_a_seed_is_the_same_picture_on_every_server() {
    let request = with(small("a seed"), &json!({"seed": 1234}));
    for dtype in ["f32", "bf16"] {
        let mut pictures = Vec::new();
        for threads in ["1", "2", "3"] {
            let server = TestServer::real(&["--threads", threads, "--dtype", dtype]).await;
            let (status, body) = server.post_json("/predict", &request).await;
            assert_eq!(status, 200, "{body}");
            pictures.push(body["image"].clone());
            server.end().await.unwrap();
        }
        assert!(pictures.iter().all(|picture| *picture == pictures[0]), "{dtype}");
    }
}

#[tokio::test]
async fn case_55_tokens_and_truncation_are_told() {
    let tokenizer = flux2::prompt::PromptTokenizer::load(
        &std::path::Path::new(TINY).join("tokenizer"),
        &flux2::prompt::QWEN3,
    )
    .unwrap();
    let tokens = |words: usize| {
        let prompt = "a ".repeat(words).trim_end().to_owned();
        (tokenizer.encode(&prompt).unwrap().total, prompt)
    };
    let (exact, fitting) = (1..1200).map(tokens).find(|(total, _)| *total >= 512).unwrap();
    assert_eq!(exact, 512, "one word is one token in this vocabulary");
    let server = shared();
    let (_, short) = server.post_json("/predict", &small("a cat")).await;
    assert_eq!(short["prompt_truncated"], false);
    let (_, full) = server.post_json("/predict", &small(&fitting)).await;
    assert_eq!((&full["prompt_tokens"], &full["prompt_truncated"]), (&json!(512), &json!(false)));
    let (_, over) = server.post_json("/predict", &small(&format!("{fitting} a"))).await;
    assert_eq!((&over["prompt_tokens"], &over["prompt_truncated"]), (&json!(513), &json!(true)));
}

#[tokio::test]
async fn prompts_are_text_of_1_to_4000_characters() {
    let server = shared();
    for (prompt, reason) in [
        (json!(""), "empty"),
        (json!("  \n"), "empty"),
        (json!("a\0b"), "NUL"),
        (json!("x".repeat(4001)), "4000"),
        (json!(7), "string"),
        (Value::Null, "missing"),
        (json!(["a"]), "string"),
    ] {
        let message = refused(
            &server.post_json("/predict", &with(small(""), &json!({"prompt": prompt}))).await,
            422,
            "prompt",
        );
        assert!(message.contains(reason), "{message}");
    }
    let (status, body) = server.post_json("/predict", &small(&"ä".repeat(4000))).await;
    assert_eq!(status, 200, "{body}");
}

/// On the native routes an omitted seed is 42; each answer, header and file says which it was.
#[tokio::test]
async fn case_56_and_57_the_seed_used_is_in_body_header_and_file() {
    let server = shared();
    for (request, seed) in
        [(small("s"), 42_u64), (with(small("s"), &json!({"seed": 9_007_199_254_740_991_u64})), (1 << 53) - 1)]
    {
        let response = server.post("/predict").json(&request).send().await.unwrap();
        assert_eq!(response.headers()["x-seed"], seed.to_string().as_str());
        let (_, body) = answer(response).await;
        assert_eq!(body["seed"], seed);
        assert_eq!(png_text(&body, "seed"), seed.to_string());
    }
    // On the OpenAI routes it is drawn for each request.
    let request = json!({"prompt": "s", "size": "32x32"});
    let (_, first) = server.post_json("/v1/images/generations", &request).await;
    let (_, second) = server.post_json("/v1/images/generations", &request).await;
    assert_ne!(first["data"][0]["seed"], second["data"][0]["seed"]);
    assert_ne!(first["data"][0]["b64_json"], second["data"][0]["b64_json"]);
}

#[tokio::test]
async fn case_51_files_say_how_they_were_made() {
    let server = TestServer::real(&["--package-digest", "sha256:abc", "--model-revision", "r1"]).await;
    let (_, body) = server.post_json("/predict", &with(small("café ☕"), &json!({"seed": 3}))).await;
    assert_eq!(body["package_digest"], "sha256:abc");
    for (key, value) in [
        ("prompt", "café ☕"),
        ("seed", "3"),
        ("width", "32"),
        ("height", "32"),
        ("num_steps", "4"),
        ("package_digest", "sha256:abc"),
        ("model_revision", "r1"),
    ] {
        assert_eq!(png_text(&body, key), value, "{key}");
    }
    server.end().await.unwrap();
    let private = TestServer::real(&["--omit-prompt"]).await;
    let (_, body) = private.post_json("/predict", &small("secret")).await;
    assert_eq!(png_text(&body, "prompt"), "");
    private.end().await.unwrap();
}

fn png_text(body: &Value, key: &str) -> String {
    use base64::Engine;
    let file = base64::engine::general_purpose::STANDARD.decode(body["image"].as_str().unwrap()).unwrap();
    let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    reader.finish().unwrap();
    let info = reader.info();
    let international =
        info.utf8_text.iter().find(|chunk| chunk.keyword == key).map(|chunk| chunk.get_text().unwrap());
    let latin = || {
        info.uncompressed_latin1_text
            .iter()
            .find(|chunk| chunk.keyword == key)
            .map(|chunk| chunk.text.clone())
    };
    international.or_else(latin).unwrap_or_default()
}

/// JSON is sent as text here: what a client writes is what is judged.
#[tokio::test]
async fn case_79_and_80_seeds_are_digits_below_2_to_the_53() {
    let server = shared();
    for seed in
        ["-1", "1.5", "1e3", "4.0", "9007199254740992", "18446744073709551616", "\"7\"", "true", "[1]"]
    {
        let body = format!("{{\"prompt\": \"x\", \"width\": 32, \"height\": 32, \"seed\": {seed}}}");
        let response = server
            .post("/predict")
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await
            .unwrap();
        let message = refused(&answer(response).await, 422, "seed");
        assert!(message.contains(seed) && message.contains("9007199254740991"), "{message}");
    }
    let (_, info) = server.get_json("/info").await;
    assert_eq!(info["limits"]["seed_max"], 9_007_199_254_740_991_u64);
    let (_, openapi) = server.get_json("/openapi.json").await;
    let seed = &openapi["components"]["schemas"]["PredictRequest"]["properties"]["seed"];
    assert_eq!((&seed["minimum"], &seed["maximum"]), (&json!(0), &json!(9_007_199_254_740_991_u64)));
}

#[tokio::test]
async fn steps_and_guidance_are_what_klein_takes() {
    let server = shared();
    for steps in [0, 3, 5, 50] {
        let message = refused(
            &server.post_json("/predict", &with(small("x"), &json!({"num_steps": steps}))).await,
            422,
            "num_steps",
        );
        assert!(message.contains(&steps.to_string()) && message.contains('4'), "{message}");
    }
    let body = with(small("x"), &json!({"num_inference_steps": 28}));
    refused(&server.post_json("/generate", &body).await, 422, "num_inference_steps");
    for guidance in [json!(4.0), json!(0), json!(-1), json!("1")] {
        let body = with(small("x"), &json!({"guidance_scale": guidance}));
        refused(&server.post_json("/generate", &body).await, 422, "guidance_scale");
    }
    let fine = with(small("x"), &json!({"guidance_scale": 1.0, "num_inference_steps": 4, "seed": 3}));
    let (status, body) = server.post_json("/generate", &fine).await;
    assert_eq!(status, 202, "{body}");
}

#[tokio::test]
async fn case_83_unknown_fields_and_wrong_content_types_are_told() {
    let server = shared();
    let message = refused(
        &server.post_json("/predict", &with(small("x"), &json!({"heigth": 32}))).await,
        422,
        "heigth",
    );
    assert!(message.contains("did you mean height?"), "{message}");
    let message =
        refused(&server.post_json("/generate", &with(small("x"), &json!({"steps": 4}))).await, 422, "steps");
    assert!(message.contains("known fields are") || message.contains("num_inference_steps"), "{message}");
    // OpenAI's own fields without a meaning here are taken; others are not.
    let ignored =
        json!({"prompt": "x", "size": "32x32", "model": "gpt-image-1", "quality": "high", "user": "u"});
    assert_eq!(server.post_json("/v1/images/generations", &ignored).await.0, 200);
    let unknown = json!({"prompt": "x", "size": "32x32", "negative_prompt": "y"});
    refused(&server.post_json("/v1/images/generations", &unknown).await, 422, "negative_prompt");

    for kind in [
        None,
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
        Some("application/json; charset=latin1"),
    ] {
        let mut request = server.post("/predict").body(small("x").to_string());
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        let message = refused(&answer(request.send().await.unwrap()).await, 415, "Content-Type");
        assert!(message.contains("application/json"), "{message}");
    }
    let body = small("x").to_string();
    let request =
        server.post("/predict").header("content-type", "application/json; charset=UTF-8").body(body);
    assert_eq!(request.send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn bodies_that_are_not_json_are_400_with_the_byte() {
    let server = shared();
    for (body, place) in [
        (&b"{\"prompt\": \"a"[..], "byte"),
        (b"", "byte 0"),
        (b"{\"prompt\": \"\xff\"}", "byte 12"),
        (b"{]", "byte 1"),
    ] {
        let request = server.post("/predict").header("content-type", "application/json").body(body.to_vec());
        let message = refused(&answer(request.send().await.unwrap()).await, 400, "");
        assert!(message.contains(place), "{message}");
    }
    let request = server.post("/predict").header("content-type", "application/json").body("[1]");
    refused(&answer(request.send().await.unwrap()).await, 422, "");
}

#[tokio::test]
async fn unknown_routes_and_wrong_methods_answer_in_the_one_body() {
    let server = shared();
    let message = refused(&server.get_json("/predcit").await, 404, "");
    assert!(message.contains("/predict"), "{message}");
    let response = server.get("/predict").send().await.unwrap();
    assert_eq!(response.headers()["allow"], "POST");
    refused(&answer(response).await, 405, "");
    refused(&server.get_json("/jobs/nope").await, 404, "id");
}

#[tokio::test]
async fn every_answer_has_a_request_id_and_a_harmless_one_is_kept() {
    let server = shared();
    for (sent, kept) in
        [(Some("abc-123"), true), (None, false), (Some("a b\tc"), false), (Some(&*"x".repeat(200)), false)]
    {
        let mut request = server.get("/nowhere");
        if let Some(id) = sent {
            request = request.header("x-request-id", id);
        }
        let response = request.send().await.unwrap();
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert_eq!(Some(id.as_str()) == sent, kept, "{id}");
    }
}

#[tokio::test]
async fn the_server_describes_itself() {
    let server = shared();
    let (status, health) = server.get_json("/health").await;
    assert_eq!((status.as_u16(), &health["status"], &health["ready"]), (200, &json!("warm"), &json!(true)));
    let (_, alive) = server.get_json("/tt-liveness").await;
    assert_eq!(alive, json!({"status": "alive", "model_ready": true}));
    let (_, models) = server.get_json("/v1/models").await;
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    let (_, info) = server.get_json("/info").await;
    assert_eq!(info["limits"]["max_side"], 1920);
    assert_eq!(info["license"], flux2::spec::KLEIN.license);
    // Case 78: how long a picture takes is told, once one was made.
    assert!(info["estimated_run_s"].as_f64().unwrap() > 0.0, "{info}");
    for path in ["/", "/docs"] {
        let response = server.get(path).send().await.unwrap();
        assert!(
            response.headers()["content-security-policy"].to_str().unwrap().contains("default-src 'none'")
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 [dev] by the same binary: the dev card's quickstart, one served size, and what the routes know of the model.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    life::{ended, ready, signal},
    support::{BINARY, TINY, TINY_DEV, TestServer, answer, base64, client, picture, png, refused},
};

/// The dev card's lines, word for word.
const QUICKSTART: [&str; 2] = [
    r#"curl -s localhost:8000/health

JOB=$(curl -s -X POST localhost:8000/generate \
        -H 'Content-Type: application/json' \
        -d '{"prompt": "a lighthouse in a thunderstorm", "seed": 3}' \
      | python -c 'import sys,json; print(json.load(sys.stdin)["job_id"])')
"#,
    r"curl -s localhost:8000/jobs/$JOB                 # queued | running | done | error
curl -s -o out.png localhost:8000/jobs/$JOB/image
",
];

/// Runs lines of the card against another port; what they print.
fn shell(port: &str, directory: &Path, lines: &[&str]) -> String {
    let python = "command -v python >/dev/null || python() { python3 \"$@\"; }\n";
    let script = [python, &lines.concat().replace("8000", port)].concat();
    let output = Command::new("sh").args(["-euc", &script]).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn the_dev_cards_quickstart_runs_word_for_word() {
    // The size as the card sets it; nothing else is asked for, so the picture has 50 steps.
    let mut child = Command::new(BINARY)
        .args(["serve", "--port", "0", "--checkpoint", TINY_DEV, "--small-sizes", "--threads", "1"])
        .envs([("FLUX2_WIDTH", "64"), ("FLUX2_HEIGHT", "48")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let url = ready(&mut child);
    let port = url.rsplit(':').next().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let printed = shell(port, directory.path(), &[QUICKSTART[0], "echo; echo $JOB\n"]);
    let (health, job) = printed.trim().rsplit_once('\n').unwrap();
    let health: Value = serde_json::from_str(health).unwrap();
    assert_eq!(
        (&health["ready"], &health["model"], &health["family"], &health["mesh_shape"], &health["resolution"]),
        (&json!(true), &json!("tiny"), &json!("FLUX.2-dev"), &json!([1, 1]), &json!("64x48"))
    );

    // What the card says of /generate and of /jobs.
    let get = async |path: String| answer(client().get(path).send().await.unwrap()).await;
    let (status, jobs) = get(format!("{url}/jobs")).await;
    assert_eq!((status.as_u16(), &jobs["jobs"][0]["job_id"]), (200, &json!(job)));
    for _ in 0..600 {
        if get(format!("{url}/jobs/{job}")).await.1["status"] == "done" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let set = format!("JOB={job}\n");
    let view: Value = serde_json::from_str(&shell(port, directory.path(), &[&set, QUICKSTART[1]])).unwrap();
    assert_eq!((&view["status"], &view["steps"], &view["error"]), (&json!("done"), &json!(50), &Value::Null));
    assert_eq!(
        (&view["parameters"]["seed"], &view["parameters"]["guidance_scale"]),
        (&json!(3), &json!(4.0))
    );
    let out = image::open(directory.path().join("out.png")).unwrap();
    assert_eq!((out.width(), out.height()), (64, 48));

    // The last route of the card: a job that waits is cancelled.
    let post = async |path: &str, body: Value| {
        answer(client().post(format!("{url}{path}")).json(&body).send().await.unwrap()).await
    };
    let long = json!({"prompt": "a long one", "num_inference_steps": 200});
    let (status, first) = post("/generate", long.clone()).await;
    assert_eq!(status, 202, "{first}");
    let (_, second) = post("/generate", long).await;
    for accepted in [second, first] {
        let path = format!("/jobs/{}/cancel", accepted["job_id"].as_str().unwrap());
        let (status, view) = post(&path, json!({})).await;
        assert_eq!((status.as_u16(), &view["status"]), (200, &json!("cancelled")), "{view}");
    }
    signal(&child, "-TERM");
    let (code, log) = ended(child, Duration::from_secs(30));
    assert_eq!(code, 0, "{log}");
}

#[tokio::test]
async fn one_size_is_served_and_another_is_refused_with_it_named() {
    let server = TestServer::dev(&["--width", "64", "--height", "32"]).await;
    let body = |more: &Value| crate::support::with(json!({"prompt": "x", "num_steps": 1}), more);
    let (status, made) = server.post_json("/predict", &body(&json!({}))).await;
    assert_eq!((status.as_u16(), picture(&made).dimensions()), (200, (64, 32)), "{made}");
    let (status, _) = server.post_json("/predict", &body(&json!({"width": 64, "height": 32}))).await;
    assert_eq!(status, 200);
    for (more, param) in [(json!({"width": 32}), "width"), (json!({"height": 64}), "height")] {
        let message = refused(&server.post_json("/predict", &body(&more)).await, 422, param);
        assert!(message.contains("64 x 32"), "{message}");
    }
    let other = json!({"prompt": "x", "size": "512x512"});
    let message = refused(&server.post_json("/v1/images/generations", &other).await, 422, "size");
    assert!(message.contains("64 x 32"), "{message}");
    let (_, info) = server.get_json("/info").await;
    assert_eq!(info["limits"]["only_size"], json!([64, 32]));
    let (_, openapi) = server.get_json("/openapi.json").await;
    let width = &openapi["components"]["schemas"]["PredictRequest"]["properties"]["width"];
    assert_eq!((&width["minimum"], &width["maximum"]), (&json!(64), &json!(64)));
    server.end().await.unwrap();
}

#[tokio::test]
async fn steps_and_guidance_are_the_models_and_every_route_takes_them() {
    let server = TestServer::dev(&["--any-size", "--width", "32", "--height", "32"]).await;
    let (_, info) = server.get_json("/info").await;
    let limits = &info["limits"];
    assert_eq!(
        (&limits["steps"], &limits["default_steps"], &limits["guidance"], &limits["default_guidance"]),
        (&json!([1, 200]), &json!(50), &json!(true), &json!(4.0))
    );
    assert_eq!((&limits["only_size"], &limits["default_size"]), (&Value::Null, &json!([32, 32])));
    assert_eq!(
        (&info["family"], &info["license"]),
        (&json!("FLUX.2-dev"), &json!("LicenseRef-FLUX-Non-Commercial"))
    );

    // Guidance 0 is a value of its own, an omitted one is 4.
    let mut made = Vec::new();
    for guidance in [json!(null), json!(4.0), json!(0), json!(2.5)] {
        let body =
            json!({"prompt": "x", "width": 32, "height": 48, "num_steps": 2, "guidance_scale": guidance});
        let (status, answer) = server.post_json("/predict", &body).await;
        assert_eq!((status.as_u16(), &answer["num_steps"]), (200, &json!(2)), "{answer}");
        made.push(picture(&answer));
    }
    assert_eq!(made[0], made[1]);
    assert!(made[2] != made[1] && made[3] != made[1] && made[3] != made[2]);

    let reference = base64(&png(64, 64, [0, 0, 255]));
    let edit = json!({"prompt": "x", "image": [reference], "seed": 42, "num_inference_steps": 2, "guidance_scale": 2.5, "size": "32x48"});
    let (status, answer) = server.post_json("/v1/images/edits", &edit).await;
    assert_eq!(status, 200, "{answer}");
    let generation =
        json!({"prompt": "x", "seed": 42, "num_inference_steps": 2, "guidance_scale": 2.5, "size": "32x48"});
    let (_, answer) = server.post_json("/v1/images/generations", &generation).await;
    assert_eq!(picture(&json!({"image": answer["data"][0]["b64_json"]})), made[3]);

    for (path, steps) in [
        ("/predict", "num_steps"),
        ("/generate", "num_inference_steps"),
        ("/v1/images/generations", "num_inference_steps"),
    ] {
        for wrong in [0, 201] {
            let message =
                refused(&server.post_json(path, &json!({"prompt": "x", steps: wrong})).await, 422, steps);
            assert!(message.contains("1 to 200"), "{message}");
        }
        let body = json!({"prompt": "x", "guidance_scale": -1});
        refused(&server.post_json(path, &body).await, 422, "guidance_scale");
    }
    server.end().await.unwrap();
}

/// A snapshot in a Hugging Face cache has the name of its commit; the model has that of its repository.
#[tokio::test]
async fn a_snapshot_that_the_variable_names_is_called_by_its_repository() {
    let cache = tempfile::tempdir().unwrap();
    let snapshot =
        cache.path().join("models--org--small-flux/snapshots/536649d019c820df341c4108125d96a5c8fa06e9");
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(TINY).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path().canonicalize().unwrap(), snapshot.join(entry.file_name())).unwrap();
    }
    let mut child = Command::new(BINARY)
        .args(["serve", "--port", "0", "--small-sizes", "--warm-up", "16", "--threads", "1"])
        .env("KLEIN_SNAPSHOT", &snapshot)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let url = ready(&mut child);
    let models =
        client().get(format!("{url}/v1/models")).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!(models["data"][0]["id"], "small-flux");
    let health = client().get(format!("{url}/health")).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!((&health["model"], &health["family"]), (&json!("small-flux"), &json!("FLUX.2-klein-4B")));
    signal(&child, "-TERM");
    assert_eq!(ended(child, Duration::from_secs(30)).0, 0);
}

#[test]
fn a_size_that_the_model_cannot_make_ends_the_start() {
    let output = Command::new(BINARY)
        .args(["serve", "--port", "0", "--checkpoint", TINY_DEV, "--width", "1000"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--width: is 1000, wanted a multiple of 16 from 512 to 1920"), "{text}");
}

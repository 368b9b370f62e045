// SPDX-License-Identifier: Apache-2.0
//! Registries in trouble. A stand-in speaks what a push needs of the distribution protocol (version 2) and fails on
//! request; what works is tested against a real registry in `registry.rs`. Whatever happens, the tag serves what it
//! served and the package is as it was.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::Path,
    process::Output,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use packager::files;
use serde_json::{Value, json};

use crate::{engine::Small, stand_in::sha256};

/// Answers in place of the good answer: request line, and how often its like was seen before.
type Fault = Box<dyn Fn(&str, usize) -> Option<Response> + Send + Sync>;

#[derive(Default)]
struct StandIn {
    blobs: Mutex<BTreeMap<String, Bytes>>,
    manifests: Mutex<BTreeMap<String, Bytes>>,
    /// Request line and `Authorization`.
    seen: Mutex<Vec<(String, Option<String>)>>,
    fault: Mutex<Option<Fault>>,
    /// Where uploads go; this host if empty.
    uploads: Mutex<String>,
    /// Realm of the tokens, if it wants one.
    realm: Mutex<Option<String>>,
}

fn error(status: u16, code: &str) -> Response {
    let body = json!({"errors": [{"code": code, "message": format!("it is {code}")}]});
    (StatusCode::from_u16(status).expect("a status"), axum::Json(body)).into_response()
}

async fn answer(State(hub): State<Arc<StandIn>>, request: Request) -> Response {
    let line = format!("{} {}", request.method(), request.uri());
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    let query = request.uri().query().unwrap_or_default().replace("%3A", ":");
    let authorization =
        request.headers().get("authorization").map(|value| value.to_str().expect("text").to_owned());
    let kind = line.split(['?', ':']).next().unwrap_or_default().to_owned();
    let before = {
        let mut seen = hub.seen.lock().expect("lock");
        let before = seen.iter().filter(|(other, _)| other.split(['?', ':']).next() == Some(&kind)).count();
        seen.push((line.clone(), authorization.clone()));
        before
    };
    if path == "/token" {
        return axum::Json(json!({"token": "a-token", "expires_in": 300})).into_response();
    }
    if let Some(realm) = hub.realm.lock().expect("lock").clone()
        && !path.starts_with("/elsewhere")
        && authorization.as_deref() != Some("Bearer a-token")
    {
        let challenge = format!("Bearer realm=\"{realm}\",service=\"stand-in\"");
        return ([("www-authenticate", challenge)], error(401, "UNAUTHORIZED")).into_response();
    }
    let fault = hub.fault.lock().expect("lock").as_ref().and_then(|fault| fault(&line, before));
    if let Some(response) = fault {
        if response.status() == SILENCE {
            tokio::time::sleep(Duration::from_mins(1)).await;
        }
        return response;
    }
    let body = axum::body::to_bytes(request.into_body(), 1 << 30).await.unwrap_or_default();
    let (blobs, manifests) = (&hub.blobs, &hub.manifests);
    let last = path.rsplit('/').next().unwrap_or_default().to_owned();
    match method.as_str() {
        "GET" if path == "/v2/" => "{}".into_response(),
        "POST" => {
            let location =
                format!("{}/elsewhere/upload?state=secret-state", hub.uploads.lock().expect("lock"));
            (StatusCode::ACCEPTED, [("location", location)]).into_response()
        }
        "PUT" if path.starts_with("/elsewhere") => {
            let digest = query.split("digest=").nth(1).unwrap_or_default().to_owned();
            if digest != format!("sha256:{}", sha256(&body)) {
                return error(400, "DIGEST_INVALID");
            }
            blobs.lock().expect("lock").insert(digest, body);
            (StatusCode::CREATED, [("location", "/done")]).into_response()
        }
        "PUT" => {
            manifests.lock().expect("lock").insert(last, body);
            (StatusCode::CREATED, [("location", "/done")]).into_response()
        }
        _ => {
            let store = if path.contains("/blobs/") { blobs } else { manifests };
            match store.lock().expect("lock").get(&last).cloned() {
                Some(bytes) => {
                    let digest = format!("sha256:{}", sha256(&bytes));
                    let kind = "application/vnd.oci.image.manifest.v1+json".to_owned();
                    let length = bytes.len().to_string();
                    let headers = [
                        ("docker-content-digest", digest),
                        ("content-type", kind),
                        ("content-length", length),
                    ];
                    (headers, Body::from(bytes)).into_response()
                }
                None => {
                    error(404, if path.contains("/blobs/") { "BLOB_UNKNOWN" } else { "MANIFEST_UNKNOWN" })
                }
            }
        }
    }
}

/// A package, a stand-in that serves an older image under the tag `stable`, and the state to compare with.
struct Scene {
    small: Small,
    hub: Arc<StandIn>,
    address: SocketAddr,
    runtime: tokio::runtime::Runtime,
    before: BTreeMap<String, String>,
}

const OLD: &[u8] = b"{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\"}";

impl Scene {
    fn new(name: &str) -> Self {
        // Nothing runs it here, so that it can be small.
        let small = Small::new(name);
        let dockerfile = "ARG BASE_IMAGE\nFROM scratch\nCOPY code /opt/small/code\nENTRYPOINT [\"/none\"]\n";
        fs::write(small.path("Dockerfile"), dockerfile).expect("written");
        small.edit("manifest.yaml", "  check: [[small-server, --version]]\n", "");
        small.ok(&["pin", "--offline"]);
        small.ok(&["build"]);
        let hub = Arc::new(StandIn::default());
        hub.manifests.lock().expect("lock").insert("stable".into(), Bytes::from_static(OLD));
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let address = runtime.block_on(start(hub.clone()));
        let before = content(&small.package());
        Self { small, hub, address, runtime, before }
    }

    fn push(&self) -> (i32, String) {
        let package = self.small.package();
        let place = format!("{}/org/small:stable", self.address);
        let mut command = self.small.command();
        command.args(["push", package.to_str().expect("path"), "--registry", &place]);
        let Output { status, stdout, stderr } =
            command.env("PACKAGER_REGISTRY_TIMEOUT", "2").output().expect("runs");
        (status.code().unwrap_or(-1), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
    }

    fn break_with(&self, fault: impl Fn(&str, usize) -> Option<Response> + Send + Sync + 'static) {
        *self.hub.fault.lock().expect("lock") = Some(Box::new(fault));
    }

    /// The old image is served and the package is untouched; nothing is left beside it.
    fn assert_nothing_happened(&self, said: &str) {
        let tag = self.hub.manifests.lock().expect("lock").get("stable").cloned();
        assert_eq!(tag.as_deref(), Some(OLD), "the tag moved: {said}");
        assert_eq!(content(&self.small.package()), self.before, "the package changed: {said}");
        let beside = fs::read_dir(self.small.path("build")).expect("list").flatten();
        let names: Vec<String> =
            beside.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        assert!(!names.iter().any(|name| name.starts_with(".push.")), "{names:?}");
    }

    fn fails(&self, code: i32, shown: &str) {
        let (status, said) = self.push();
        assert!(status == code && said.contains(shown) && said.contains("next:"), "{status}: {said}");
        assert!(!said.contains("secret-state"), "a URL of an upload is shown: {said}");
        self.assert_nothing_happened(&said);
    }
}

async fn start(hub: Arc<StandIn>) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let router = Router::new().fallback(answer).with_state(hub);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn content(dir: &Path) -> BTreeMap<String, String> {
    let entries = files::walk(dir).expect("walk").into_iter().filter(|entry| entry.full.is_file());
    entries.map(|entry| (entry.path, files::sha256_file(&entry.full).expect("read").0)).collect()
}

/// Stands for no answer at all.
fn silence() -> Response {
    StatusCode::from_u16(SILENCE).expect("a status").into_response()
}

const SILENCE: u16 = 599;

#[test]
fn whatever_a_registry_does_a_failed_push_moves_no_tag_and_changes_no_package() {
    let scene = Scene::new("faults");
    let on = |start: &'static str, make: fn() -> Response| {
        move |line: &str, _: usize| line.starts_with(start).then(make)
    };
    for (fault, code, shown) in [
        (on("PUT /elsewhere", || error(500, "UNKNOWN")), 5, "trying again"),
        (on("PUT /elsewhere", || StatusCode::INSUFFICIENT_STORAGE.into_response()), 5, "status 507"),
        (on("PUT /elsewhere", || error(400, "DIGEST_INVALID")), 8, "DIGEST_INVALID"),
        (on("PUT /elsewhere", || StatusCode::PAYLOAD_TOO_LARGE.into_response()), 5, "status 413"),
        (on("POST", || error(401, "UNAUTHORIZED")), 6, "docker login"),
        (on("POST", || error(403, "DENIED")), 6, "docker login"),
        (on("POST", || error(405, "UNSUPPORTED")), 5, "it is UNSUPPORTED"),
        (on("POST", || error(429, "TOOMANYREQUESTS")), 5, "TOOMANYREQUESTS"),
        (on("POST", || "hello".into_response()), 5, "Expected HTTP Status 202"),
        (on("HEAD /v2/org/small/blobs", || error(403, "DENIED")), 6, "docker login"),
        (on("HEAD /v2/org/small/blobs", || StatusCode::BAD_GATEWAY.into_response()), 5, "502"),
        (on("GET /v2/", || StatusCode::SERVICE_UNAVAILABLE.into_response()), 5, ""),
        (on("PUT /v2/org/small/manifests", || error(400, "MANIFEST_INVALID")), 8, "MANIFEST_INVALID"),
        (on("PUT /v2/org/small/manifests/stable", || error(500, "UNKNOWN")), 5, "writing the manifest"),
        // The tag was asked for by HEAD; these are read back by GET.
        (on("GET /v2/org/small/manifests", || error(404, "MANIFEST_UNKNOWN")), 8, "lacks the manifest"),
        (on("GET /v2/org/small/manifests", || "{}".into_response()), 8, ""),
        (on("GET /v2/org/small/blobs", || error(404, "BLOB_UNKNOWN")), 8, "lacks the layer"),
        (on("GET /v2/org/small/blobs", || "short".into_response()), 8, "5 bytes instead of"),
    ] {
        scene.hub.blobs.lock().expect("lock").clear();
        scene.break_with(fault);
        scene.fails(code, shown);
    }
    // A registry that is silent, in an answer and in the middle of an upload.
    for start in ["GET /v2/org/small/manifests", "PUT /elsewhere"] {
        scene.hub.blobs.lock().expect("lock").clear();
        scene.break_with(move |line, _| line.starts_with(start).then(silence));
        scene.fails(5, "PACKAGER_REGISTRY_TIMEOUT");
    }
    // Nobody there.
    drop(scene.runtime);
    let package = scene.small.package();
    let place = format!("{}/org/small", scene.address);
    scene.small.fails(5, &["push", package.to_str().expect("path"), "--registry", &place]);
}

#[test]
fn what_may_pass_is_tried_again_and_a_registry_that_serves_another_image_is_found_out() {
    let scene = Scene::new("retries");
    scene.break_with(|line, before| {
        (line.starts_with("PUT /elsewhere") && before < 2)
            .then(|| StatusCode::SERVICE_UNAVAILABLE.into_response())
    });
    let (code, said) = scene.push();
    assert!(code == 0 && said.matches("trying again").count() == 2, "{said}");
    assert_ne!(content(&scene.small.package()), scene.before);
    // It takes the tag and goes on serving the old image: found, and said.
    scene.break_with(|line, _| {
        line.starts_with("PUT /v2/org/small/manifests/stable")
            .then(|| (StatusCode::CREATED, [("location", "/done")]).into_response())
    });
    scene.hub.manifests.lock().expect("lock").insert("stable".into(), Bytes::from_static(OLD));
    let (code, said) = scene.push();
    assert!(code == 8 && said.contains("does not serve what was pushed"), "{said}");
}

#[test]
fn tokens_are_fetched_with_the_credentials_and_go_to_the_registry_alone() {
    let scene = Scene::new("tokens");
    let other = Arc::new(StandIn::default());
    let elsewhere = scene.runtime.block_on(start(other.clone()));
    *scene.hub.realm.lock().expect("lock") = Some(format!("http://{}/token", scene.address));
    *scene.hub.uploads.lock().expect("lock") = format!("http://{elsewhere}");
    let config = scene.small.path("home/.docker");
    fs::create_dir_all(&config).expect("dir");
    let value = json!({"auths": {scene.address.to_string(): {"username": "ann", "password": "a-password"}}});
    fs::write(config.join("config.json"), value.to_string()).expect("written");
    let (code, said) = scene.push();
    // The blobs went to the other host, which the first does not see: so the read back fails, as it must.
    assert!(code == 8 && said.contains("lacks the layer") && !said.contains("a-password"), "{code}: {said}");
    scene.assert_nothing_happened(&said);
    let seen = scene.hub.seen.lock().expect("lock").clone();
    let asked: Vec<&String> =
        seen.iter().filter(|(line, _)| line.starts_with("GET /token")).map(|(line, _)| line).collect();
    assert!(asked.iter().any(|line| line.contains("pull%2Cpush") || line.contains("pull,push")), "{asked:?}");
    for (line, authorization) in &seen {
        let expected = if line.starts_with("GET /token") { "Basic " } else { "Bearer a-token" };
        assert!(authorization.as_ref().is_none_or(|value| value.starts_with(expected)), "{line}");
    }
    let uploads = other.seen.lock().expect("lock").clone();
    assert!(
        !uploads.is_empty() && uploads.iter().all(|(_, authorization)| authorization.is_none()),
        "{uploads:?}"
    );
}

#[test]
fn case_13_a_push_that_was_killed_goes_on_with_what_is_missing() {
    let scene = Scene::new("killed");
    // The second upload hangs: the first blob is there by then.
    scene.break_with(|line, before| (line.starts_with("PUT /elsewhere") && before > 0).then(silence));
    let package = scene.small.package();
    let place = format!("{}/org/small:stable", scene.address);
    let arguments = ["push", package.to_str().expect("path"), "--registry", &place];
    let mut child = scene.small.command().args(arguments).spawn().expect("starts");
    while scene.hub.blobs.lock().expect("lock").is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().expect("killed");
    child.wait().expect("an end");
    assert_eq!(content(&package), scene.before);
    assert_eq!(scene.hub.manifests.lock().expect("lock").get("stable").map(Bytes::as_ref), Some(OLD));
    *scene.hub.fault.lock().expect("lock") = None;
    let report: Value =
        serde_json::from_str(&scene.small.ok(&[&arguments[..], &["--json"]].concat())).expect("JSON");
    let blobs = report["blobs"].as_array().expect("blobs");
    assert!(blobs.iter().any(|blob| blob["there"] == true) && report["read_back"] == true, "{report}");
}

#[test]
fn a_full_disk_is_known_before_anything_is_sent() {
    let scene = Scene::new("full");
    // A file system of its own with no room: only root can make one.
    assert!(rustix::process::getuid().is_root(), "this test mounts a small file system and needs root");
    let small = scene.small.path("small-disk");
    fs::create_dir_all(&small).expect("dir");
    let sh = |script: &str| {
        let status = std::process::Command::new("sh").args(["-ec", script]).current_dir(&small).status();
        assert!(status.is_ok_and(|status| status.success()), "{script}");
    };
    let bytes: u64 = files::walk(&scene.small.package())
        .expect("walk")
        .iter()
        .filter_map(|entry| entry.full.metadata().ok())
        .map(|meta| meta.len())
        .sum();
    sh(&format!("mount -t tmpfs -o size={} none .", bytes + (8 << 20)));
    sh(&format!(
        "cp -a {} . && dd if=/dev/zero of=filler bs=64k status=none || true",
        scene.small.package().display()
    ));
    let package = small.join(&scene.small.name);
    let place = format!("{}/org/small:stable", scene.address);
    let output = scene.small.run(&["push", package.to_str().expect("path"), "--registry", &place]);
    let after = content(&package);
    sh("cd / && umount -l \"$OLDPWD\"");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(7) && said.contains("next:"), "{said}");
    assert_eq!(after, scene.before);
    scene.assert_nothing_happened(&said);
    assert!(!scene.hub.seen.lock().expect("lock").iter().any(|(line, _)| line.starts_with("POST")));
}

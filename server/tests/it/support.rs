// SPDX-License-Identifier: Apache-2.0
//! Servers and clients for the tests.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clap::Parser;
use flux2::{Pipeline, RgbImage};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use server::{
    app::App,
    config::Config,
    exit::StartError,
    lifecycle::Phase,
    listener,
    serve::{Server, drain, start},
    worker::Opener,
};
use tokio::task::JoinHandle;

use crate::scripted::{Gate, Scripted};

/// The random checkpoint of the published layout.
pub const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../code/tests/fixtures/tiny");
/// The same for FLUX.2 [dev].
pub const TINY_DEV: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../code/tests/fixtures/dev/tiny");
/// The program.
pub const BINARY: &str = env!("CARGO_BIN_EXE_flux2-server");

#[derive(Parser)]
#[command(args_override_self = true)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

/// Settings for tests: a free port, small sizes, and `flags`.
pub fn config(flags: &[&str]) -> Config {
    let base =
        ["test", "--port", "0", "--small-sizes", "--warm-up", "16", "--dtype", "f32", "--stall-limit", "0.5"];
    // Two threads that wait for each other are slow on a machine that has something else to do as well.
    let base = base.iter().chain(&["--threads", "1"]);
    Flags::try_parse_from(base.chain(flags)).unwrap().config
}

/// A server in this process.
pub struct TestServer {
    pub url: String,
    pub address: SocketAddr,
    pub app: Arc<App>,
    pub client: Client,
    end: JoinHandle<Result<(), StartError>>,
}

impl TestServer {
    /// With the real model.
    pub async fn real(flags: &[&str]) -> Self {
        let server = Self::begin(flags, Box::new(flux2::open));
        server.warm().await;
        server
    }

    /// With a scripted pipeline.
    pub async fn scripted(gate: Arc<Gate>, step: Duration, flags: &[&str]) -> Self {
        let server = Self::begin(
            flags,
            Box::new(move |_, _| Ok(Box::new(Scripted::new(gate, step)) as Box<dyn Pipeline>)),
        );
        server.warm().await;
        server
    }

    /// With the real model on the random dev checkpoint.
    pub async fn dev(flags: &[&str]) -> Self {
        let server = Self::begin_with(TINY_DEV, flags, Box::new(flux2::open));
        server.warm().await;
        server
    }

    /// With any opener; does not wait.
    pub fn begin(flags: &[&str], opener: Opener) -> Self {
        Self::begin_with(TINY, flags, opener)
    }

    fn begin_with(checkpoint: &str, flags: &[&str], opener: Opener) -> Self {
        let config = config(flags);
        let listener = listener::bind(&config).unwrap();
        let server = start(&config, checkpoint.into(), listener, opener, |_| ()).unwrap();
        Self::of(server)
    }

    fn of(server: Server) -> Self {
        let (address, app) = (server.address, server.app.clone());
        let end = tokio::spawn(server.wait());
        Self { url: format!("http://{address}"), address, app, client: client(), end }
    }

    pub async fn warm(&self) {
        let mut life = self.app.life.watch();
        let warm = life.wait_for(|phase| *phase == Phase::Warm);
        drop(tokio::time::timeout(Duration::from_mins(2), warm).await.unwrap().unwrap());
    }

    /// Drains and waits for the end.
    pub async fn end(self) -> Result<(), StartError> {
        drain(&self.app);
        self.ended().await
    }

    /// Waits for an end that something else brings about.
    pub async fn ended(self) -> Result<(), StartError> {
        tokio::time::timeout(Duration::from_mins(1), self.end).await.unwrap().unwrap()
    }

    pub fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url))
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.url))
    }

    pub async fn post_json(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        answer(self.post(path).json(body).send().await.unwrap()).await
    }

    pub async fn get_json(&self, path: &str) -> (StatusCode, Value) {
        answer(self.get(path).send().await.unwrap()).await
    }

    /// Queues a job; returns its id.
    pub async fn generate(&self, body: &Value) -> String {
        let (status, answer) = self.post_json("/generate", body).await;
        assert_eq!(status, 202, "{answer}");
        answer["job_id"].as_str().unwrap().to_owned()
    }

    /// Waits until a job is in one of `states`.
    pub async fn wait_for(&self, job: &str, states: &[&str]) -> Value {
        let start = Instant::now();
        loop {
            let (_, view) = self.get_json(&format!("/jobs/{job}")).await;
            if states.iter().any(|state| view["state"] == *state) {
                return view;
            }
            assert!(start.elapsed() < Duration::from_mins(1), "{view}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

pub fn client() -> Client {
    client_for(Duration::from_mins(2))
}

/// A client that gives up after `limit`.
pub fn client_for(limit: Duration) -> Client {
    // The workspace builds reqwest without a TLS provider of its own; the second call finds one installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder().no_proxy().timeout(limit).build().unwrap()
}

pub async fn answer(response: Response) -> (StatusCode, Value) {
    let status = response.status();
    let text = response.text().await.unwrap();
    let body = serde_json::from_str(&text).unwrap_or_else(|_| json!(text));
    (status, body)
}

/// One server with the real model for all tests that do not change it, on a thread that outlives each test's runtime.
pub fn shared() -> TestServer {
    static SHARED: OnceLock<(SocketAddr, Arc<App>)> = OnceLock::new();
    let (address, app) = SHARED.get_or_init(|| {
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let flags = ["--queue-size", "500", "--queue-per-client", "500", "--max-wait", "100000"];
                let server = TestServer::real(&flags).await;
                send.send((server.address, server.app.clone())).unwrap();
                let _ = server.end.await;
            });
        });
        receive.recv().unwrap()
    });
    let end = tokio::spawn(std::future::pending());
    TestServer {
        url: format!("http://{address}"),
        address: *address,
        app: app.clone(),
        client: client(),
        end,
    }
}

/// A small request for `/predict` or `/generate`.
pub fn small(prompt: &str) -> Value {
    json!({"prompt": prompt, "width": 32, "height": 32})
}

/// `base` with the fields of `more`.
pub fn with(mut base: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}

/// The picture in an answer of `/predict`.
pub fn picture(answer: &Value) -> RgbImage {
    let file = STANDARD.decode(answer["image"].as_str().unwrap_or_else(|| panic!("{answer}"))).unwrap();
    image::load_from_memory(&file).unwrap().into_rgb8()
}

/// A PNG of one colour.
pub fn png(width: u32, height: u32, colour: [u8; 3]) -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    RgbImage::from_pixel(width, height, image::Rgb(colour))
        .write_to(&mut file, image::ImageFormat::Png)
        .unwrap();
    file.into_inner()
}

pub fn base64(file: &[u8]) -> String {
    STANDARD.encode(file)
}

/// An error answer: its status, and that both forms of the body say the same. Returns the message.
pub fn refused(answer: &(StatusCode, Value), status: u16, param: &str) -> String {
    let (got, body) = answer;
    assert_eq!(got.as_u16(), status, "{body}");
    assert_eq!(body["detail"], body["error"]["message"], "{body}");
    if !param.is_empty() {
        assert_eq!(body["error"]["param"], param, "{body}");
    }
    body["detail"].as_str().unwrap().to_owned()
}

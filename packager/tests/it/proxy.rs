// SPDX-License-Identifier: Apache-2.0
//! The ways to a hub, with the program's own environment: a proxy that passes bytes on, one that is dead, one that is
//! not to be used, and TLS of an authority of one's own.

use std::{
    net::SocketAddr,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};

use axum::body::Bytes;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::{TempDir, tempdir};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    },
};

use crate::stand_in::Hub;

struct Scene {
    hub: Arc<Hub>,
    plain: SocketAddr,
    dir: TempDir,
    runtime: tokio::runtime::Runtime,
}

/// First line of every request to a proxy.
type Seen = Arc<Mutex<Vec<String>>>;

impl Scene {
    fn new() -> Self {
        let hub = Arc::new(Hub::default());
        hub.commit("org/weights", &[("config.json", Bytes::from_static(b"{}"))]);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let plain = runtime.block_on(hub.start());
        Self { hub, plain, dir: tempdir().expect("dir"), runtime }
    }

    /// A proxy for both forms: absolute addresses, and CONNECT.
    fn proxy(&self) -> (SocketAddr, Seen) {
        let seen = Seen::default();
        let listener = self.runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let lines = seen.clone();
        self.runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, lines.clone()));
            }
        });
        (address, seen)
    }

    /// The hub behind TLS for `localhost`; the file of its authority.
    fn tls(&self) -> (u16, std::path::PathBuf) {
        let key = KeyPair::generate().expect("a key");
        let mut authority = CertificateParams::new(vec![]).expect("names");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(authority, key).expect("an authority");
        let key = KeyPair::generate().expect("a key");
        let own = CertificateParams::new(vec!["localhost".to_owned()]).expect("names");
        let certificate = own.signed_by(&key, &issuer).expect("a certificate");
        let file = self.dir.path().join("authority.pem");
        std::fs::write(&file, issuer.pem()).expect("written");
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], private)
            .expect("a configuration");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = self.runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let plain = self.plain;
        self.runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut client) = acceptor.accept(client).await else { return };
                    let mut server = TcpStream::connect(plain).await.expect("the hub");
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        (port, file)
    }

    /// Fetches with these variables; exit code and what was said.
    fn fetch(&self, endpoint: &str, variables: &[(&str, &str)]) -> (i32, String) {
        let _ = std::fs::remove_dir_all(self.dir.path().join("home"));
        let output = Command::new(env!("CARGO_BIN_EXE_packager"))
            .args(["fetch", "--package", "org/weights"])
            .current_dir(self.dir.path())
            .env_clear()
            .env("HF_ENDPOINT", endpoint)
            .env("HF_HOME", self.dir.path().join("home"))
            .env("HF_TOKEN", "hf_test_token_of_nobody")
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .output()
            .expect("runs");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("hf_test_token_of_nobody") && !text.contains("pass-word"), "{text}");
        (output.status.code().unwrap_or(-1), text.into_owned())
    }
}

async fn pass(client: TcpStream, seen: Seen) -> std::io::Result<()> {
    let mut client = BufReader::new(client);
    let mut first = String::new();
    client.read_line(&mut first).await?;
    seen.lock().expect("seen").push(first.trim().to_owned());
    let words: Vec<&str> = first.split_whitespace().collect();
    let [method, target, version] = words[..] else { return Ok(()) };
    if method == "CONNECT" {
        let mut line = String::new();
        while client.read_line(&mut line).await? > 2 {
            line.clear();
        }
        let mut server = TcpStream::connect(target).await?;
        client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
        return copy_bidirectional(&mut client, &mut server).await.map(|_| ());
    }
    // The hub's name is the proxy's matter: the test's name leads to loopback.
    let rest = target.trim_start_matches("http://");
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let port = host.rsplit(':').next().unwrap_or("80");
    let mut server = TcpStream::connect(format!("127.0.0.1:{port}")).await?;
    server.write_all(format!("{method} /{path} {version}\r\nConnection: close\r\n").as_bytes()).await?;
    let mut head = String::new();
    while client.read_line(&mut head).await? > 2 {}
    server.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await?;
    client.write_all(&answer).await?;
    client.shutdown().await
}

#[test]
fn a_proxy_of_http_proxy_is_used_and_no_proxy_is_honoured() {
    let scene = Scene::new();
    let (proxy, seen) = scene.proxy();
    let place = format!("http://me:pass-word@{proxy}");
    // Only the proxy knows where this name leads.
    let endpoint = format!("http://hub.invalid:{}", scene.plain.port());
    let (code, text) = scene.fetch(&endpoint, &[("HTTP_PROXY", &place)]);
    assert_eq!(code, 0, "{text}");
    let lines = seen.lock().expect("seen").clone();
    assert!(lines.len() >= 3 && lines.iter().all(|line| line.contains("http://hub.invalid")), "{lines:?}");
    // Not for hosts that are excepted.
    let direct = format!("http://localhost:{}", scene.plain.port());
    let (code, text) = scene.fetch(&direct, &[("HTTP_PROXY", &place), ("NO_PROXY", "localhost")]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(seen.lock().expect("seen").len(), lines.len());
    let _ = &scene.hub;
}

#[test]
fn a_dead_proxy_is_named_in_one_sentence() {
    let scene = Scene::new();
    let dead = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("an address")
    };
    let place = format!("http://me:pass-word@{dead}");
    let (code, text) = scene.fetch("https://hub.invalid", &[("HTTPS_PROXY", &place)]);
    let error = text.lines().find(|line| line.starts_with("error:")).unwrap_or_default();
    let named = format!("through the proxy of HTTPS_PROXY ({dead})");
    assert!(code == 5 && error.contains(&named) && error.contains("refused"), "{code}: {text}");
    assert!(text.contains("next: check the proxy of HTTPS_PROXY"), "{text}");
}

#[test]
fn a_private_authority_is_trusted_by_ssl_cert_file_alone_also_through_a_proxy() {
    let scene = Scene::new();
    let (port, authority) = scene.tls();
    let endpoint = format!("https://localhost:{port}");
    let file = authority.to_str().expect("UTF-8");
    let (code, text) = scene.fetch(&endpoint, &[("SSL_CERT_FILE", file)]);
    assert_eq!(code, 0, "{text}");
    let (proxy, seen) = scene.proxy();
    let place = format!("http://{proxy}");
    let (code, text) = scene.fetch(&endpoint, &[("SSL_CERT_FILE", file), ("HTTPS_PROXY", &place)]);
    assert_eq!(code, 0, "{text}");
    let lines = seen.lock().expect("seen").clone();
    assert!(
        !lines.is_empty() && lines.iter().all(|line| line.starts_with("CONNECT localhost:")),
        "{lines:?}"
    );
    // Without it, at once and with what to do.
    let (code, text) = scene.fetch(&endpoint, &[]);
    assert!(code == 5 && text.contains("SSL_CERT_FILE") && !text.contains("trying again"), "{code}: {text}");
}

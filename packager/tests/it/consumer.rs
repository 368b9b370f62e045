// SPDX-License-Identifier: Apache-2.0
//! What a consumer does with a server in a container: start it, wait, ask for a picture, look at its
//! pixels, stop it.

use std::{
    io::{Read as _, Write as _},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::engine::{docker, docker_text};

/// What `predict` asks for.
pub const PROMPT: &str = "a red circle on a blue background";

pub fn succeed(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&stdout));
    String::from_utf8(stdout).expect("UTF-8").trim().to_owned()
}

/// A container that goes away with the test.
pub struct Container(pub String);

impl Container {
    pub fn start(name: &str, arguments: &[&str]) -> Self {
        let container = Self(name.to_owned());
        drop(docker(&["rm", "-f", name]));
        docker_text(&[&["run", "--detach", "--name", name], arguments].concat());
        container
    }

    pub fn logs(&self) -> String {
        let output = docker(&["logs", &self.0]);
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    pub fn state(&self, field: &str) -> String {
        docker_text(&["inspect", "-f", &format!("{{{{.State.{field}}}}}"), &self.0])
    }

    /// Until `done`; a container that ends or takes minutes fails the test with its logs.
    pub fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !done(self) {
            let alive = self.state("Running") == "true" && started.elapsed() < Duration::from_mins(3);
            assert!(alive, "{} is not {what}: {}", self.0, self.logs());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub fn ready(&self) {
        self.until("ready", |container| container.logs().contains("Application startup complete"));
    }

    /// `docker stop`, as consumers do it; the server's exit code.
    pub fn stop(&self) -> String {
        docker_text(&["stop", "--time", "120", &self.0]);
        self.state("ExitCode")
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        drop(docker(&["rm", "-f", &self.0]));
    }
}

pub fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("address").port().to_string()
}

pub fn curl(arguments: &[&str]) -> String {
    succeed(Command::new("curl").args(["-fsS", "-m", "300"]).args(arguments))
}

/// The picture of a request to `/predict`.
pub fn predict(port: &str) -> Vec<u8> {
    let request = json!({"prompt": PROMPT, "width": 512, "height": 512, "seed": 1}).to_string();
    let url = format!("http://127.0.0.1:{port}/predict");
    let answer = curl(&[&url, "-H", "Content-Type: application/json", "-d", &request]);
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!((&answer["width"], &answer["seed"]), (&json!(512), &json!(1)));
    let mut decoder = Command::new("base64")
        .arg("-d")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("base64");
    let image = answer["image"].as_str().expect("a picture").to_owned();
    let mut stdin = decoder.stdin.take().expect("stdin");
    let writer = std::thread::spawn(move || stdin.write_all(image.as_bytes()).expect("written"));
    let output = decoder.wait_with_output().expect("decoded");
    writer.join().expect("written");
    output.stdout
}

/// The size in the header of a PNG, and its rows as they were filtered before compression: equal ones are
/// equal pixels.
pub fn pixels(png: &[u8]) -> (Vec<u8>, Vec<u8>) {
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "no PNG: {}", String::from_utf8_lossy(png));
    let (mut at, mut header, mut data) = (8, Vec::new(), Vec::new());
    while at < png.len() {
        let length = u32::from_be_bytes(png[at..at + 4].try_into().expect("four bytes")) as usize;
        let content = &png[at + 8..at + 8 + length];
        match &png[at + 4..at + 8] {
            b"IHDR" => header = content.to_vec(),
            b"IDAT" => data.extend_from_slice(content),
            _ => {}
        }
        at += 12 + length;
    }
    let mut rows = Vec::new();
    flate2::read::ZlibDecoder::new(data.as_slice()).read_to_end(&mut rows).expect("compressed rows");
    assert!(rows.len() > 512 * 512);
    (header, rows)
}

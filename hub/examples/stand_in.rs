// SPDX-License-Identifier: Apache-2.0
//! The tests' stand-in of the Hub as a program: `stand_in ORG/NAME MEGABYTES…` serves files of noise of those sizes,
//! prints its endpoint, and runs until it is stopped. For `benches/download.py`.

#[path = "../tests/it/stand_in.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod stand_in;

use std::sync::Arc;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [repo, sizes @ ..] = arguments.as_slice() else {
        eprintln!("usage: stand_in ORG/NAME MEGABYTES…");
        std::process::exit(2);
    };
    let hub = Arc::new(stand_in::Hub::default());
    let mut state = 1_u64;
    let files: Vec<(String, Vec<u8>)> = sizes
        .iter()
        .enumerate()
        .map(|(index, size)| {
            let length = size.parse::<usize>().expect("a number of megabytes") * 1_000_000;
            let mut bytes = Vec::with_capacity(length + 8);
            while bytes.len() < length {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                bytes.extend_from_slice(&state.to_le_bytes());
            }
            bytes.truncate(length);
            (format!("model-{index}.safetensors"), bytes)
        })
        .collect();
    let files: Vec<_> = files.into_iter().map(|(path, bytes)| (path, bytes.into())).collect();
    let files: Vec<_> = files
        .iter()
        .map(|(path, bytes): &(String, axum::body::Bytes)| (path.as_str(), bytes.clone()))
        .collect();
    hub.commit(repo, &files);
    println!("http://{}", hub.start().await);
    std::future::pending::<()>().await;
}

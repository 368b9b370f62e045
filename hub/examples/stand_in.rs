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
    let files: Vec<_> = sizes
        .iter()
        .zip(0..)
        .map(|(size, index)| {
            let length = size.parse::<usize>().expect("a number of megabytes") * 1_000_000;
            (format!("model-{index}.safetensors"), stand_in::noise(index, length))
        })
        .collect();
    let files: Vec<_> = files.iter().map(|(path, bytes)| (path.as_str(), bytes.clone())).collect();
    hub.commit(repo, &files);
    println!("http://{}", hub.start().await);
    std::future::pending::<()>().await;
}

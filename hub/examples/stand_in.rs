// SPDX-License-Identifier: Apache-2.0
//! The tests' stand-in of the Hub as a program, for tests in other languages and `benches/download.py`:
//!
//!     stand_in ORG/NAME MEGABYTES…             files of noise of those sizes
//!     stand_in ORG/NAME@REVISION DIRECTORY     the files of a directory
//!
//! Prints its endpoint, and runs until it is stopped.

#[path = "../tests/it/stand_in.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod stand_in;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use axum::body::Bytes;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [repo, content @ ..] = arguments.as_slice() else {
        eprintln!("usage: stand_in ORG/NAME MEGABYTES… | ORG/NAME@REVISION DIRECTORY");
        std::process::exit(2);
    };
    let hub = Arc::new(stand_in::Hub::default());
    if let (Some((repo, revision)), [directory]) = (repo.split_once('@'), content) {
        let commits = BTreeMap::from([(revision.to_owned(), stand_in::files(Path::new(directory)))]);
        let repository = stand_in::Repo { main: revision.into(), commits, ..stand_in::Repo::default() };
        hub.repos.lock().expect("hub").insert(repo.into(), repository);
    } else {
        let files: Vec<_> = content.iter().zip(0..).map(|(size, index)| noise(index, size)).collect();
        let files: Vec<_> = files.iter().map(|(path, bytes)| (path.as_str(), bytes.clone())).collect();
        hub.commit(repo, &files);
    }
    println!("http://{}", hub.start().await);
    std::future::pending::<()>().await;
}

fn noise(index: u64, megabytes: &str) -> (String, Bytes) {
    let length = megabytes.parse::<usize>().expect("a number of megabytes") * 1_000_000;
    (format!("model-{index}.safetensors"), stand_in::noise(index, length))
}

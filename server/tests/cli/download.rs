// SPDX-License-Identifier: Apache-2.0
//! `serve --download`: the pinned revision from a hub into the cache, then the ready line; nothing again when it is there.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Output, Stdio},
    sync::Arc,
};

use flux2::spec::KLEIN;

use crate::{
    stand_in::{Hub, Repo, error},
    support::tiny,
};

fn files(dir: &Path, below: &str, files: &mut BTreeMap<String, axum::body::Bytes>) {
    for entry in fs::read_dir(dir).expect("a directory").flatten() {
        let path = format!("{below}{}", entry.file_name().to_str().expect("UTF-8"));
        if entry.path().is_dir() {
            self::files(&entry.path(), &format!("{path}/"), files);
        } else {
            files.insert(path, fs::read(entry.path()).expect("a file").into());
        }
    }
}

/// A server that downloads from `endpoint` into `home`.
fn serve(endpoint: &str, home: &Path, offline: bool) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux2-server"));
    command
        .args(["serve", "--download", "--port=0", "--small-sizes", "--warm-up=0"])
        .env_clear()
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", home)
        .env("HF_HUB_OFFLINE", if offline { "1" } else { "0" })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Reads up to the ready line, then ends it.
fn ready(mut command: Command) -> bool {
    let mut child = command.stderr(Stdio::null()).spawn().expect("the server starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let ready = lines.any(|line| line.expect("a line").contains("Application startup complete"));
    child.kill().expect("it runs");
    child.wait().expect("an end");
    ready
}

#[test]
fn the_pinned_weights_are_downloaded_once_and_served_offline_after() {
    let mut repo = Repo { main: KLEIN.revision.into(), ..Repo::default() };
    let mut checkpoint = BTreeMap::from([("single-file.safetensors".to_owned(), vec![0; 1000].into())]);
    files(&tiny(), "", &mut checkpoint);
    repo.commits.insert(KLEIN.revision.into(), checkpoint);
    let hub = Arc::new(Hub::default());
    hub.repos.lock().expect("hub").insert(KLEIN.repository.into(), repo);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let endpoint = format!("http://{}", runtime.block_on(hub.start()));
    let home = tempfile::tempdir().expect("a directory");

    let ends = |output: Output, code: i32, words: &[&str]| {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    hub.break_with(|_, _| Some(error(401, "GatedRepo", "Ask for access.")));
    let output = serve(&endpoint, home.path(), false).output().expect("the server starts");
    ends(output, 6, &["is gated", "accept its conditions at", "no token was sent"]);
    hub.mend();
    let output = serve(&endpoint, home.path(), true).output().expect("the server starts");
    ends(output, 5, &["offline"]);

    assert!(ready(serve(&endpoint, home.path(), false)));
    assert!(hub.downloads().iter().all(|ask| !ask.path.ends_with("single-file.safetensors")));
    let asked = hub.seen.lock().expect("hub").len();
    assert!(ready(serve(&endpoint, home.path(), true)));
    assert_eq!(hub.seen.lock().expect("hub").len(), asked, "nothing is asked again");
}

// SPDX-License-Identifier: Apache-2.0
//! `serve --download`: the pinned revision from a hub into the cache, then the ready line; nothing again when it is there.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Output, Stdio},
    sync::Arc,
};

use flux2::spec::{DEV, KLEIN, ModelSpec};

use crate::{
    stand_in::{Hub, Repo, error, files},
    support::{root, tiny},
};

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

/// A hub that has a checkpoint under a published model's name, and further files.
fn hub(spec: &ModelSpec, checkpoint: &Path, further: &[&str]) -> (Arc<Hub>, String, tokio::runtime::Runtime) {
    let mut repo = Repo { main: spec.revision.into(), ..Repo::default() };
    let mut all = files(checkpoint);
    all.extend(further.iter().map(|name| ((*name).to_owned(), vec![0; 1000].into())));
    repo.commits.insert(spec.revision.into(), all);
    let hub = Arc::new(Hub::default());
    hub.repos.lock().expect("hub").insert(spec.repository.into(), repo);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let endpoint = format!("http://{}", runtime.block_on(hub.start()));
    (hub, endpoint, runtime)
}

#[track_caller]
fn ends(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn the_pinned_weights_are_downloaded_once_and_served_offline_after() {
    let (hub, endpoint, _runtime) = hub(&KLEIN, &tiny(), &["single-file.safetensors"]);
    let home = tempfile::tempdir().expect("a directory");
    hub.break_with(|_, _| Some(error(401, "GatedRepo", "Ask for access.")));
    let output = serve(&endpoint, home.path(), false).output().expect("the server starts");
    ends(&output, 6, &["is gated", "accept its conditions at", "no token was sent"]);
    hub.mend();
    let output = serve(&endpoint, home.path(), true).output().expect("the server starts");
    ends(&output, 5, &["offline"]);

    assert!(ready(serve(&endpoint, home.path(), false)));
    assert!(hub.downloads().iter().all(|ask| !ask.path.ends_with("single-file.safetensors")));
    let asked = hub.seen.lock().expect("hub").len();
    assert!(ready(serve(&endpoint, home.path(), true)));
    assert_eq!(hub.seen.lock().expect("hub").len(), asked, "nothing is asked again");
}

#[test]
fn dev_is_downloaded_by_its_name_without_the_shards_that_nothing_reads() {
    let checkpoint = root().join("code/tests/fixtures/dev/tiny");
    let further = [DEV.unneeded_files, &["flux2-dev.safetensors", "ae.safetensors"]].concat();
    let (hub, endpoint, _runtime) = hub(&DEV, &checkpoint, &further);
    let home = tempfile::tempdir().expect("a directory");
    let serve = || {
        let mut command = serve(&endpoint, home.path(), false);
        command.env("FLUX2_MODEL", "dev");
        command
    };
    hub.break_with(|_, _| Some(error(403, "GatedRepo", "Access to this model is restricted.")));
    ends(&serve().output().expect("the server starts"), 6, &["black-forest-labs/FLUX.2-dev is gated"]);
    hub.mend();
    assert!(ready(serve()));
    let asked = hub.downloads();
    assert!(asked.iter().any(|ask| ask.path.ends_with("text_encoder/model-00001-of-00003.safetensors")));
    for file in further {
        assert!(asked.iter().all(|ask| !ask.path.ends_with(file)), "{file}");
    }
}

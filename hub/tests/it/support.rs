// SPDX-License-Identifier: Apache-2.0
//! What the tests need: contents, settings, a place, and bodies that go wrong.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    response::Response,
};
use futures_util::{StreamExt as _, stream};
use hub::{Error, Fetched, Progress, Settings, Want, fetch};
use tempfile::TempDir;

pub use crate::stand_in::noise;
use crate::stand_in::{Ask, Hub, file};

/// The repository of the tests.
pub const REPO: &str = "org/weights";

/// A hub with one repository, a cache, and what the progress said.
pub struct Place {
    /// The hub.
    pub hub: Arc<Hub>,
    /// Its files.
    pub files: Vec<(&'static str, Bytes)>,
    /// The commit of main.
    pub commit: String,
    /// The cache and whatever else.
    pub dir: TempDir,
    /// Where they are.
    pub settings: Settings,
    /// Notes so far.
    pub notes: Mutex<Vec<String>>,
}

impl Progress for Place {
    fn note(&self, text: &str) {
        self.notes.lock().expect("notes").push(text.into());
    }
}

impl Place {
    /// A small, an empty, a middle and a large file (three granules, so that there are ranges).
    pub async fn new() -> Self {
        let files = vec![
            ("config.json", Bytes::from_static(b"{\"a\": 1}\n")),
            ("empty.txt", Bytes::new()),
            ("text_encoder/model.safetensors", noise(1, 300_000)),
            ("transformer/model.safetensors", noise(2, 9_500_000)),
        ];
        Self::with(files).await
    }

    /// With files of the caller's.
    pub async fn with(files: Vec<(&'static str, Bytes)>) -> Self {
        let hub = Arc::new(Hub::default());
        let commit = hub.commit(REPO, &files);
        let address = hub.start().await;
        let dir = tempfile::tempdir().expect("dir");
        let values = [
            ("HF_ENDPOINT", format!("http://{address}")),
            ("HF_HUB_CACHE", dir.path().join("hub").display().to_string()),
            ("HF_TOKEN", "hf_test_token_of_nobody".into()),
        ];
        let settings = Settings::from(|name| {
            values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        });
        let mut settings = settings.expect("settings");
        settings.pause = Duration::from_millis(5);
        settings.stall = Duration::from_secs(30);
        settings.retries = 3;
        Self { hub, files, commit, dir, settings, notes: Mutex::default() }
    }

    /// Fetches `want`.
    pub async fn fetch(&self, want: Want) -> Result<Fetched, Error> {
        fetch(&self.settings, &[want], self).await.map(|mut all| all.remove(0))
    }

    /// Fetches everything and compares it.
    pub async fn fetch_right(&self) -> Fetched {
        let fetched = self.fetch(everything()).await.expect("a fetch");
        self.assert_right();
        fetched
    }

    /// Fetches everything and expects a failure after which nothing wrong looks right.
    pub async fn fetch_wrong(&self) -> Error {
        let error = self.fetch(everything()).await.expect_err("a failure");
        self.assert_nothing_wrong();
        error
    }

    /// The repository's folder in the cache.
    pub fn folder(&self) -> std::path::PathBuf {
        self.settings.cache.join("models--org--weights")
    }

    /// A path of the snapshot.
    pub fn snapshot(&self, path: &str) -> std::path::PathBuf {
        self.folder().join("snapshots").join(&self.commit).join(path)
    }

    /// Every file is there with its bytes, and nothing is left over.
    pub fn assert_right(&self) {
        for (path, bytes) in &self.files {
            let found = fs::read(self.snapshot(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(found == *bytes, "{path} has other bytes");
        }
        let left: Vec<_> =
            names(&self.folder().join("blobs")).into_iter().filter(|name| name.contains('.')).collect();
        assert!(left.is_empty(), "left over: {left:?}");
        self.assert_nothing_wrong();
    }

    /// Whatever stands under a final name has the bytes of that name.
    pub fn assert_nothing_wrong(&self) {
        let known: Vec<String> = self
            .files
            .iter()
            .flat_map(|(_, bytes)| [crate::stand_in::sha256(bytes), crate::stand_in::git_id(bytes)])
            .collect();
        for name in names(&self.folder().join("blobs")).into_iter().filter(|name| !name.contains('.')) {
            let bytes = fs::read(self.folder().join("blobs").join(&name)).expect("blob");
            assert!(known.contains(&name), "{name} is no blob of the repository");
            assert!(
                crate::stand_in::sha256(&bytes) == name || crate::stand_in::git_id(&bytes) == name,
                "{name} is wrong"
            );
        }
        for (path, bytes) in &self.files {
            if let Ok(found) = fs::read(self.snapshot(path)) {
                assert!(found == *bytes, "{path} looks right and is wrong");
            }
        }
    }

    /// All notes in one text.
    pub fn noted(&self) -> String {
        self.notes.lock().expect("notes").join("\n")
    }
}

/// What is asked for: everything of main.
pub fn everything() -> Want {
    Want { repo: REPO.into(), revision: "main".into(), ..Want::default() }
}

/// The names in a directory; none if it is absent.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// True for the large file.
pub fn large(ask: &Ask) -> bool {
    ask.path.ends_with("transformer/model.safetensors")
}

/// The good answer, whose body ends after `bytes` with the connection.
pub fn cut(ask: &Ask, content: &Bytes, bytes: usize) -> Response {
    broken(ask, content, bytes, stream::once(async { Err(std::io::Error::other("cut")) }).boxed())
}

/// The good answer, whose body stops after `bytes` and never goes on.
pub fn stalled(ask: &Ask, content: &Bytes, bytes: usize) -> Response {
    broken(ask, content, bytes, stream::pending().boxed())
}

fn broken(
    ask: &Ask,
    content: &Bytes,
    bytes: usize,
    end: stream::BoxStream<'static, std::io::Result<Bytes>>,
) -> Response {
    let (parts, _) = file(ask, "commit", content).into_parts();
    let (first, last) = ask.range.unwrap_or((0, u64::MAX));
    let whole = content.slice(first as usize..(last.saturating_add(1) as usize).min(content.len()));
    let start = stream::once(async move { Ok(whole.slice(..bytes.min(whole.len()))) });
    // The server sends nothing before it knows that more may come.
    let pause = stream::once(async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        Ok(Bytes::new())
    });
    Response::from_parts(parts, Body::from_stream(start.chain(pause).chain(end)))
}

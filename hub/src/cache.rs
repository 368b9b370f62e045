// SPDX-License-Identifier: Apache-2.0
//! The cache on disk, as Python's huggingface_hub lays it out and reads it back.
//!
//! ```text
//! models--organisation--name/
//!   blobs/<sha256, or git's sha1 of a small file>
//!   snapshots/<commit>/<path> → ../../blobs/…
//!   refs/<branch>               the commit it stood for
//!   .files/<commit>.json        ours: the list of that commit, and which of its files were verified here
//! ```
//!
//! The names of this layout are hf-hub's; everything that moves bytes is ours.

use std::{
    collections::BTreeSet,
    fs, io,
    io::{Read as _, Write as _},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha1::{Digest as _, Sha1};
use sha2::Sha256;

use crate::{
    error::{At, Result},
    listing::{File, Id},
    partial,
};

/// What names the places of a repository in a cache.
pub trait Layout {
    /// The repository's directory.
    fn folder(&self) -> PathBuf;
    /// The directory of a commit.
    fn snapshot(&self, commit: &str) -> PathBuf;
}

/// hf-hub's names.
#[derive(Debug)]
struct Names {
    cache: hf_hub::Cache,
    repo: hf_hub::Repo,
}

impl Layout for Names {
    fn folder(&self) -> PathBuf {
        self.cache.path().join(self.repo.folder_name())
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.cache.repo(self.repo.clone()).pointer_path(commit)
    }
}

/// A repository in the cache.
#[derive(Debug)]
pub struct Cache {
    names: Names,
}

/// What is known here about a commit.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Record {
    /// Every file of the commit.
    pub files: Vec<File>,
    /// Paths whose bytes were hashed here and found right.
    pub verified: BTreeSet<String>,
}

impl Cache {
    /// `repo` in the cache at `root`.
    pub fn new(root: &Path, repo: &str) -> Self {
        let cache = hf_hub::Cache::new(root.to_path_buf());
        Self { names: Names { cache, repo: hf_hub::Repo::model(repo.into()) } }
    }

    /// Where blobs are.
    pub fn blobs(&self) -> PathBuf {
        self.names.folder().join("blobs")
    }

    /// Where a blob is or will be.
    pub fn blob(&self, id: &Id) -> PathBuf {
        self.blobs().join(id.hex())
    }

    /// The directory of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.names.snapshot(commit)
    }

    /// The commit that a revision stood for when it was last fetched.
    pub fn reference(&self, revision: &str) -> Option<String> {
        let text = fs::read_to_string(self.names.folder().join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|text| crate::repo::is_commit(text))
    }

    /// Remembers what a revision stands for.
    pub fn set_reference(&self, revision: &str, commit: &str) -> Result<()> {
        if self.reference(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write_aside(&self.names.folder().join("refs").join(revision), commit.as_bytes())
    }

    fn record_path(&self, commit: &str) -> PathBuf {
        self.names.folder().join(".files").join(format!("{commit}.json"))
    }

    /// What is known about a commit. A record that cannot be read is none: it is only a saving.
    pub fn record(&self, commit: &str) -> Option<Record> {
        serde_json::from_slice(&fs::read(self.record_path(commit)).ok()?).ok()
    }

    /// Remembers what is known about a commit.
    pub fn set_record(&self, commit: &str, record: &Record) -> Result<()> {
        let text = serde_json::to_vec(record).expect("a record is plain data");
        let path = self.record_path(commit);
        if fs::read(&path).is_ok_and(|old| old == text) {
            return Ok(());
        }
        write_aside(&path, &text)
    }

    /// Links a path of a snapshot to its blob.
    pub fn link(&self, commit: &str, file: &File) -> Result<()> {
        let pointer = self.snapshot(commit).join(&file.path);
        let up = "../".repeat(file.path.split('/').count() + 1);
        let target = format!("{up}blobs/{}", file.id.hex());
        if fs::read_link(&pointer).is_ok_and(|old| old == Path::new(&target)) {
            return Ok(());
        }
        let dir = pointer.parent().unwrap_or(&pointer);
        fs::create_dir_all(dir).at("create", dir)?;
        let aside = dir.join(format!(".{}", partial::unique()));
        symlink(&target, &aside).at("link", &pointer)?;
        fs::rename(&aside, &pointer).at("link", &pointer)
    }
}

/// True if the bytes at `path` are the file's.
pub fn is_right(path: &Path, file: &File) -> Result<bool> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() && meta.len() == file.size => Ok(hash(path, &file.id)? == file.id),
        Ok(_) => Ok(false),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error).at("inspect", path),
    }
}

/// Hashes a file by the method of `like`, in pieces.
pub fn hash(path: &Path, like: &Id) -> Result<Id> {
    let mut file = fs::File::open(path).at("open", path)?;
    let size = file.metadata().at("inspect", path)?.len();
    let mut sha256 = Sha256::new();
    let mut sha1 = Sha1::new();
    sha1.update(format!("blob {size}\0"));
    let mut buffer = vec![0; 1 << 18];
    loop {
        let count = file.read(&mut buffer).at("read", path)?;
        match like {
            _ if count == 0 => break,
            Id::Sha256(_) => sha256.update(&buffer[..count]),
            Id::Git(_) => sha1.update(&buffer[..count]),
        }
    }
    Ok(match like {
        Id::Sha256(_) => Id::Sha256(hex(&sha256.finalize())),
        Id::Git(_) => Id::Git(hex(&sha1.finalize())),
    })
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes beside the target, then renames.
fn write_aside(path: &Path, bytes: &[u8]) -> Result<()> {
    let dir = path.parent().unwrap_or(path);
    fs::create_dir_all(dir).at("create", dir)?;
    let aside = dir.join(format!(".{}", partial::unique()));
    let mut file = fs::File::create_new(&aside).at("write", &aside)?;
    file.write_all(bytes).at("write", &aside)?;
    fs::rename(&aside, path).at("write", path)
}

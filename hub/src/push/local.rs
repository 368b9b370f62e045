// SPDX-License-Identifier: Apache-2.0
//! A file that is to be pushed: its hashes, and its bytes piece by piece, so that memory does not grow with it.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use futures_util::stream;
use sha1::{Digest as _, Sha1};
use sha2::Sha256;

use crate::{
    cache::hex,
    error::{At, Error, Kind, Result},
    http::{Beat, Content},
    listing::{File, Id},
};

/// Bytes that are read and sent at a time.
const PIECE: u64 = 1 << 18;
/// Bytes by which the Hub judges what a file is.
const SAMPLE: usize = 512;

/// Where the bytes are.
#[derive(Debug, Clone)]
enum Source {
    File(PathBuf),
    Bytes(Bytes),
}

/// A file to push.
#[derive(Debug, Clone)]
pub struct Local {
    /// Path in the repository.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of the content.
    pub sha256: String,
    /// Git's SHA-1 of the content as a blob.
    pub git: String,
    source: Source,
}

impl Local {
    /// The file `at` under the name `path`. Reads all of it.
    pub fn file(path: &str, at: &Path) -> Result<Self> {
        let mut file = fs::File::open(at).at("open", at)?;
        let size = file.metadata().at("inspect", at)?.len();
        let (mut sha256, mut sha1) = (Sha256::new(), Sha1::new());
        sha1.update(format!("blob {size}\0"));
        let mut buffer = vec![0; PIECE as usize];
        let mut read = 0;
        loop {
            let count = file.read(&mut buffer).at("read", at)?;
            if count == 0 {
                break;
            }
            sha256.update(&buffer[..count]);
            sha1.update(&buffer[..count]);
            read += count as u64;
        }
        if read != size {
            return Err(changed(at));
        }
        let (sha256, git) = (hex(&sha256.finalize()), hex(&sha1.finalize()));
        Ok(Self { path: path.into(), size, sha256, git, source: Source::File(at.into()) })
    }

    /// Bytes of the caller's under the name `path`.
    pub fn bytes(path: &str, bytes: Bytes) -> Self {
        let git = Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(&bytes).finalize();
        Self {
            path: path.into(),
            size: bytes.len() as u64,
            sha256: hex(&Sha256::digest(&bytes)),
            git: hex(&git),
            source: Source::Bytes(bytes),
        }
    }

    /// True if a repository's file has these bytes.
    pub fn is(&self, file: &File) -> bool {
        file.size == self.size
            && match &file.id {
                Id::Sha256(hex) => *hex == self.sha256,
                Id::Git(hex) => *hex == self.git,
            }
    }

    /// Its first bytes.
    pub fn sample(&self) -> Result<Bytes> {
        self.range(0, self.size.min(SAMPLE as u64))
    }

    /// All of it, for what travels inside a request.
    pub fn all(&self) -> Result<Bytes> {
        self.range(0, self.size)
    }

    /// The bytes `[start, end)`.
    fn range(&self, start: u64, end: u64) -> Result<Bytes> {
        match &self.source {
            Source::Bytes(bytes) => Ok(bytes.slice(start as usize..end as usize)),
            Source::File(path) => {
                let file = fs::File::open(path).at("open", path)?;
                let mut bytes = vec![0; (end - start) as usize];
                file.read_exact_at(&mut bytes, start).at("read", path)?;
                Ok(bytes.into())
            }
        }
    }

    /// The bytes `[start, end)` as the body of a request.
    pub fn content(&self, start: u64, end: u64) -> Content {
        let local = self.clone();
        let open = move |beat: Arc<Beat>| {
            let file = match &local.source {
                Source::File(path) => Some(fs::File::open(path)),
                Source::Bytes(_) => None,
            };
            let state = (local.clone(), file, start, beat);
            let pieces = stream::try_unfold(state, move |(local, file, at, beat)| async move {
                if at == end {
                    return Ok(None);
                }
                let next = (at + PIECE).min(end);
                let (file, piece) = match file {
                    None => (None, local.range(at, next).map_err(std::io::Error::other)?),
                    Some(file) => {
                        let file = file?;
                        let mut piece = vec![0; (next - at) as usize];
                        file.read_exact_at(&mut piece, at)?;
                        (Some(Ok(file)), piece.into())
                    }
                };
                beat.sent(next - at);
                Ok::<_, std::io::Error>(Some((piece, (local, file, next, beat))))
            });
            reqwest::Body::wrap_stream(pieces)
        };
        Content::Stream { length: end - start, open: Arc::new(open) }
    }
}

fn changed(at: &Path) -> Error {
    Error::new(Kind::Other, format!("{} changed while it was read", at.display()))
        .next("let nothing write to the package while it is pushed, then run the command again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_its_bytes_have_the_same_hashes() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("hello");
        fs::write(&path, "hello\n").expect("written");
        let (file, bytes) = (
            Local::file("hello", &path).expect("read"),
            Local::bytes("hello", Bytes::from_static(b"hello\n")),
        );
        assert_eq!(file.git, "ce013625030ba8dba906f756967f9e9ca394464a", "what `git hash-object` says");
        assert_eq!((file.sha256, file.git, file.size), (bytes.sha256, bytes.git, bytes.size));
    }
}

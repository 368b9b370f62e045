// SPDX-License-Identifier: Apache-2.0
//! The two digests of a code tree.
//!
//! `code_sha256` is the one that the published format knows; consumers and other packages' cards
//! compare it. It feeds path and content without anything between them, so two different trees can
//! have the same digest, and it sees no modes. `code_tree_sha256` frames every part with its length
//! and covers modes, links and empty directories: different trees give different digests.

use std::{fs, path::Path};

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{
    error::{At, Class, Failure, Result},
    files::{self, FileType, hex},
};

/// Both digests of a tree, as 64 hexadecimal digits each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Digests {
    /// The published digest; cards show its first 16 digits.
    pub code_sha256: String,
    /// The framed digest.
    pub code_tree_sha256: String,
    /// Regular files, links to files among them.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Reads the tree once and computes both.
///
/// Published (format section C.2): all regular files, file links followed, directory links skipped,
/// sorted by components; path bytes then content bytes into one SHA-256.
///
/// Framed: the line "code tree v1\n", then for every entry length of path, path, class (`f` file, `x`
/// executable, `d` directory, `l` link), length of content, content; the content of a link is its
/// target, of a directory nothing; lengths are 8 bytes little-endian.
pub fn digest(root: &Path) -> Result<Digests> {
    digest_as(root, |_, executable| executable)
}

/// The same with modes from elsewhere: `executable` gets a file's path and what its mode here says.
pub fn digest_as(root: &Path, executable: impl Fn(&str, bool) -> bool) -> Result<Digests> {
    if !root.is_dir() {
        let failure = Failure::new(Class::Usage, format!("{} is not a directory", root.display()));
        return Err(failure.next("give the directory that holds the code"));
    }
    let (mut published, mut framed) = (Sha256::new(), Sha256::new());
    framed.update("code tree v1\n");
    let (mut count, mut bytes) = (0, 0);
    for entry in files::walk(root)? {
        let (class, content) = match entry.class {
            FileType::Directory => (b'd', Vec::new()),
            FileType::File(mode) => (
                if executable(&entry.path, mode) { b'x' } else { b'f' },
                fs::read(&entry.full).at("read", &entry.full)?,
            ),
            FileType::Link => {
                let target = fs::read_link(&entry.full).at("read", &entry.full)?;
                let target = target.to_str().map(|text| text.as_bytes().to_vec());
                (
                    b'l',
                    target.ok_or_else(|| {
                        Failure::new(
                            Class::Failure,
                            format!("the target of {} is not UTF-8", entry.full.display()),
                        )
                    })?,
                )
            }
        };
        frame(&mut framed, entry.path.as_bytes());
        framed.update([class]);
        frame(&mut framed, &content);
        let followed = match entry.class {
            FileType::File(_) => Some(content),
            FileType::Link if entry.full.is_file() => Some(fs::read(&entry.full).at("read", &entry.full)?),
            _ => None,
        };
        if let Some(content) = followed {
            published.update(&entry.path);
            published.update(&content);
            count += 1;
            bytes += content.len() as u64;
        }
    }
    Ok(Digests {
        code_sha256: hex(published.finalize()),
        code_tree_sha256: hex(framed.finalize()),
        files: count,
        bytes,
    })
}

fn frame(state: &mut Sha256, part: &[u8]) {
    state.update((part.len() as u64).to_le_bytes());
    state.update(part);
}

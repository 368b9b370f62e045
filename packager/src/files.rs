// SPDX-License-Identifier: Apache-2.0
//! Files: digests of bytes, walking in the one order that digests use, writing aside.

use std::{
    fmt::Write as _,
    fs,
    io::{Read, Write as _},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::error::{At, Class, Failure, Result};

/// Lower-case hexadecimal.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256 of some bytes, as 64 hexadecimal digits.
pub fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex(Sha256::digest(bytes))
}

/// SHA-256 and size of a file, read in pieces.
pub fn sha256_file(path: &Path) -> Result<(String, u64)> {
    let mut file = fs::File::open(path).at("open", path)?;
    let mut state = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    let mut size = 0;
    loop {
        let count = file.read(&mut buffer).at("read", path)?;
        if count == 0 {
            return Ok((hex(state.finalize()), size));
        }
        state.update(&buffer[..count]);
        size += count as u64;
    }
}

/// What stands in a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileType {
    /// A regular file; `true` if anyone may execute it.
    File(bool),
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
}

/// One entry of a tree.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Path below the root, components joined by "/".
    pub path: String,
    /// Where it is.
    pub full: PathBuf,
    /// What it is; links are not followed.
    pub class: FileType,
}

/// Everything below `root`, dotfiles included, links not followed, sorted by path components:
/// `foo/x` < `foo-bar/x` < `foo.txt`, which is not the order of the joined strings. In a snapshot of the Hugging Face
/// cache the links to its blobs are how files are kept there, and count as the files.
pub fn walk(root: &Path) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    descend(root, root, blobs(root).as_deref(), &mut entries)?;
    entries.sort_by(|a, b| a.path.split('/').cmp(b.path.split('/')));
    Ok(entries)
}

/// The blobs beside the snapshot that `root` is, or lies in.
fn blobs(root: &Path) -> Option<PathBuf> {
    let root = fs::canonicalize(root).ok()?;
    let snapshots = root.ancestors().find(|path| path.file_name().is_some_and(|name| name == "snapshots"))?;
    Some(snapshots.with_file_name("blobs")).filter(|blobs| blobs.is_dir())
}

fn descend(root: &Path, dir: &Path, blobs: Option<&Path>, entries: &mut Vec<Entry>) -> Result<()> {
    for item in fs::read_dir(dir).at("list", dir)? {
        let full = item.at("list", dir)?.path();
        let path = relative(root, &full)?;
        let mut meta = full.symlink_metadata().at("inspect", &full)?;
        if meta.is_symlink() && fs::canonicalize(&full).is_ok_and(|target| target.parent() == blobs) {
            meta = full.metadata().at("inspect", &full)?;
        }
        let class = if meta.is_symlink() {
            FileType::Link
        } else if meta.is_dir() {
            FileType::Directory
        } else if meta.is_file() {
            FileType::File(executable(&meta))
        } else {
            let failure = Failure::new(
                Class::Failure,
                format!("{} is neither file, directory nor link", full.display()),
            );
            return Err(failure.next("remove it"));
        };
        if class == FileType::Directory {
            descend(root, &full, blobs, entries)?;
        }
        entries.push(Entry { path, full, class });
    }
    Ok(())
}

/// True if anyone may execute the file.
pub fn executable(meta: &fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    meta.permissions().mode() & 0o111 != 0
}

/// The path below `root`, with "/"; a name that is not UTF-8 is refused, as it has no digest.
pub fn relative(root: &Path, full: &Path) -> Result<String> {
    let below = full.strip_prefix(root).unwrap_or(full);
    below.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::new(Class::Failure, format!("the file name {} is not UTF-8", full.display()))
            .next("rename the file")
    })
}

/// Writes beside the target, then renames: the target is either the old file or the whole new one.
pub fn write_aside(path: &Path, bytes: &[u8]) -> Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(dir).at("write in", dir)?;
    file.write_all(bytes).at("write", path)?;
    set_mode(file.path(), 0o644)?;
    file.persist(path).map_err(|error| Failure::io("write", path, &error.error))?;
    Ok(())
}

/// Sets the permission bits.
pub fn set_mode(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).at("set the mode of", path)
}

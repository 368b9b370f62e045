// SPDX-License-Identifier: Apache-2.0
//! The file that a picture is written to: known to be writable before the work, whole or untouched after it.

use std::{
    fs::Permissions,
    io::{ErrorKind, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::failure::Failure;

/// A PNG file to be written.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
}

impl Output {
    /// Takes `path` after making sure that a file can be written there. Leaves nothing behind.
    pub fn new(path: &Path) -> Result<Self, Failure> {
        let refuse = |why: &str| Failure::Usage(format!("--out {}: {why}", path.display()));
        if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png")) {
            return Err(refuse("pictures are written as PNG, give a name that ends in .png"));
        }
        // A link keeps pointing where it points: what is replaced is its target.
        let path = if path.is_symlink() {
            path.canonicalize().map_err(|error| refuse(&format!("the link leads nowhere: {error}")))?
        } else {
            path.to_owned()
        };
        if let Ok(existing) = path.metadata() {
            if !existing.is_file() {
                return Err(refuse("exists and is not a file, choose another name"));
            }
            if existing.permissions().readonly() {
                return Err(refuse("exists and is read-only, choose another name"));
            }
        }
        let output = Self { path };
        // A file without a name: nothing is left behind, whatever happens.
        tempfile::tempfile_in(output.directory()).map_err(|error| match error.kind() {
            ErrorKind::NotFound => refuse("its directory does not exist, make it first"),
            // The error itself names a file that nobody asked for.
            kind => refuse(&format!("cannot be written: {kind}")),
        })?;
        Ok(output)
    }

    /// Where the picture goes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes aside, then renames, so that a reader sees the old file or the whole new one.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        let write = || {
            let mut file = tempfile::Builder::new()
                .prefix(".flux2-")
                .suffix(".png.part")
                .permissions(Permissions::from_mode(0o666)) // less the umask, like any new file
                .tempfile_in(self.directory())?;
            file.write_all(bytes)?;
            file.as_file().sync_all()?;
            file.persist(&self.path)?;
            Ok::<_, std::io::Error>(())
        };
        write().map_err(|error| {
            Failure::Other(format!("{}: the picture cannot be written: {error}", self.path.display()))
        })
    }

    fn directory(&self) -> &Path {
        match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        }
    }
}

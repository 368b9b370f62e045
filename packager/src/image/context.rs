// SPDX-License-Identifier: Apache-2.0
//! What the engine gets: the staged code, the files that the manifest lists, and nothing else.
//!
//! The context is sent as one tar that is written while it is sent, so that memory stays flat; entries
//! are sorted, owned by root, with one fixed time, so that equal inputs are equal bytes.

use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use crate::{
    error::{At, Class, Failure, Result},
    files::{self, FileType, hex},
    manifest::model::{Build, RelativePath},
    stage::{Dropped, Item, Items, collect},
};

/// Name of the optional certificates in the context.
const CA: &str = "build-ca.crt";

/// The files of a build, by their path in the context.
#[derive(Debug, Clone)]
pub struct Context {
    items: Items,
    epoch: u64,
}

impl Context {
    /// Collects the context. `code` is the staged tree; `ca` a bundle of certificates for the builder
    /// stage. The rules of staging hold for every path: secrets are refused, drops are listed.
    pub fn new(
        build: &Build,
        root: &Path,
        code: &Path,
        ca: Option<&Path>,
        epoch: u64,
    ) -> Result<(Self, Vec<Dropped>)> {
        let (mut items, mut dropped) = (Items::new(), Vec::new());
        collect(root, &build.context, &mut items, &mut dropped)?;
        collect(root, std::slice::from_ref(&build.dockerfile), &mut items, &mut dropped)?;
        let mut staged = Items::new();
        collect(code, &[RelativePath(".".into())], &mut staged, &mut dropped)?;
        let place = build.code.0.trim_matches('/');
        items.retain(|path, _| path != place && !path.starts_with(&format!("{place}/")));
        items.extend(staged.into_iter().map(|(path, item)| (format!("{place}/{path}"), item)));
        if let Some(ca) = ca {
            let meta = fs::metadata(ca).at("read the certificates", ca)?;
            items.insert(
                CA.into(),
                Item { source: ca.to_path_buf(), size: meta.len(), class: FileType::File(false) },
            );
        }
        Ok((Self { items, epoch }, dropped))
    }

    /// Bytes of all files.
    pub fn size(&self) -> u64 {
        self.items.values().map(|item| item.size).sum()
    }

    /// One digest over paths, modes and contents; the certificates do not count, as they do not reach
    /// the image.
    pub fn digest(&self) -> Result<String> {
        let mut state = Sha256::new();
        state.update("build context v1\n");
        for (path, item) in self.items.iter().filter(|(path, _)| *path != CA) {
            let (class, content) = match item.class {
                FileType::File(executable) => {
                    (if executable { b'x' } else { b'f' }, files::sha256_file(&item.source)?.0)
                }
                _ => (b'd', String::new()),
            };
            state.update((path.len() as u64).to_le_bytes());
            state.update(path);
            state.update([class]);
            state.update(content);
        }
        Ok(hex(state.finalize()))
    }

    /// Digest of the files below one directory of the context, as for the whole.
    pub fn part(&self, directory: &str) -> Result<Option<String>> {
        let start = format!("{directory}/");
        let items: Items = self
            .items
            .iter()
            .filter(|(path, _)| path.starts_with(&start))
            .map(|(p, i)| (p.clone(), i.clone()))
            .collect();
        if items.is_empty() { Ok(None) } else { Self { items, epoch: self.epoch }.digest().map(Some) }
    }

    /// Writes the context as one tar.
    pub fn write(&self, writer: impl Write) -> Result<()> {
        let nowhere = PathBuf::from("the build context");
        let mut tar = tar::Builder::new(writer);
        for (path, item) in &self.items {
            let mut header = tar::Header::new_gnu();
            header.set_mtime(self.epoch);
            header.set_uid(0);
            header.set_gid(0);
            if let FileType::File(executable) = item.class {
                header.set_mode(if executable { 0o755 } else { 0o644 });
                header.set_size(item.size);
                let file = fs::File::open(&item.source).at("open", &item.source)?;
                let mut exact = Exact { file, left: item.size };
                tar.append_data(&mut header, path, &mut exact).at("send", &item.source)?;
            } else {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_mode(0o755);
                header.set_size(0);
                tar.append_data(&mut header, format!("{path}/"), io::empty()).at("send", &nowhere)?;
            }
        }
        tar.finish().at("send", &nowhere)
    }
}

/// A file that must still have the size it had when it was listed.
struct Exact {
    file: fs::File,
    left: u64,
}

impl Read for Exact {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if limit == 0 {
            return Ok(0);
        }
        let count = self.file.read(&mut buffer[..limit])?;
        if count == 0 {
            return Err(io::Error::other("the file became shorter while it was sent"));
        }
        self.left -= count as u64;
        Ok(count)
    }
}

/// The time that everything in an image gets: `SOURCE_DATE_EPOCH`, else the commit's, else 1980-01-01
/// (the first that zip can hold).
pub fn epoch(dir: &Path) -> Result<u64> {
    if let Some(text) = std::env::var_os("SOURCE_DATE_EPOCH").filter(|value| !value.is_empty()) {
        return text.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
            let failure = Failure::new(Class::Usage, format!("SOURCE_DATE_EPOCH is {}", text.display()));
            failure.next("set it to whole seconds since 1970, or unset it")
        });
    }
    Ok(crate::git::commit_time(dir).and_then(|time| u64::try_from(time).ok()).unwrap_or(315_532_800))
}

// SPDX-License-Identifier: Apache-2.0
//! Making a layer the same bytes whenever and wherever it was built: entries sorted, times fixed, names
//! of owners dropped (their numbers stay). What a file contains, its mode, owner and links stay as built.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read, Seek, SeekFrom, Write},
    path::Path,
};

use flate2::read::GzDecoder;
use tar::{Builder, EntryType, Header};

use super::compress::{Blob, BlobWriter, Hashing};
use crate::error::{At, Class, Failure, Result};

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Opens a layer, plain or gzipped.
pub fn open(path: &Path) -> Result<Box<dyn Read>> {
    let mut file = File::open(path).at("open", path)?;
    let mut magic = [0; 4];
    let count = file.read(&mut magic).at("read", path)?;
    file.rewind().at("read", path)?;
    if count == 4 && magic == ZSTD {
        let failure = Failure::new(Class::Engine, "a layer of the export is compressed with zstd");
        return Err(failure
            .why("not every engine loads such layers")
            .next("export it with gzip, or turn zstd off in the builder"));
    }
    let reader = BufReader::with_capacity(1 << 16, file);
    Ok(if magic[..2] == GZIP { Box::new(GzDecoder::new(reader)) } else { Box::new(reader) })
}

/// Digest of a layer's uncompressed bytes.
pub fn diff_id(path: &Path) -> Result<String> {
    let mut reader = Hashing::new(open(path)?);
    std::io::copy(&mut reader, &mut std::io::sink()).at("read", path)?;
    Ok(reader.finish().1)
}

/// Compresses a layer as it is.
pub fn keep(layer: &Path, to: &Path) -> Result<Blob> {
    let mut writer = BlobWriter::create(to)?;
    std::io::copy(&mut open(layer)?, &mut writer).at("compress", layer)?;
    writer.finish().at("write", to)
}

/// Rewrites a layer with every time at `epoch` and compresses it. `scratch` holds the plain layer meanwhile.
pub fn rewrite(layer: &Path, scratch: &Path, to: &Path, epoch: u64) -> Result<Blob> {
    let mut plain = File::create(scratch).at("create", scratch)?;
    std::io::copy(&mut open(layer)?, &mut plain).at("write", scratch)?;
    drop(plain);
    let entries = index(scratch)?;
    let mut writer = BlobWriter::create(to)?;
    write(&entries, scratch, &mut writer, epoch).at("rewrite", layer)?;
    std::fs::remove_file(scratch).at("remove", scratch)?;
    writer.finish().at("write", to)
}

struct Entry {
    path: Vec<u8>,
    link: Option<Vec<u8>>,
    header: Header,
    /// Extended attributes: they hold file capabilities.
    attributes: BTreeMap<String, Vec<u8>>,
    at: u64,
    size: u64,
}

fn index(path: &Path) -> Result<Vec<Entry>> {
    let file = File::open(path).at("open", path)?;
    let mut archive = tar::Archive::new(BufReader::new(file));
    let mut entries = Vec::new();
    for entry in archive.entries_with_seek().at("read", path)? {
        let mut entry = entry.at("read", path)?;
        let mut attributes = BTreeMap::new();
        if let Some(extensions) = entry.pax_extensions().at("read", path)? {
            for extension in extensions {
                let extension = extension.at("read", path)?;
                if let Ok(key) = extension.key()
                    && key.starts_with("SCHILY.xattr.")
                {
                    attributes.insert(key.to_owned(), extension.value_bytes().to_vec());
                }
            }
        }
        entries.push(Entry {
            path: entry.path_bytes().into_owned(),
            link: entry.link_name_bytes().map(std::borrow::Cow::into_owned),
            header: entry.header().clone(),
            attributes,
            at: entry.raw_file_position(),
            size: entry.size(),
        });
    }
    // A hard link must follow what it links to; otherwise by path components.
    entries.sort_by(|a, b| {
        let key = |entry: &Entry| (entry.header.entry_type() == EntryType::Link, parts(&entry.path));
        key(a).cmp(&key(b))
    });
    Ok(entries)
}

fn parts(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .map(<[u8]>::to_vec)
        .collect()
}

fn write(entries: &[Entry], source: &Path, writer: impl Write, epoch: u64) -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let as_path = |bytes: &[u8]| std::path::PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
    let mut file = File::open(source)?;
    let mut tar = Builder::new(writer);
    for entry in entries {
        if !entry.attributes.is_empty() {
            tar.append_pax_extensions(
                entry.attributes.iter().map(|(key, value)| (key.as_str(), value.as_slice())),
            )?;
        }
        let old = &entry.header;
        let mut header = Header::new_gnu();
        header.set_entry_type(old.entry_type());
        header.set_mode(old.mode()? & 0o7777);
        header.set_uid(old.uid()?);
        header.set_gid(old.gid()?);
        header.set_mtime(epoch);
        header.set_size(entry.size);
        if matches!(old.entry_type(), EntryType::Char | EntryType::Block) {
            header.set_device_major(old.device_major()?.unwrap_or_default())?;
            header.set_device_minor(old.device_minor()?.unwrap_or_default())?;
        }
        let path = as_path(&entry.path);
        if let Some(link) = &entry.link {
            header.set_size(0);
            tar.append_link(&mut header, &path, as_path(link))?;
        } else {
            file.seek(SeekFrom::Start(entry.at))?;
            tar.append_data(&mut header, &path, (&mut file).take(entry.size))?;
        }
    }
    tar.finish()
}

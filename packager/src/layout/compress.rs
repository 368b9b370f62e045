// SPDX-License-Identifier: Apache-2.0
//! Gzip with fixed settings, hashed on both sides while it is written.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use flate2::{Compression, GzBuilder, write::GzEncoder};
use sha2::{Digest as _, Sha256};

use crate::{
    error::{At, Result},
    files::hex,
};

/// A compressed file: digest and size of the blob, digest and size of what went in.
#[derive(Debug, Clone)]
pub struct Blob {
    /// Hexadecimal digest of the compressed bytes.
    pub digest: String,
    /// Compressed bytes.
    pub size: u64,
    /// Hexadecimal digest of the uncompressed bytes.
    pub diff: String,
    /// Uncompressed bytes.
    pub unpacked: u64,
}

/// Counts and hashes what passes.
pub struct Hashing<W> {
    inner: W,
    state: Sha256,
    count: u64,
}

impl<W> Hashing<W> {
    /// Around a writer or reader.
    pub fn new(inner: W) -> Self {
        Self { inner, state: Sha256::new(), count: 0 }
    }

    /// Digest and count.
    pub fn finish(self) -> (W, String, u64) {
        (self.inner, hex(self.state.finalize()), self.count)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.state.update(&bytes[..count]);
        self.count += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.state.update(&buffer[..count]);
        self.count += count as u64;
        Ok(count)
    }
}

/// Writes a blob through gzip: level 6, no time, no name, unknown system, so that equal input gives equal
/// bytes. gzip and not zstd: older engines load gzip only.
pub struct BlobWriter(Hashing<GzEncoder<Hashing<File>>>);

impl BlobWriter {
    /// Writes to `path`.
    pub fn create(path: &Path) -> Result<Self> {
        let file = Hashing::new(File::create(path).at("create", path)?);
        let encoder = GzBuilder::new().mtime(0).operating_system(255).write(file, Compression::new(6));
        Ok(Self(Hashing::new(encoder)))
    }

    /// Ends the blob.
    pub fn finish(self) -> io::Result<Blob> {
        let (encoder, diff, unpacked) = self.0.finish();
        let (mut file, digest, size) = encoder.finish()?.finish();
        file.flush()?;
        Ok(Blob { digest, size, diff, unpacked })
    }
}

impl Write for BlobWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Reading one text file out of a wheel, which is a zip archive.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use flate2::read::DeflateDecoder;

use crate::error::{At, Class, Failure, Result};

const END: &[u8] = b"PK\x05\x06";
const CENTRAL: &[u8] = b"PK\x01\x02";
/// More than any text file that is read this way.
const MAX_TEXT: u64 = 1 << 20;

/// The text of the member whose path ends in `suffix`; none if there is no such member.
pub fn member(path: &Path, suffix: &str) -> Result<Option<String>> {
    let mut file = File::open(path).at("open", path)?;
    read(&mut file, suffix)
        .map_err(|why| Failure::new(Class::Failure, format!("{} is not a wheel", path.display())).why(why))
}

/// Walks the central directory (zip without zip64: a wheel's offsets stay below 4 GiB).
fn read(file: &mut File, suffix: &str) -> Result<Option<String>, String> {
    let text = |error: std::io::Error| error.to_string();
    let length = file.seek(SeekFrom::End(0)).map_err(text)?;
    let tail_length = length.min(1 << 16);
    file.seek(SeekFrom::Start(length - tail_length)).map_err(text)?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).map_err(text)?;
    let end = tail.windows(4).rposition(|part| part == END).ok_or("no end of central directory")?;
    let (size, start) = (number(&tail, end + 12, 4)?, number(&tail, end + 16, 4)?);
    file.seek(SeekFrom::Start(start)).map_err(text)?;
    let mut directory = Vec::new();
    file.take(size).read_to_end(&mut directory).map_err(text)?;
    let mut at = 0;
    while directory.get(at..at + 4) == Some(CENTRAL) {
        let (method, packed) = (number(&directory, at + 10, 2)?, number(&directory, at + 20, 4)?);
        let lengths: Vec<usize> = [28, 30, 32]
            .iter()
            .map(|offset| number(&directory, at + offset, 2).map(|n| n as usize))
            .collect::<Result<_, _>>()?;
        let header = number(&directory, at + 42, 4)?;
        let name = directory.get(at + 46..at + 46 + lengths[0]).ok_or("a cut directory")?;
        if name.ends_with(suffix.as_bytes()) {
            return content(file, header, method, packed).map(Some);
        }
        at += 46 + lengths.iter().sum::<usize>();
    }
    Ok(None)
}

fn content(file: &mut File, header: u64, method: u64, packed: u64) -> Result<String, String> {
    let text = |error: std::io::Error| error.to_string();
    file.seek(SeekFrom::Start(header)).map_err(text)?;
    let mut local = [0; 30];
    file.read_exact(&mut local).map_err(text)?;
    let skip = number(&local, 26, 2)? + number(&local, 28, 2)?;
    file.seek(SeekFrom::Start(header + 30 + skip)).map_err(text)?;
    let raw = file.take(packed);
    let mut out = String::new();
    match method {
        0 => raw.take(MAX_TEXT).read_to_string(&mut out),
        8 => DeflateDecoder::new(raw).take(MAX_TEXT).read_to_string(&mut out),
        other => return Err(format!("compression method {other}")),
    }
    .map_err(text)?;
    Ok(out)
}

fn number(bytes: &[u8], at: usize, length: usize) -> Result<u64, String> {
    let part = bytes.get(at..at + length).ok_or("a cut record")?;
    Ok(part.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

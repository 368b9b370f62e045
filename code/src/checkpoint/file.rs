// SPDX-License-Identifier: Apache-2.0
//! One safetensors file: mapped, its header checked against its length.
//!
//! Format: 8 bytes of header length (little-endian), the header as JSON, then the tensors' bytes without gaps
//! (<https://huggingface.co/docs/safetensors>). Everything here meets strangers' bytes: no length is trusted.

use std::{fs::File, path::Path, sync::Arc};

use memmap2::Mmap;
use safetensors::tensor::Metadata;

use crate::error::{Error, Result};

/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read. The 8 GB text encoder of klein needs 50 KB.
const MAX_HEADER_BYTES: usize = 16 << 20;

/// What one file holds.
pub struct Mapped {
    pub map: Arc<Mmap>,
    pub metadata: Metadata,
    /// Where the tensors' bytes begin.
    pub data_start: usize,
}

impl Mapped {
    /// Opens, maps and checks a file.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(Error::checkpoint(path, "is not a file"));
        }
        // SAFETY: the map is only read. A file changed under it by another process would change values or, cut short,
        // raise SIGBUS: checkpoints are files of a cache whose content is named by its hash and never rewritten in place.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let (metadata, data_start) = read_header(&map).map_err(|what| Error::checkpoint(path, what))?;
        Ok(Self { map: Arc::new(map), metadata, data_start })
    }
}

/// Header and start of the data of a whole file, or what is wrong with it.
pub fn read_header(bytes: &[u8]) -> Result<(Metadata, usize), String> {
    let has = bytes.len();
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("has {has} bytes, too few for a safetensors file; download it again"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES as u64 {
        return Err(format!(
            "its header claims {length} bytes (at most {MAX_HEADER_BYTES} are read): not a safetensors file, or damaged"
        ));
    }
    let length = length as usize;
    let data_start = LENGTH_BYTES + length;
    let Some(header) = rest.get(..length) else {
        return Err(format!(
            "is cut short: the header alone needs {data_start} bytes, the file has {has}; download it again"
        ));
    };
    let metadata: Metadata =
        serde_json::from_slice(header).map_err(|error| format!("its header is not valid: {error}"))?;
    // u128: the offsets are a stranger's and may add up to anything.
    let wanted = data_start as u128 + metadata.data_len() as u128;
    match (has as u128).cmp(&wanted) {
        std::cmp::Ordering::Less => Err(format!(
            "is cut short: the header describes {wanted} bytes, the file has {has}; download it again"
        )),
        std::cmp::Ordering::Greater => Err(format!(
            "is too long: the header describes {wanted} bytes, the file has {has}; download it again"
        )),
        std::cmp::Ordering::Equal => Ok((metadata, data_start)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    const ONE: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

    #[test]
    fn a_whole_file_is_read() {
        let (metadata, start) = read_header(&file(ONE, &[0; 8])).unwrap();
        assert_eq!(start, 8 + ONE.len());
        assert_eq!(metadata.info("a").unwrap().shape, [2]);
    }

    #[test]
    fn a_wrong_length_names_both_lengths() {
        let wanted = 8 + ONE.len() + 8;
        let short = read_header(&file(ONE, &[0; 7])).unwrap_err();
        assert_eq!(
            short,
            format!(
                "is cut short: the header describes {wanted} bytes, the file has {}; download it again",
                wanted - 1
            )
        );
        assert!(read_header(&file(ONE, &[0; 9])).unwrap_err().starts_with("is too long"));
        assert!(read_header(&file(ONE, &[])[..20]).unwrap_err().contains("the header alone needs"));
        assert!(read_header(b"abc").unwrap_err().starts_with("has 3 bytes"));
        assert!(read_header(b"<!doctype html><html>").unwrap_err().contains("not a safetensors file"));
    }

    #[test]
    fn offsets_that_overflow_are_refused() {
        let huge =
            format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, usize::MAX / 8);
        assert!(read_header(&file(&huge, &[])).unwrap_err().starts_with("is cut short"));
        let product = r#"{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}}"#;
        assert!(read_header(&file(product, &[0; 8])).is_err());
        let gap = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        assert!(read_header(&file(gap, &[0; 8])).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_header(&bytes);
        }

        #[test]
        fn any_json_is_refused_or_read(
            dtype in "F32|BF16|F4|U8|I64|X",
            shape in prop::collection::vec(any::<u64>(), 0..4),
            offsets in any::<(u64, u64)>(),
            data in 0usize..64,
        ) {
            let header = format!(
                r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{},{}]}}}}"#, offsets.0, offsets.1);
            let _ = read_header(&file(&header, &vec![0; data]));
        }

        #[test]
        fn a_damaged_file_is_refused_or_stays_within_its_bytes(at in 0usize..70, byte in any::<u8>()) {
            let mut bytes = file(ONE, &[0; 8]);
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok((metadata, start)) = read_header(&bytes) {
                prop_assert!(start + metadata.data_len() <= bytes.len());
            }
        }
    }
}

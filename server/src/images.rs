// SPDX-License-Identifier: Apache-2.0
//! Reference images as they come: base64 in all its forms, or the bytes of an upload.
//!
//! Nothing here is fetched: a URL is refused. What the bytes are is decided by looking at them, in [`flux2::reference`];
//! a declared type is only a hint and is not even read.

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use flux2::{RequestError, RgbImage};

use crate::config::{MAX_IMAGE_BASE64, MAX_IMAGE_BYTES};

const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);

/// A reference image before decoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncodedImage {
    /// Base64 text, with or without a `data:` prefix.
    Base64(String),
    /// The file itself.
    File(Bytes),
}

impl EncodedImage {
    /// The bytes as they came, for telling requests apart.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Base64(text) => text.as_bytes(),
            Self::File(file) => file,
        }
    }
}

/// The file that base64 text holds: standard or URL-safe alphabet, padded or not, ASCII whitespace anywhere, optional
/// `data:…;base64,` prefix. The error is a sentence without the field's name.
pub fn decode_base64(text: &str) -> Result<Vec<u8>, String> {
    if text.len() > MAX_IMAGE_BASE64 {
        return Err(format!("{} bytes of base64, at most {MAX_IMAGE_BASE64} are allowed", text.len()));
    }
    let text = text.trim_ascii();
    let start = text.get(..8).unwrap_or(text).to_ascii_lowercase();
    if start.starts_with("http:") || start.starts_with("https:") || start.starts_with("file:") {
        return Err("is a URL; URLs are never fetched, send the image itself as base64".into());
    }
    let payload = if start.starts_with("data:") {
        let (kind, payload) =
            text.split_once(',').ok_or("is a data URI without a comma; wanted data:image/png;base64,…")?;
        if !kind.trim_ascii_end().to_ascii_lowercase().ends_with(";base64") {
            return Err("is a data URI that is not base64; wanted data:image/png;base64,…".into());
        }
        payload
    } else {
        text
    };
    let mut symbols = Vec::with_capacity(payload.len());
    for (offset, byte) in payload.bytes().enumerate() {
        match byte {
            b'-' => symbols.push(b'+'),
            b'_' => symbols.push(b'/'),
            byte if byte.is_ascii_whitespace() || byte == 0x0B => {}
            b'+' | b'/' | b'=' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => symbols.push(byte),
            _ => {
                let at = payload.get(offset..).and_then(|rest| rest.chars().next()).unwrap_or('\u{FFFD}');
                return Err(format!("is not base64: character {at:?} at offset {offset}"));
            }
        }
    }
    if symbols.is_empty() {
        return Err("is empty; wanted a base64 PNG, JPEG or WebP".into());
    }
    STANDARD.decode(&symbols).map_err(|error| format!("is not base64: {error}"))
}

/// Decodes all references. Slow: for a blocking thread.
pub fn decode_references(images: &[EncodedImage]) -> Result<Vec<RgbImage>, RequestError> {
    images.iter().enumerate().map(|(index, image)| decode_reference(image, index)).collect()
}

fn decode_reference(image: &EncodedImage, index: usize) -> Result<RgbImage, RequestError> {
    let refuse = |message: String| RequestError::new(format!("images[{index}]"), message);
    match image {
        EncodedImage::Base64(text) => {
            let file = decode_base64(text).map_err(refuse)?;
            flux2::reference::decode(&file, index)
        }
        EncodedImage::File(file) if file.len() > MAX_IMAGE_BYTES => {
            Err(refuse(format!("{} bytes, at most {MAX_IMAGE_BYTES} are allowed", file.len())))
        }
        EncodedImage::File(file) => flux2::reference::decode(file, index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_66_all_forms_of_base64_are_read() {
        let wanted = [0xfb_u8, 0xff, 0xfe, 0x01];
        for text in ["+//+AQ==", "-__-AQ==", "+//+AQ", "-__-AQ", " +/ /+\r\n\tAQ==\n", "+//+AQ==\n"] {
            assert_eq!(decode_base64(text).as_deref(), Ok(&wanted[..]), "{text:?}");
        }
    }

    #[test]
    fn case_67_data_uris_are_read_with_and_without_newlines() {
        for text in
            ["data:image/png;base64,AQID", "data:;base64,AQ\nID\n", "DATA:image/gif;charset=x;BASE64, AQID"]
        {
            assert_eq!(decode_base64(text).as_deref(), Ok(&[1, 2, 3][..]), "{text:?}");
        }
    }

    #[test]
    fn case_71_urls_are_refused_and_said_so() {
        for text in ["http://169.254.169.254/", "HTTPS://example.org/a.png", "file:///etc/passwd"] {
            assert!(decode_base64(text).unwrap_err().contains("never fetched"), "{text:?}");
        }
    }

    #[test]
    fn case_66_errors_name_the_reason() {
        for (text, reason) in [
            ("AQ*D", "character '*' at offset 2"),
            ("AQé", "character 'é' at offset 2"),
            ("data:image/png,AQID", "not base64"),
            ("data:image/png;base64", "without a comma"),
            (" \n", "is empty"),
            ("A", "is not base64"),
        ] {
            let error = decode_base64(text).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}

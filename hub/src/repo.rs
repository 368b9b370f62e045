// SPDX-License-Identifier: Apache-2.0
//! Names that come from users or from a hub: repositories, revisions, paths. None may leave the place made for it.

use std::fmt::Write as _;

use crate::error::{Error, Kind, Result};

/// True for a full commit: 40 lower-case hexadecimal digits, which never moves.
pub fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// True for `length` lower-case hexadecimal digits.
pub fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Checks `organisation/name`.
pub fn check_id(id: &str) -> Result<()> {
    let part = |part: &str| {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        !part.is_empty()
            && part.len() <= 96
            && !part.contains("..")
            && !part.contains("--")
            && part.bytes().all(legal)
    };
    match id.split_once('/') {
        Some((organisation, name)) if part(organisation) && part(name) => Ok(()),
        _ => Err(Error::new(Kind::Usage, format!("{id:?} is not a repository of the Hub"))
            .next("write it as organisation/name")),
    }
}

/// Checks a branch, a tag, `refs/pr/1` or a commit.
pub fn check_revision(revision: &str) -> Result<()> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'/' | b'+');
    if is_path(revision) && revision.bytes().all(legal) {
        return Ok(());
    }
    Err(Error::new(Kind::Usage, format!("{revision:?} is not a revision"))
        .next("name a branch, a tag or a 40-digit commit"))
}

/// True for a relative path of ordinary components: nothing that a hub lists may be written elsewhere.
pub fn is_path(path: &str) -> bool {
    !path.is_empty()
        && path.len() < 1024
        && !path.contains(['\0', '\\'])
        && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// A path or revision inside a URL: every byte but the unreserved ones encoded; `/` kept if `slashes`.
pub fn encode(text: &str, slashes: bool) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric()
            || matches!(byte, b'-' | b'_' | b'.' | b'~')
            || (slashes && byte == b'/');
        if plain {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for id in ["", "name", "a/b/c", "../x", "a/..", "a/b c", "/b", "a/", "a--b/c"] {
            assert!(check_id(id).is_err(), "{id}");
        }
        assert!(check_id("black-forest-labs/FLUX.2-klein-4B").is_ok());
        for path in ["", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", "a/./b", "a\0"] {
            assert!(!is_path(path), "{path:?}");
        }
        assert!(
            is_path("text_encoder/model-00001-of-00002.safetensors") && check_revision("refs/pr/1").is_ok()
        );
        assert!(check_revision("../main").is_err() && check_revision("a b").is_err());
    }

    #[test]
    fn urls_hold_one_path_and_no_query() {
        assert_eq!(encode("a b/c?d#e%", true), "a%20b/c%3Fd%23e%25");
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Finds what must never be published: tokens and private keys by their shape.
//!
//! A shape test is no proof of absence. It stops the accident that happens most: a real token in a
//! file that ships. Shapes are those that the issuers document for secret scanning.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

/// Prefix, least number of characters after it, what it is.
const TOKENS: [(&str, usize, &str); 16] = [
    ("hf_", 30, "a Hugging Face token"),
    ("api_org_", 30, "a Hugging Face organisation token"),
    ("ghp_", 36, "a GitHub token"),
    ("gho_", 36, "a GitHub token"),
    ("ghu_", 36, "a GitHub token"),
    ("ghs_", 36, "a GitHub token"),
    ("ghr_", 36, "a GitHub token"),
    ("github_pat_", 50, "a GitHub token"),
    ("glpat-", 20, "a GitLab token"),
    ("dckr_pat_", 20, "a Docker Hub token"),
    ("npm_", 36, "an npm token"),
    ("pypi-AgE", 50, "a PyPI token"),
    ("AKIA", 16, "an AWS access key"),
    ("AIza", 35, "a Google API key"),
    ("xoxb-", 24, "a Slack token"),
    ("sk-proj-", 40, "an OpenAI key"),
];

/// File names that hold secrets by custom, whatever is in them.
const NAMES: [&str; 9] = [
    ".env",
    ".netrc",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    ".dockercfg",
    "id_rsa",
    "id_ed25519",
    "credentials.json",
];

/// A secret that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// What it looks like; never the secret itself.
    pub what: &'static str,
    /// Line in the text, from 1.
    pub line: usize,
}

/// The first token or private key in some bytes.
pub fn find(bytes: &[u8]) -> Option<Found> {
    let (at, what) = (0..bytes.len()).find_map(|at| here(bytes, at).map(|what| (at, what)))?;
    Some(Found { what, line: bytes[..at].split(|byte| *byte == b'\n').count() })
}

/// The first token or private key in a file, read in pieces.
pub fn find_in(path: &Path) -> io::Result<Option<Found>> {
    let mut file = File::open(path)?;
    let mut window = Vec::new();
    let mut lines = 0;
    loop {
        let more = file.by_ref().take(1 << 20).read_to_end(&mut window)?;
        if let Some(found) = find(&window) {
            return Ok(Some(Found { line: found.line + lines, ..found }));
        }
        if more == 0 {
            return Ok(None);
        }
        // What a piece cuts in two is found in the next one.
        let keep = window.len().saturating_sub(256);
        lines += window.drain(..keep).filter(|byte| *byte == b'\n').count();
    }
}

fn here(bytes: &[u8], at: usize) -> Option<&'static str> {
    if !matches!(bytes[at], b'h' | b'a' | b'g' | b'd' | b'n' | b'p' | b'A' | b'x' | b's' | b'-') {
        return None;
    }
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let rest = &bytes[at..];
    if let Some(kind) = rest.strip_prefix(b"-----BEGIN ") {
        let line = &kind[..kind.len().min(40)];
        return line.windows(16).any(|part| part == b"PRIVATE KEY-----").then_some("a private key");
    }
    if at > 0 && is_word(&bytes[at - 1]) {
        return None;
    }
    let (prefix, least, what) = TOKENS.iter().find(|(prefix, ..)| rest.starts_with(prefix.as_bytes()))?;
    let body: Vec<u8> = rest[prefix.len()..].iter().copied().take_while(|byte| is_word(byte)).collect();
    // `hf_xxxxxxxx…` in a document is a placeholder, not a token.
    let varied = body.iter().collect::<std::collections::BTreeSet<_>>().len() >= 8;
    (body.len() >= *least && varied).then_some(what)
}

/// A variable whose name says that its value is secret, with a value.
pub fn named(name: &str, value: &str) -> Option<&'static str> {
    let name = name.to_uppercase();
    let secret = ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "PRIVATE_KEY"];
    let about = ["TOKENIZER", "TOKENS", "TOKENIZERS"];
    let named = name.split("__").any(|part| secret.iter().any(|word| part.ends_with(word)));
    (named && !about.iter().any(|word| name.ends_with(word)) && !value.is_empty())
        .then_some("a value for a variable that holds a secret by its name")
}

/// A file that holds secrets by its name.
pub fn file_name(name: &str) -> bool {
    NAMES.contains(&name)
        || (name.starts_with(".env.") && !name.ends_with(".example") && !name.ends_with(".sample"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Put together at run time, so that no scanner takes this file for a leak.
    fn token(prefix: &str, length: usize) -> String {
        format!(
            "{prefix}{}",
            "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA".repeat(2).chars().take(length).collect::<String>()
        )
    }

    #[test]
    fn tokens_are_found_with_their_line() {
        for (prefix, least, what) in TOKENS {
            let text = format!("first\nkey = \"{}\"\n", token(prefix, least));
            assert_eq!(find(text.as_bytes()), Some(Found { what, line: 2 }), "{prefix}");
            assert_eq!(find(token(prefix, least - 1).as_bytes()), None, "{prefix} too short");
        }
        assert!(find(format!("-----BEGIN {}PRIVATE KEY-----", "OPENSSH ").as_bytes()).is_some());
    }

    #[test]
    fn placeholders_and_ordinary_words_are_not_tokens() {
        for text in [
            "hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
            "hf_hub_download",
            "-----BEGIN CERTIFICATE-----",
            "shelf_life",
        ] {
            assert_eq!(find(text.as_bytes()), None, "{text}");
        }
        assert!(named("HF_TOKEN", "x").is_some() && named("HF_TOKEN", "").is_none());
        assert!(named("MAX_TOKENS", "5").is_none() && named("TOKENIZERS_PARALLELISM", "false").is_none());
        assert!(file_name(".env") && file_name(".env.production") && !file_name(".env.example"));
    }
}

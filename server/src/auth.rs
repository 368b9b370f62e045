// SPDX-License-Identifier: Apache-2.0
//! API keys: one from the flag or its variable, more from a file. Compared in constant time.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::{
    config::Config,
    errors::ApiError,
    exit::{Exit, StartError},
    queue::job::Client,
};

/// Fewest characters of a key.
const MIN_KEY: usize = 8;

/// The keys that are accepted, as digests: equal lengths, and no key in a memory dump's strings.
#[derive(Default)]
pub struct Keys {
    keys: Vec<(Client, [u8; 32])>,
}

impl Keys {
    /// Reads the keys that the settings name.
    ///
    /// # Errors
    /// A file that cannot be read, has a line that is no key, or has no key at all.
    pub fn load(config: &Config) -> Result<Self, StartError> {
        let usage = |message: String| StartError::new(Exit::Usage, message);
        let mut keys = Self::default();
        if let Some(key) = &config.api_key {
            keys.add("default", key).map_err(|why| usage(format!("API_KEY: {why}")))?;
        }
        if let Some(path) = &config.api_key_file {
            let text = std::fs::read_to_string(path).map_err(|error| {
                StartError::new(Exit::Storage, format!("--api-key-file {}: {error}", path.display()))
            })?;
            for (index, line) in text.lines().enumerate() {
                let line = line.trim();
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                let number = index + 1;
                let fallback = format!("line-{number}");
                let (name, key) = line.split_once(':').unwrap_or((&fallback, line));
                keys.add(name.trim(), key.trim()).map_err(|why| {
                    usage(format!("--api-key-file {}, line {number}: {why}", path.display()))
                })?;
            }
            if keys.keys.is_empty() {
                return Err(usage(format!("--api-key-file {}: holds no key", path.display())));
            }
        }
        Ok(keys)
    }

    fn add(&mut self, name: &str, key: &str) -> Result<(), String> {
        if key.len() < MIN_KEY || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("a key has at least {MIN_KEY} visible ASCII characters"));
        }
        self.keys.push((format!("key:{name}").into(), Sha256::digest(key).into()));
        Ok(())
    }

    /// Whether a key is asked for at all.
    pub fn required(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Whose key a request carries; `None` if none is asked for.
    ///
    /// # Errors
    /// 401 for a missing, malformed or unknown key.
    pub fn check(&self, headers: &HeaderMap) -> Result<Option<Client>, ApiError> {
        if !self.required() {
            return Ok(None);
        }
        let refuse = |message| ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, token)| token.trim())
            .ok_or_else(|| refuse("an API key is needed: send \"Authorization: Bearer KEY\""))?;
        let digest: [u8; 32] = Sha256::digest(token).into();
        // Every key is looked at, so that the time does not tell which one was near.
        let mut found: Option<&Client> = None;
        for (client, known) in &self.keys {
            let same: Choice = known.ct_eq(&digest);
            if bool::from(same) {
                found = Some(client);
            }
        }
        found.map(|client| Some(Arc::clone(client))).ok_or_else(|| refuse("the API key is not known"))
    }
}

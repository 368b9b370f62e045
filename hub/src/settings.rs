// SPDX-License-Identifier: Apache-2.0
//! What the environment says, by the variables and defaults of Python's huggingface_hub.

use std::{
    ffi::OsString,
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use reqwest::Url;

use crate::error::{Error, Kind, Result};

/// Variables that name a cache and where it lies below, in the order of precedence.
pub const CACHES: [(&str, &str); 5] = [
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
    ("HOME", ".cache/huggingface/hub"),
];
const ENDPOINT: &str = "https://huggingface.co";

/// A token and where it comes from. Its value is shown by nothing.
#[derive(Clone)]
pub struct Token {
    value: String,
    /// The variable or file that holds it.
    pub source: String,
}

impl Token {
    /// A token out of `source`; none if `value` is blank.
    pub fn new(value: &str, source: impl Into<String>) -> Option<Self> {
        let value = value.trim();
        (!value.is_empty()).then(|| Self { value: value.into(), source: source.into() })
    }

    /// For the one header that it is sent in.
    pub(crate) fn value(&self) -> &str {
        &self.value
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(from {})", self.source)
    }
}

/// Where the Hub and the cache are, and how patient a transfer is.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The Hub.
    pub endpoint: Url,
    /// Sent to the endpoint's host only.
    pub token: Option<Token>,
    /// The cache's directory.
    pub cache: PathBuf,
    /// Ask no network.
    pub offline: bool,
    /// Draw progress.
    pub progress: bool,
    /// A connection that sends nothing for this long has stalled.
    pub stall: Duration,
    /// Pause before the first retry; doubles with each.
    pub pause: Duration,
    /// Retries in a row that bring nothing.
    pub retries: u32,
    /// Connections at the same time.
    pub connections: usize,
}

impl Settings {
    /// From this process's environment.
    pub fn from_environment() -> Result<Self> {
        Self::from(|name| std::env::var_os(name))
    }

    /// From an environment of the caller's.
    pub fn from(environment: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let text = |name: &str| {
            let value = environment(name).filter(|value| !value.is_empty())?;
            Some(value.to_string_lossy().into_owned())
        };
        let on = |name: &str| {
            text(name).is_some_and(|v| matches!(v.to_lowercase().as_str(), "1" | "true" | "yes" | "on"))
        };

        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let wrong = |why: String| {
            Error::new(Kind::Usage, format!("HF_ENDPOINT={endpoint} is not the address of a hub"))
                .why(why)
                .next("write it as https://host, without a path's query")
        };
        let parsed = Url::parse(&endpoint).map_err(|error| wrong(error.to_string()))?;
        if !matches!(parsed.scheme(), "http" | "https") || parsed.host().is_none() {
            return Err(wrong("it has no host or is not http".into()));
        }
        let stall = match text("HF_HUB_DOWNLOAD_TIMEOUT") {
            None => 30,
            Some(seconds) => {
                seconds.parse::<u64>().ok().filter(|s| (1..=3600).contains(s)).ok_or_else(|| {
                    Error::new(Kind::Usage, format!("HF_HUB_DOWNLOAD_TIMEOUT={seconds} is not a time"))
                        .next("give whole seconds from 1 to 3600")
                })?
            }
        };
        Ok(Self {
            endpoint: parsed,
            token: token(&environment, on("HF_HUB_DISABLE_IMPLICIT_TOKEN")),
            cache: cache(&environment),
            offline: on("HF_HUB_OFFLINE") || on("TRANSFORMERS_OFFLINE"),
            progress: !on("HF_HUB_DISABLE_PROGRESS_BARS"),
            stall: Duration::from_secs(stall),
            pause: Duration::from_secs(1),
            retries: 5,
            connections: 8,
        })
    }

    /// Which token is used, for messages.
    pub fn token_source(&self) -> String {
        match &self.token {
            Some(token) => format!("the token used is that of {}", token.source),
            None => "no token was sent: HF_TOKEN is not set and there is no token file".into(),
        }
    }
}

/// The cache's directory: the first of [`CACHES`] that is named.
pub fn cache(environment: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let named = |(name, below): (&str, &str)| {
        let base = environment(name).filter(|value| !value.is_empty())?;
        Some(if below.is_empty() { PathBuf::from(base) } else { Path::new(&base).join(below) })
    };
    CACHES.into_iter().find_map(named).unwrap_or_else(|| Path::new("/").join(CACHES[4].1))
}

fn token(environment: &impl Fn(&str) -> Option<OsString>, disabled: bool) -> Option<Token> {
    if disabled {
        return None;
    }
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        if let Some(token) = environment(name).and_then(|value| Token::new(&value.to_string_lossy(), name)) {
            return Some(token);
        }
    }
    let path = environment("HF_TOKEN_PATH").filter(|value| !value.is_empty()).map(PathBuf::from);
    // Beside the default place of the cache, wherever HF_HUB_CACHE puts the cache itself.
    let home = || {
        let without = |name: &str| environment(name).filter(|_| !name.ends_with("HUB_CACHE"));
        cache(without).with_file_name("token")
    };
    let path = path.unwrap_or_else(home);
    Token::new(&fs::read_to_string(&path).ok()?, path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(values: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> + use<> {
        let values: Vec<(String, String)> = values.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
        move |name| values.iter().find(|(known, _)| known == name).map(|(_, value)| value.into())
    }

    #[test]
    fn the_first_variable_that_names_a_cache_wins() {
        let roots: Vec<(&str, &str)> = CACHES.iter().map(|(name, _)| (*name, *name)).collect();
        for (index, (name, below)) in CACHES.into_iter().enumerate() {
            let wanted = if below.is_empty() { PathBuf::from(name) } else { Path::new(name).join(below) };
            assert_eq!(cache(environment(&roots[index..])), wanted);
        }
    }

    #[test]
    fn tokens_come_from_the_variable_or_the_file_and_show_only_their_source() {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("token");
        fs::write(&file, "from-file\n").expect("token");
        let home = dir.path().to_str().expect("UTF-8");
        let settings = |values: &[(&str, &str)]| Settings::from(environment(values)).expect("settings");
        let both = settings(&[("HF_TOKEN", " from-variable\n"), ("HF_HOME", home)]);
        assert_eq!(both.token.as_ref().expect("token").value(), "from-variable");
        let shown = format!("{both:?}");
        assert!(shown.contains("from HF_TOKEN") && !shown.contains("from-variable"), "{shown}");
        let elsewhere = settings(&[("HF_HUB_CACHE", "/elsewhere"), ("HF_HOME", home)]);
        assert_eq!(elsewhere.token.expect("token").value(), "from-file");
        let named = settings(&[("HF_TOKEN_PATH", file.to_str().expect("UTF-8"))]);
        assert_eq!(named.token.expect("token").value(), "from-file");
        let none = settings(&[("HF_TOKEN", "x"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]);
        assert!(none.token.is_none() && none.token_source().contains("no token"));
    }

    #[test]
    fn switches_and_wrong_values_are_read() {
        let on =
            Settings::from(environment(&[("HF_HUB_OFFLINE", "True"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1")]));
        let on = on.expect("settings");
        assert!(on.offline && !on.progress);
        for (name, value) in
            [("HF_ENDPOINT", "huggingface.co"), ("HF_ENDPOINT", "ftp://x"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0")]
        {
            assert_eq!(Settings::from(environment(&[(name, value)])).expect_err(name).kind, Kind::Usage);
        }
    }
}

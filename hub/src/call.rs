// SPDX-License-Identifier: Apache-2.0
//! A request that can be sent as often as it takes, and how far its body has gone.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use reqwest::{
    Method, Url,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};
use serde_json::Value;

/// How far the body of a request has gone, so that a stall is told from a long upload.
#[derive(Debug)]
pub struct Beat {
    last: Mutex<Instant>,
    sent: AtomicU64,
}

impl Beat {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { last: Mutex::new(Instant::now()), sent: AtomicU64::new(0) })
    }

    /// Bytes that the connection took so far.
    pub(crate) fn total(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// The connection took `bytes` more.
    pub fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        *self.last.lock().expect("no holder panics") = Instant::now();
    }

    /// Time since the connection last took something.
    pub(crate) fn quiet(&self) -> Duration {
        self.last.lock().expect("no holder panics").elapsed()
    }
}

/// Opens the body of a request from its start.
type Open = Arc<dyn Fn(Arc<Beat>) -> reqwest::Body + Send + Sync>;

/// What a request sends. It can be sent again, as often as it takes.
#[derive(Clone)]
pub enum Content {
    /// From memory.
    Bytes(Bytes),
    /// Piece by piece, of a length known before.
    Stream {
        /// Bytes of the whole.
        length: u64,
        /// Opens it; reports what was taken.
        open: Open,
    },
}

/// A request that can be repeated.
#[derive(Clone)]
pub struct Call {
    /// Method.
    pub method: Method,
    /// Where to.
    pub url: Url,
    /// Headers besides those that every request has.
    pub headers: HeaderMap,
    /// Body.
    pub body: Content,
    /// How many times longer than usual the answer may take: a commit or the end of an upload is work for the server.
    pub patience: u32,
}

impl Call {
    /// A GET.
    pub fn get(url: Url) -> Self {
        Self {
            method: Method::GET,
            url,
            headers: HeaderMap::new(),
            body: Content::Bytes(Bytes::new()),
            patience: 1,
        }
    }

    /// A request that sends something and may be answered late.
    pub fn send(method: Method, url: Url, body: Content) -> Self {
        Self { method, url, headers: HeaderMap::new(), body, patience: 10 }
    }

    /// A POST of JSON.
    pub fn post(url: Url, value: &Value) -> Self {
        let body = Content::Bytes(value.to_string().into());
        Self::send(Method::POST, url, body).header(CONTENT_TYPE, "application/json")
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: &str) -> Self {
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.insert(name, value);
        }
        self
    }
}

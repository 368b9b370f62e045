// SPDX-License-Identifier: Apache-2.0
//! The parsers that meet strangers' bytes, each as one function that must return whatever the bytes are. Called by the
//! fuzz targets and by the smoke test; not by the server.

use bytes::Bytes;

use crate::{
    errors::ApiError,
    form,
    images::{self, EncodedImage},
    routes::{jobs, openai, predict},
};

/// JSON bodies of every route.
pub fn json(bytes: &[u8]) {
    sane(predict::parse(bytes));
    sane(jobs::parse(bytes));
    sane(openai::parse_generation(bytes));
    sane(openai::parse_edit(bytes));
}

/// A reference as base64 text.
pub fn base64(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(file) = images::decode_base64(&text) {
        assert!(file.len() <= text.len(), "base64 never grows");
    }
}

/// A reference as a file.
pub fn image(bytes: &[u8]) {
    let file = EncodedImage::File(Bytes::copy_from_slice(bytes));
    if let Ok(references) = images::decode_references(&[file]) {
        let mut request = flux2::Request::new("a picture");
        request.references = references;
        let _ = flux2::request::Limits::KLEIN.check(&request);
    }
}

/// A multipart form with the boundary `x`.
pub fn form(bytes: &[u8]) {
    let reading = form::read(Bytes::copy_from_slice(bytes), "x");
    // The whole body is there: reading never waits.
    let parsed = futures_util::FutureExt::now_or_never(reading).expect("nothing to wait for");
    sane(parsed.and_then(|form| openai::with_images(form.fields, form.images)));
}

/// Either it is read, or it is the client's mistake.
fn sane<T>(parsed: Result<T, ApiError>) {
    if let Err(error) = parsed {
        assert!(error.status.is_client_error(), "{error}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `multipart/form-data` of an edit: text fields, and images under `image` or `image[]`, in the order sent.

use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::stream;

use crate::{
    errors::ApiError,
    fields::{Fields, clip},
    images::EncodedImage,
};

/// Longest text field in bytes: the longest prompt in four-byte characters, and slack.
const MAX_TEXT: usize = 64 << 10;
/// Most parts of a form.
const MAX_PARTS: usize = 64;

/// A form's text fields and images.
pub struct Form {
    /// Text fields.
    pub fields: Fields<'static>,
    /// Images in the order sent.
    pub images: Vec<EncodedImage>,
}

/// Names under which an image may come: what OpenAI's clients send for one, for several, and what PHP-like ones do.
fn is_image(name: &str) -> bool {
    let index = name.strip_prefix("image[").and_then(|rest| rest.strip_suffix(']'));
    matches!(name, "image" | "images" | "images[]")
        || index.is_some_and(|i| i.bytes().all(|b| b.is_ascii_digit()))
}

/// Reads a form. The parts' own types are not looked at: what an image is, its bytes say.
///
/// # Errors
/// 400 if the form is broken, 422 for a part that cannot be.
pub async fn read(body: Bytes, boundary: &str) -> Result<Form, ApiError> {
    let body = stream::iter([Ok::<_, std::convert::Infallible>(body)]);
    let mut form = multer::Multipart::new(body, boundary);
    let broken = |error: multer::Error| {
        ApiError::new(StatusCode::BAD_REQUEST, "broken_form", format!("the form cannot be read: {error}"))
    };
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    let mut parts = 0;
    while let Some(part) = form.next_field().await.map_err(broken)? {
        parts += 1;
        if parts > MAX_PARTS {
            return Err(ApiError::field("form", format!("has more than {MAX_PARTS} parts")));
        }
        let Some(name) = part.name().map(str::to_owned) else {
            return Err(ApiError::field("form", "has a part without a name"));
        };
        let is_file = part.file_name().is_some();
        let value = part.bytes().await.map_err(broken)?;
        if is_image(&name) {
            images.push(image(value, is_file));
            continue;
        }
        if is_file {
            let message = "is a file; images are taken as image or image[]";
            return Err(ApiError::field(clip(&name), message));
        }
        if value.len() > MAX_TEXT {
            return Err(ApiError::field(
                clip(&name),
                format!("has {} bytes, at most {MAX_TEXT}", value.len()),
            ));
        }
        let text =
            String::from_utf8(value.into()).map_err(|_| ApiError::field(clip(&name), "is not UTF-8"))?;
        texts.push((name, text));
    }
    Ok(Form { fields: Fields::form(texts)?, images })
}

/// A part without a file name may hold base64 text as well as a file.
fn image(value: Bytes, is_file: bool) -> EncodedImage {
    match std::str::from_utf8(&value) {
        Ok(text) if !is_file && !text.is_empty() => EncodedImage::Base64(text.to_owned()),
        _ => EncodedImage::File(value),
    }
}

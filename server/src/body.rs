// SPDX-License-Identifier: Apache-2.0
//! Reading a request's body within the limits of size, time and memory, before anything looks at it.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use tokio::{sync::OwnedSemaphorePermit, time::timeout};

use crate::{app::App, errors::ApiError};

/// How long a request waits for room for its body.
const ROOM_WAIT: Duration = Duration::from_secs(30);
/// How long the rest of a body that is too large is read away, so that the client gets to read the answer.
const DISCARD: Duration = Duration::from_secs(5);

/// A body in memory. The room it takes is given back when it is dropped.
pub struct Received {
    /// The bytes.
    pub bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

/// What a body may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentType {
    /// JSON.
    Json,
    /// `multipart/form-data` with this boundary.
    Multipart(String),
}

/// What a request says its body is.
///
/// # Errors
/// 415 saying what is accepted.
pub fn content_type(headers: &HeaderMap, multipart: bool) -> Result<ContentType, ApiError> {
    let accepted = if multipart { "multipart/form-data or application/json" } else { "application/json" };
    let refuse = |got: &str| {
        let message = format!("Content-Type: got {got}, wanted {accepted}");
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
            .param("Content-Type")
    };
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Err(refuse("none")) };
    let value = value.to_str().map_err(|_| refuse("bytes that are no text"))?;
    let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
    let kind = kind.trim().to_ascii_lowercase();
    if kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json")) {
        let charset = parameters.split(';').find_map(|parameter| {
            let (name, value) = parameter.split_once('=')?;
            name.trim()
                .eq_ignore_ascii_case("charset")
                .then(|| value.trim().trim_matches('"').to_ascii_lowercase())
        });
        return match charset.as_deref() {
            None | Some("utf-8" | "utf8" | "us-ascii") => Ok(ContentType::Json),
            Some(_) => Err(refuse(value)),
        };
    }
    if multipart && kind == "multipart/form-data" {
        return multer::parse_boundary(value)
            .map(ContentType::Multipart)
            .map_err(|_| refuse("multipart/form-data without a boundary"));
    }
    Err(refuse(&crate::fields::clip(value)))
}

/// Reads the body.
///
/// # Errors
/// 413 over the limit, 408 too slow, 429 no room, 400 broken off.
pub async fn read(app: &Arc<App>, headers: &HeaderMap, body: Body) -> Result<Received, ApiError> {
    let limit = app.body_bytes();
    let declared = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<usize>().ok());
    let mut stream = body.into_data_stream();
    let time = Duration::from_secs_f64(app.config.body_limit);
    if declared.is_some_and(|declared| declared > limit) {
        discard(&mut stream).await;
        return Err(too_large(limit));
    }
    let kib = declared.unwrap_or(limit).div_ceil(1024).max(1) as u32;
    let room = timeout(ROOM_WAIT, app.body_budget.clone().acquire_many_owned(kib)).await;
    let Ok(Ok(room)) = room else {
        let message = "too many large requests are being received; try again";
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "no_room", message).retry_after(5));
    };
    let collect = async {
        let mut bytes = BytesMut::with_capacity(declared.unwrap_or(0));
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| {
                let message = format!("the body broke off after {} bytes: {error}", bytes.len());
                ApiError::new(StatusCode::BAD_REQUEST, "incomplete_body", message)
            })?;
            if bytes.len() + chunk.len() > limit {
                return Err(too_large(limit));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes.freeze())
    };
    let bytes = match timeout(time, collect).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(error)) => {
            if error.status == StatusCode::PAYLOAD_TOO_LARGE {
                discard(&mut stream).await;
            }
            return Err(error);
        }
        Err(_) => {
            let message = format!("the body did not arrive within {:.0} s", time.as_secs_f64());
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "slow_body", message));
        }
    };
    Ok(Received { bytes, _room: room })
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("the body is over the limit of {limit} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

/// Reads and forgets, for a while: a client that is still sending would see a reset instead of the answer.
async fn discard(stream: &mut axum::body::BodyDataStream) {
    let _ = timeout(DISCARD, async { while let Some(Ok(_)) = stream.next().await {} }).await;
}

// SPDX-License-Identifier: Apache-2.0
//! The one error body, and every refusal that the server can give.
//!
//! `detail` is what FastAPI clients read, `error` what OpenAI clients read; both say the same.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use flux2::RequestError;
use serde::Serialize;
use utoipa::ToSchema;

use crate::lifecycle::Phase;

/// Body of every error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// One sentence for people: what was wrong, where, and what to do.
    pub detail: String,
    /// The same for programs.
    pub error: ErrorObject,
}

/// An error for programs, in OpenAI's shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorObject {
    /// Stable name of the case, as `queue_full`.
    pub code: String,
    /// The same sentence as `detail`.
    pub message: String,
    /// Field at fault, if one is.
    pub param: Option<String>,
    /// Class: `invalid_request_error`, `authentication_error`, `rate_limit_error`, `server_error`.
    #[serde(rename = "type")]
    pub kind: String,
}

/// A refusal or a failure on its way to a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Stable name of the case.
    pub code: &'static str,
    /// One sentence.
    pub message: String,
    /// Field at fault.
    pub param: Option<String>,
    /// Seconds after which to try again.
    pub retry_after: Option<u64>,
}

impl ApiError {
    /// An error of `status`, named `code`.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), param: None, retry_after: None }
    }

    /// Names the field at fault.
    #[must_use]
    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Says when to try again.
    #[must_use]
    pub const fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// 422: a field breaks the contract. The message is prefixed with the field's name.
    pub fn field(param: impl Into<String>, message: impl AsRef<str>) -> Self {
        let param = param.into();
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_value", format!("{param}: {}", message.as_ref()))
            .param(param)
    }

    /// 422 from the model's own check, its parameter already renamed to the route's field.
    pub fn request(error: &RequestError, param: String) -> Self {
        Self::field(param, &error.message)
    }

    /// 503: not in a phase that takes work.
    pub fn not_ready(phase: &Phase) -> Self {
        let (code, message) = match phase {
            Phase::Starting | Phase::Loading { .. } => {
                ("loading", "the model is still loading; /health says how far it is".to_owned())
            }
            Phase::Warm => ("busy", "the server is not ready; try again".to_owned()),
            Phase::Draining => {
                ("draining", "the server is shutting down and takes no new work; try again".to_owned())
            }
            Phase::Lost(why) => ("device_lost", format!("the device is lost: {why}; the server restarts")),
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message).retry_after(phase.retry_after())
    }

    /// 404 for a job that was never known.
    pub fn unknown_job(id: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "unknown_job",
            format!("there is no job {id:?}; GET /jobs lists them"),
        )
        .param("id")
    }

    /// 410 for a job that was known once.
    pub fn reaped_job(id: &str) -> Self {
        Self::new(StatusCode::GONE, "reaped", format!("job {id} was removed after its time; run it again"))
            .param("id")
    }

    /// 500 for what should not happen.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// The body.
    pub fn body(&self) -> ErrorBody {
        let kind = match self.status.as_u16() {
            401 | 403 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        ErrorBody {
            detail: self.message.clone(),
            error: ErrorObject {
                code: self.code.to_owned(),
                message: self.message.clone(),
                param: self.param.clone(),
                kind: kind.to_owned(),
            },
        }
    }
}

/// Names the error in the response's extensions, for the log line and the metrics.
#[derive(Clone, Copy, Debug)]
pub struct ErrorCode(pub &'static str);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(ErrorCode(self.code));
        response
    }
}

/// The name among `known` that is nearest to `name`, if one is near at all.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(&name.to_lowercase(), candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

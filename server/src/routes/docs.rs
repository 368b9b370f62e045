// SPDX-License-Identifier: Apache-2.0
//! The page to try it, the reference, and the machine-readable description. Each is one file with nothing external.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderName, HeaderValue, header},
    response::{Html, IntoResponse, Response},
};

use crate::app::App;

/// Nothing from elsewhere, no frames, no forms to elsewhere; inline script and style are the page itself.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
    img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A page to try it.
#[utoipa::path(get, path = "/", tag = "service", responses((status = 200, content_type = "text/html", body = String)))]
pub async fn page() -> Response {
    html(include_str!("../page/index.html"))
}

/// The reference, made from `/openapi.json` in the browser.
#[utoipa::path(get, path = "/docs", tag = "service", responses((status = 200, content_type = "text/html", body = String)))]
pub async fn reference() -> Response {
    html(include_str!("../page/docs.html"))
}

/// This description.
#[utoipa::path(get, path = "/openapi.json", tag = "service", responses((status = 200, body = Object)))]
pub async fn openapi(State(app): State<Arc<App>>) -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi::document(&app.sizes.limits))
}

fn html(text: &'static str) -> Response {
    let mut response = Html(text).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    let isolation = HeaderName::from_static("cross-origin-opener-policy");
    headers.insert(isolation, HeaderValue::from_static("same-origin"));
    response
}

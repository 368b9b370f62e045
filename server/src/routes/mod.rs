// SPDX-License-Identifier: Apache-2.0
//! The routes, one file a group, and the router that joins them.

pub mod docs;
pub mod health;
pub mod job_events;
pub mod jobs;
pub mod openai;
pub mod openai_stream;
pub mod predict;

use std::sync::Arc;

use axum::{
    Router,
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowOrigin, CorsLayer},
};

use crate::{
    app::App,
    errors::{ApiError, nearest},
    middleware::{REQUEST_ID, access, panicked},
};

/// Every path with its methods: what 404 and 405 tell.
const PATHS: [(&str, &str); 17] = [
    ("/", "GET"),
    ("/predict", "POST"),
    ("/generate", "POST"),
    ("/jobs", "GET"),
    ("/jobs/{id}", "GET"),
    ("/jobs/{id}/image", "GET"),
    ("/jobs/{id}/events", "GET"),
    ("/jobs/{id}/cancel", "POST"),
    ("/v1/images/generations", "POST"),
    ("/v1/images/edits", "POST"),
    ("/v1/models", "GET"),
    ("/health", "GET"),
    ("/info", "GET"),
    ("/tt-liveness", "GET"),
    ("/metrics", "GET"),
    ("/openapi.json", "GET"),
    ("/docs", "GET"),
];

/// The router with everything around it.
pub fn router(app: Arc<App>) -> Router {
    let mut router = Router::new()
        .route("/", get(docs::page))
        .route("/docs", get(docs::reference))
        .route("/openapi.json", get(docs::openapi))
        .route("/health", get(health::health))
        .route("/info", get(health::info))
        .route("/tt-liveness", get(health::liveness))
        .route("/metrics", get(health::metrics))
        .route("/v1/models", get(health::models))
        .route("/predict", post(predict::predict))
        .route("/generate", post(jobs::generate))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::show))
        .route("/jobs/{id}/image", get(jobs::image))
        .route("/jobs/{id}/events", get(job_events::events))
        .route("/jobs/{id}/cancel", post(jobs::cancel))
        .route("/v1/images/generations", post(openai::generations))
        .route("/v1/images/edits", post(openai::edits))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked));
    if let Some(cors) = cors(&app.config.cors_origins) {
        router = router.layer(cors);
    }
    router.layer(from_fn_with_state(app.clone(), access)).with_state(app)
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    let origin = match origins {
        [] => return None,
        [all] if all == "*" => AllowOrigin::any(),
        list => AllowOrigin::list(list.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    let sent = ["idempotency-key", "last-event-id"].map(HeaderName::from_static);
    let read = ["x-seed", "x-job-id", "retry-after", "location"].map(HeaderName::from_static);
    Some(
        CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(
                sent.into_iter().chain([header::AUTHORIZATION, header::CONTENT_TYPE]).collect::<Vec<_>>(),
            )
            .expose_headers(read.into_iter().chain([REQUEST_ID]).collect::<Vec<_>>()),
    )
}

async fn no_route(uri: Uri) -> ApiError {
    let path = uri.path();
    let hint = match nearest(path, PATHS.iter().map(|(path, _)| *path)) {
        Some(near) => format!("did you mean {near}?"),
        None => "GET /docs lists the routes".to_owned(),
    };
    let shown = crate::fields::clip(path);
    ApiError::new(StatusCode::NOT_FOUND, "no_route", format!("there is no route {shown}; {hint}"))
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let allowed =
        PATHS.iter().find(|(path, _)| matches_path(path, uri.path())).map_or("GET", |(_, allowed)| allowed);
    let message =
        format!("{} is not possible on {}; use {allowed}", crate::fields::clip(method.as_str()), uri.path());
    let mut response = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message).into_response();
    let allow = if allowed == "GET" { "GET,HEAD" } else { allowed };
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
    response
}

fn matches_path(pattern: &str, path: &str) -> bool {
    let (mut pattern, mut path) = (pattern.split('/'), path.split('/'));
    loop {
        match (pattern.next(), path.next()) {
            (None, None) => return true,
            (Some("{id}"), Some(_)) => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

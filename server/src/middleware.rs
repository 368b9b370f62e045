// SPDX-License-Identifier: Apache-2.0
//! What every request passes through: its id, its caller, its log line and its counters.

use std::{net::IpAddr, sync::Arc, time::Instant};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use opentelemetry::trace::{Span as _, SpanContext};
use opentelemetry_sdk::trace::Span;

use crate::{
    app::App,
    ask::Caller,
    errors::{ApiError, ErrorCode},
    logging,
    metrics::{CodeLabel, RequestLabels, RouteLabel},
    queue::job::Job,
    telemetry,
};

/// Header with the request's id.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Status in the log for a client that went away before its answer.
const CLIENT_GONE: u16 = 499;

/// Address of the peer; set by the listener on every connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// The job that a response is about, for the log line.
#[derive(Clone)]
pub struct AboutJob(pub Arc<Job>);

/// Routes that need no key: probes cannot carry one, and the page and its documents hold no secret.
const OPEN: [&str; 5] = ["/health", "/tt-liveness", "/", "/docs", "/openapi.json"];

/// The log line and the counters of one request, written when it is dropped: also when its client went away.
struct Access {
    app: Arc<App>,
    start: Instant,
    method: Method,
    route: String,
    caller: Caller,
    trace: SpanContext,
    span: Option<Span>,
    status: u16,
    code: Option<&'static str>,
    job: Option<Arc<Job>>,
}

impl Drop for Access {
    fn drop(&mut self) {
        if let Some(span) = &mut self.span {
            telemetry::answered(span, self.status, &self.caller.request_id, self.code);
        }
        let metrics = &self.app.metrics;
        let labels = RequestLabels {
            method: self.method.as_str().to_owned(),
            route: self.route.clone(),
            status: self.status,
        };
        let seconds = self.start.elapsed().as_secs_f64();
        metrics.requests.get_or_create(&labels).inc();
        metrics.request_duration.get_or_create(&RouteLabel { route: self.route.clone() }).observe(seconds);
        if let Some(code) = self.code {
            let family =
                if matches!(self.status, 500 | 504) { &metrics.failures } else { &metrics.rejections };
            family.get_or_create(&CodeLabel { code }).inc();
        }
        let job = self.job.as_deref();
        let params = job.map(|job| &job.params);
        tracing::info!(
            request_id = self.caller.request_id,
            method = %self.method,
            route = self.route,
            status = self.status,
            code = self.code,
            ms = (seconds * 1e3).round(),
            client = %self.caller.client,
            trace_id = self.trace.is_valid().then(|| self.trace.trace_id().to_string()),
            job = job.map(|job| job.id.as_str()),
            size = params.map(|params| format!("{}x{}", params.width, params.height)),
            seed = params.map(|params| params.seed),
            references = params.map(|params| params.reference_count),
            timing_ms = job.and_then(logging::timing),
            "request"
        );
    }
}

/// Outermost: names the request and its caller, checks the key, logs and counts.
pub async fn access(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().map_or_else(|| "unknown".into(), |peer| peer.0.to_string());
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let key = app.keys.check(request.headers());
    let client = key.as_ref().ok().cloned().flatten().unwrap_or_else(|| peer.into());
    let method = known_method(request.method());
    let mut trace = telemetry::remote(request.headers());
    let span = app.telemetry.as_ref().map(|telemetry| telemetry.request(method.as_str(), &route, &trace));
    if let Some(span) = &span {
        trace = span.span_context().clone();
    }
    let caller = Caller { request_id: request_id(request.headers()), client, trace: trace.clone() };
    let mut access = Access {
        app: app.clone(),
        start: Instant::now(),
        method,
        route,
        caller: caller.clone(),
        trace,
        span,
        status: CLIENT_GONE,
        code: None,
        job: None,
    };
    request.extensions_mut().insert(caller);
    let open = OPEN.contains(&request.uri().path()) || request.method() == Method::OPTIONS;
    let mut response = match key {
        Err(error) if !open => error.into_response(),
        _ => next.run(request).await,
    };
    access.status = response.status().as_u16();
    access.code = response.extensions().get::<ErrorCode>().map(|code| code.0);
    access.job = response.extensions().get::<AboutJob>().map(|about| about.0.clone());
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&access.caller.request_id) {
        headers.insert(REQUEST_ID, id);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The client's own id if it is harmless in a log and a header, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let harmless = |id: &&str| {
        (1..=128).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
    };
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(harmless);
    given.map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned)
}

/// Any token is a method to HTTP; only real ones may become a label.
fn known_method(method: &Method) -> Method {
    let known = [
        Method::GET,
        Method::POST,
        Method::HEAD,
        Method::OPTIONS,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
    ];
    if known.contains(method) { method.clone() } else { Method::from_bytes(b"OTHER").unwrap_or(Method::GET) }
}

/// Answer to a panic in a handler.
#[allow(clippy::needless_pass_by_value)] // The layer hands it over.
pub fn panicked(panic: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let what = panic.downcast_ref::<&str>().copied().unwrap_or("no message");
    tracing::error!(what, "a handler panicked");
    ApiError::internal("the server made a mistake with this request; its log says more").into_response()
}

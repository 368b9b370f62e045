// SPDX-License-Identifier: Apache-2.0
//! Spans of requests and of the pictures they asked for, exported by OTLP over HTTP; off without `--otlp-endpoint`.
//!
//! A request's span continues the trace of its W3C `traceparent`. Below it: `queue`, the time that its job waited, and
//! `picture`, the time on the device, with a span for each stage. The collector is the operator's; nothing that a request
//! says decides where spans go. `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS` and
//! `OTEL_TRACES_SAMPLER` mean what OpenTelemetry says they mean.

use std::{borrow::Cow, fmt, future::Future, pin::Pin, time::Duration};

use axum::http::HeaderMap;
use bytes::Bytes;
use flux2::pipeline::Stage;
use opentelemetry::{
    Context, KeyValue,
    propagation::TextMapPropagator,
    trace::{Span, SpanContext, SpanKind, Status, TraceContextExt, Tracer, TracerProvider},
};
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError, Request, Response, hyper::HyperClient};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider, Span as SdkSpan},
};

use crate::{
    exit::{Exit, StartError},
    queue::job::Job,
};

/// How long one export may take, and how long the last ones at the end.
const EXPORT_LIMIT: Duration = Duration::from_secs(5);

/// The trace that a request belongs to by its headers; not valid if it names none.
pub fn remote(headers: &HeaderMap) -> SpanContext {
    let context =
        TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
    context.span().span_context().clone()
}

/// Exports spans to a collector.
pub struct Telemetry {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Telemetry {
    /// Exports to the collector at `endpoint`, as `http://localhost:4318`; called within the runtime.
    ///
    /// # Errors
    /// An endpoint that is no URL.
    pub fn new(endpoint: &str) -> Result<Self, StartError> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new())
            .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
            .with_timeout(EXPORT_LIMIT)
            .build()
            .map_err(|error| {
                StartError::new(Exit::Usage, format!("--otlp-endpoint {endpoint:?}: {error}"))
            })?;
        let mut resource =
            Resource::builder().with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("flux2-server");
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        Ok(Self { tracer: provider.tracer("flux2-server"), provider })
    }

    /// The span of a request that starts now, in the trace `remote` if that is valid.
    pub fn request(&self, method: &str, route: &str, remote: &SpanContext) -> SdkSpan {
        self.tracer
            .span_builder(format!("{method} {route}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("http.request.method", method.to_owned()),
                KeyValue::new("http.route", route.to_owned()),
            ])
            .start_with_context(&self.tracer, &below(remote))
    }

    /// The spans of a job that goes onto the device now.
    pub fn picture(&self, job: &Job) -> PictureSpans {
        let parent = below(&job.trace);
        let queue = self.tracer.span_builder("queue").with_start_time(job.created);
        queue.start_with_context(&self.tracer, &parent).end();
        let params = &job.params;
        let number = |value: usize| value as i64;
        let picture = self.tracer.span_builder("picture").with_attributes([
            KeyValue::new("flux2.job", job.id.clone()),
            KeyValue::new("flux2.request_id", job.request_id.clone()),
            KeyValue::new("flux2.width", number(params.width)),
            KeyValue::new("flux2.height", number(params.height)),
            KeyValue::new("flux2.steps", number(params.num_steps)),
            KeyValue::new("flux2.references", number(params.reference_count)),
            // Below 2^53.
            KeyValue::new("flux2.seed", params.seed as i64),
        ]);
        let picture = picture.start_with_context(&self.tracer, &parent);
        PictureSpans { tracer: self.tracer.clone(), picture, stage: None }
    }

    /// Exports what is left; blocks.
    pub fn end(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(EXPORT_LIMIT) {
            tracing::warn!(%error, "the last spans could not be exported");
        }
    }
}

/// The context of a child of `parent`. One that is not valid is none: the sampler would take it for "do not record".
fn below(parent: &SpanContext) -> Context {
    if parent.is_valid() { Context::new().with_remote_span_context(parent.clone()) } else { Context::new() }
}

/// Ends a request's span.
pub fn answered(span: &mut SdkSpan, status: u16, request_id: &str, code: Option<&'static str>) {
    span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
    span.set_attribute(KeyValue::new("flux2.request_id", request_id.to_owned()));
    if let Some(code) = code {
        span.set_attribute(KeyValue::new("error.type", code));
    }
    if status >= 500 {
        span.set_status(Status::Error { description: code.map_or(Cow::Borrowed(""), Cow::Borrowed) });
    }
    span.end();
}

/// The spans of a picture that is being made.
pub struct PictureSpans {
    tracer: SdkTracer,
    picture: SdkSpan,
    stage: Option<SdkSpan>,
}

impl PictureSpans {
    /// `stage` begins, and the one before it ends.
    pub fn stage(&mut self, stage: Stage) {
        let name = stage.timing_key().trim_end_matches("_s");
        self.stage = Some(self.tracer.start_with_context(name, &below(self.picture.span_context())));
    }

    /// The picture is made, or is not; its spans end.
    pub fn end(mut self, error: Option<&str>) {
        self.stage = None;
        if let Some(error) = error {
            self.picture.set_status(Status::error(error.to_owned()));
        }
    }
}

/// Sends on the runtime's threads: the exporter's own thread has none.
struct Client {
    runtime: tokio::runtime::Handle,
    client: HyperClient,
}

impl Client {
    fn new() -> Self {
        let client = HyperClient::with_default_connector(EXPORT_LIMIT, None);
        Self { runtime: tokio::runtime::Handle::current(), client }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl HttpClient for Client {
    fn send_bytes<'a, 'f>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        let client = self.client.clone();
        Box::pin(async move { self.runtime.spawn(async move { client.send_bytes(request).await }).await? })
    }
}

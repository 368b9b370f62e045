// SPDX-License-Identifier: Apache-2.0
//! `POST /predict`: one picture, synchronously, with the keys of the klein card.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue},
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    app::App,
    ask::{self, Ask, Caller},
    body::{self, ContentType},
    errors::ApiError,
    fields::{self, Fields},
    images::EncodedImage,
    middleware::AboutJob,
    openapi::Refusals,
    picture::OutputFormat,
    queue::job::{Job, Picture, TimingMs},
};

/// Fields of `POST /predict`.
const FIELDS: [&str; 7] = ["prompt", "images", "width", "height", "seed", "num_steps", "guidance_scale"];

/// What to draw.
#[derive(ToSchema)]
#[allow(dead_code)] // The body is read field by field, for errors that name the value got; this is its description.
pub struct PredictRequest {
    /// What to draw, or how to change the references. Beyond 512 tokens it is cut, and the answer says so.
    #[schema(min_length = 1, example = "A red fox standing in fresh snow at dawn")]
    prompt: String,
    /// Reference images: base64 PNG, JPEG or WebP, with or without a data: prefix.
    images: Option<Vec<String>>,
    /// Width in pixels; default 1024, or the one that is served.
    width: Option<u64>,
    /// Height in pixels; default 1024, or the one that is served.
    height: Option<u64>,
    /// Seed of the noise; default 42.
    seed: Option<u64>,
    /// Denoising steps; default the model's own. klein is distilled to 4.
    num_steps: Option<u64>,
    /// Guidance scale; default the model's own. klein takes none, or 1.0.
    guidance_scale: Option<f64>,
}

/// A picture, under the klein card's keys.
#[derive(Serialize, ToSchema)]
pub struct PredictResponse {
    /// Base64 PNG.
    pub image: String,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Model.
    pub model: String,
    /// Licence of the weights.
    pub license: String,
    /// Seed that was used.
    pub seed: u64,
    /// Denoising steps.
    pub num_steps: usize,
    /// Number of reference images.
    pub reference_count: usize,
    /// Milliseconds by stage, and `total_ms`.
    pub timing_ms: TimingMs,
    /// Tokens of the prompt with its chat layout.
    pub prompt_tokens: usize,
    /// Whether tokens beyond the model's length were cut.
    pub prompt_truncated: bool,
    /// Digest of the package, if the server was told.
    pub package_digest: Option<String>,
    /// Id of the request.
    pub request_id: String,
}

/// Makes one picture and waits for it. When the client goes away, the run is stopped.
#[utoipa::path(
    post, path = "/predict", tag = "native",
    request_body = PredictRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key with the same body gets the same picture")),
    responses((status = 200, body = PredictResponse), Refusals)
)]
pub async fn predict(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    app.ready()?;
    let ContentType::Json = body::content_type(&headers, false)? else {
        return Err(ApiError::internal("a form where JSON alone is taken"));
    };
    let received = body::read(&app, &headers, body).await?;
    let ask = parse(&received.bytes)?;
    let waiters = ask::submit(&app, &caller, &headers, ask).await?;
    drop(received);
    let [waiter] = waiters.as_slice() else { return Err(ApiError::internal("one picture was asked for")) };
    let picture = waiter.job.ended().await.map_err(|error| rename(error, names))?;
    let params = &waiter.job.params;
    let answer = PredictResponse {
        image: STANDARD.encode(&picture.file),
        width: params.width,
        height: params.height,
        model: app.model_name(),
        license: app.license(),
        seed: params.seed,
        num_steps: params.num_steps,
        reference_count: params.reference_count,
        timing_ms: picture.timing_ms.clone(),
        prompt_tokens: params.prompt_tokens,
        prompt_truncated: params.prompt_truncated,
        package_digest: app.config.package_digest.clone(),
        request_id: caller.request_id,
    };
    Ok(about(Json(answer).into_response(), &waiter.job, Some(&picture)))
}

/// Reads the body of `POST /predict`.
pub fn parse(body: &[u8]) -> Result<Ask, ApiError> {
    let mut fields = Fields::parse(body)?;
    let ask = native(&mut fields, "/predict", "num_steps", names)?;
    fields.end(&FIELDS)?;
    Ok(ask)
}

/// The fields that the native routes share.
pub fn native(
    fields: &mut Fields<'_>,
    route: &'static str,
    steps: &str,
    names: fn(&str) -> String,
) -> Result<Ask, ApiError> {
    let images = match fields.list("images")? {
        None => Vec::new(),
        Some(list) => list
            .iter()
            .enumerate()
            .map(|(index, raw)| {
                fields::as_string(&format!("images[{index}]"), raw.get()).map(EncodedImage::Base64)
            })
            .collect::<Result<_, _>>()?,
    };
    let any = 0..=u64::MAX;
    Ok(Ask {
        route,
        prompt: fields
            .string("prompt")?
            .ok_or_else(|| ApiError::field("prompt", "is missing, wanted a description of the picture"))?,
        width: fields.integer("width", any.clone())?,
        height: fields.integer("height", any.clone())?,
        seed: fields.integer("seed", 0..=flux2::request::SEED_END - 1)?,
        random_seed: false,
        steps: fields.integer(steps, any)?,
        guidance: fields.number("guidance_scale")?,
        images,
        previews: 0,
        count: 1,
        format: OutputFormat::Png,
        quality: 100,
        detached: false,
        names,
    })
}

fn names(parameter: &str) -> String {
    match parameter {
        "steps" => "num_steps".to_owned(),
        "guidance" => "guidance_scale".to_owned(),
        other => other.to_owned(),
    }
}

/// A failure's parameter under the route's own name.
pub fn rename(mut error: ApiError, names: fn(&str) -> String) -> ApiError {
    error.param = error.param.map(|param| names(&param));
    error
}

/// Headers that say what a response is about.
pub fn about(mut response: Response, job: &Arc<Job>, picture: Option<&Picture>) -> Response {
    let mut set = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    };
    set("x-seed", job.params.seed.to_string());
    set("x-job-id", job.id.clone());
    set("x-size-source", if job.params.sized { "request" } else { "default" }.to_owned());
    if let Some(picture) = picture {
        set("x-cached-references", picture.cached_references.to_string());
    }
    response.extensions_mut().insert(AboutJob(job.clone()));
    response
}

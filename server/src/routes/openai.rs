// SPDX-License-Identifier: Apache-2.0
//! `POST /v1/images/generations` and `/v1/images/edits`, as OpenAI's clients call them.
//!
//! Beyond OpenAI: `seed`, `num_inference_steps`, `guidance_scale`. An omitted seed is drawn at random for each request;
//! either way it is in the answer.

use std::{sync::Arc, time::SystemTime};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::{
    app::App,
    ask::{self, Ask, Caller, MAX_PICTURES},
    body::{self, ContentType},
    errors::ApiError,
    fields::{self, Fields, clip},
    form,
    images::EncodedImage,
    openapi::Refusals,
    picture::OutputFormat,
    queue::{Waiter, job::Params},
    routes::{
        openai_stream::{self, Kind},
        predict::{about, rename},
    },
};

/// Fields that are read.
const FIELDS: [&str; 12] = [
    "prompt",
    "n",
    "size",
    "seed",
    "num_inference_steps",
    "guidance_scale",
    "response_format",
    "output_format",
    "output_compression",
    "stream",
    "partial_images",
    "background",
];
/// Fields that clients send and that mean nothing to this model.
const IGNORED: [&str; 7] =
    ["model", "quality", "style", "user", "moderation", "input_fidelity", "safety_identifier"];

/// What to draw, in OpenAI's words. `model`, `quality`, `style`, `user`, `moderation` and `input_fidelity` are accepted
/// and mean nothing.
#[derive(ToSchema)]
#[allow(dead_code)] // Description only, as for `/predict`.
pub struct GenerationRequest {
    /// What to draw.
    #[schema(min_length = 1, example = "a red circle on a blue background")]
    prompt: String,
    /// Any; this server has one model.
    model: Option<String>,
    /// Number of pictures; the seeds count up.
    #[schema(minimum = 1, maximum = 10)]
    n: Option<u64>,
    /// `WIDTHxHEIGHT`, or `auto` for 1024x1024 or the one that is served.
    #[schema(example = "1024x1024")]
    size: Option<String>,
    /// Seed of the noise; omitted, it is drawn at random and told.
    seed: Option<u64>,
    /// Denoising steps; default the model's own. klein is distilled to 4.
    num_inference_steps: Option<u64>,
    /// Guidance scale; default the model's own. klein takes none, or 1.0.
    guidance_scale: Option<f64>,
    /// `b64_json` alone.
    response_format: Option<String>,
    /// `png`, `jpeg` or `webp`.
    output_format: Option<OutputFormat>,
    /// Quality of a JPEG; default 100.
    #[schema(minimum = 0, maximum = 100)]
    output_compression: Option<u64>,
    /// Whether to answer with server-sent events.
    stream: Option<bool>,
    /// Pictures of the work in progress while streaming, made from the real latents.
    #[schema(minimum = 0, maximum = 3)]
    partial_images: Option<u64>,
    /// `auto` or `opaque`.
    background: Option<String>,
}

/// An edit as JSON; as a form the same fields, with files under `image` or `image[]`.
#[derive(ToSchema)]
#[allow(dead_code)] // Description only, as for `/predict`.
pub struct EditRequest {
    /// How to change the pictures.
    #[schema(min_length = 1, example = "make the circle green")]
    prompt: String,
    /// One or several base64 pictures or data URLs; also under `image[]` and `images`.
    image: Vec<String>,
    /// `WIDTHxHEIGHT`, or `auto` for 1024x1024 or the one that is served.
    size: Option<String>,
    /// Seed of the noise; omitted, it is drawn at random and told.
    seed: Option<u64>,
    /// Denoising steps; default the model's own. klein is distilled to 4.
    num_inference_steps: Option<u64>,
    /// Guidance scale; default the model's own. klein takes none, or 1.0.
    guidance_scale: Option<f64>,
}

/// A picture.
#[derive(Serialize, ToSchema)]
pub struct ImageData {
    /// Base64 file.
    pub b64_json: String,
    /// Seed that was used.
    pub seed: u64,
    /// The same as text, for clients whose numbers are not exact.
    pub seed_text: String,
}

/// Tokens, as OpenAI counts them.
#[derive(Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompt.
    pub input_tokens: usize,
    /// Always 0: pictures are not made of tokens here.
    pub output_tokens: usize,
    /// The sum.
    pub total_tokens: usize,
    /// The same by kind.
    pub input_tokens_details: UsageDetails,
}

/// Tokens by kind.
#[derive(Serialize, ToSchema)]
pub struct UsageDetails {
    /// Tokens of the prompt.
    pub text_tokens: usize,
    /// Always 0.
    pub image_tokens: usize,
}

impl Usage {
    /// Usage of a run.
    pub fn of(params: &Params) -> Self {
        let tokens = params.prompt_tokens;
        let input_tokens_details = UsageDetails { text_tokens: tokens, image_tokens: 0 };
        Self { input_tokens: tokens, output_tokens: 0, total_tokens: tokens, input_tokens_details }
    }
}

/// Pictures, in OpenAI's shape.
#[derive(Serialize, ToSchema)]
pub struct ImagesResponse {
    /// Seconds since 1970.
    pub created: u64,
    /// The pictures.
    pub data: Vec<ImageData>,
    /// File format.
    pub output_format: OutputFormat,
    /// `WIDTHxHEIGHT`.
    pub size: String,
    /// `request` or `default`: where the size came from.
    pub size_source: &'static str,
    /// Always `opaque`.
    pub background: &'static str,
    /// Always `auto`.
    pub quality: &'static str,
    /// Tokens.
    pub usage: Usage,
    /// Whether prompt tokens beyond the model's length were cut.
    pub prompt_truncated: bool,
}

/// Makes pictures from a prompt.
#[utoipa::path(
    post, path = "/v1/images/generations", tag = "openai", request_body = GenerationRequest,
    responses(
        (status = 200, content((ImagesResponse = "application/json"), (Object = "text/event-stream"))),
        Refusals
    )
)]
pub async fn generations(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    app.ready()?;
    body::content_type(&headers, false)?;
    let received = body::read(&app, &headers, body).await?;
    let call = parse_generation(&received.bytes)?;
    answer(&app, &caller, &headers, call, Kind::Generation).await
}

/// Changes pictures, or takes them as references.
#[utoipa::path(
    post, path = "/v1/images/edits", tag = "openai",
    request_body(content((EditRequest = "application/json"), (EditRequest = "multipart/form-data"))),
    responses(
        (status = 200, content((ImagesResponse = "application/json"), (Object = "text/event-stream"))),
        Refusals
    )
)]
pub async fn edits(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    app.ready()?;
    let kind = body::content_type(&headers, true)?;
    let received = body::read(&app, &headers, body).await?;
    let call = match kind {
        ContentType::Json => parse_edit(&received.bytes)?,
        ContentType::Multipart(boundary) => {
            let form = form::read(received.bytes.clone(), &boundary).await?;
            with_images(form.fields, form.images)?
        }
    };
    answer(&app, &caller, &headers, call, Kind::Edit).await
}

/// A parsed call.
pub struct Call {
    ask: Ask,
    stream: bool,
}

/// Reads a generation's JSON body.
pub fn parse_generation(body: &[u8]) -> Result<Call, ApiError> {
    parse(Fields::parse(body)?, Vec::new(), "/v1/images/generations")
}

/// Reads an edit's JSON body.
pub fn parse_edit(body: &[u8]) -> Result<Call, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut images = Vec::new();
    for name in ["image", "image[]", "images"] {
        if let Some(value) = fields.take(name) {
            add_images(name, value.text(), &mut images)?;
        }
    }
    with_images(fields, images)
}

/// One string, or a list of strings or of `{"image_url": …}` objects.
fn add_images(name: &str, raw: &str, images: &mut Vec<EncodedImage>) -> Result<(), ApiError> {
    if !raw.starts_with('[') {
        images.push(EncodedImage::Base64(one_image(name, raw)?));
        return Ok(());
    }
    let list: Vec<&RawValue> = serde_json::from_str(raw)
        .map_err(|_| ApiError::field(name, format!("got {}, wanted a list", clip(raw))))?;
    for (index, item) in list.iter().enumerate() {
        images.push(EncodedImage::Base64(one_image(&format!("{name}[{index}]"), item.get())?));
    }
    Ok(())
}

fn one_image(name: &str, raw: &str) -> Result<String, ApiError> {
    if !raw.starts_with('{') {
        return fields::as_string(name, raw);
    }
    let mut object = Fields::parse(raw.as_bytes())?;
    let url = object.string("image_url")?;
    url.ok_or_else(|| ApiError::field(name, "wanted a base64 string or {\"image_url\": \"data:…\"}"))
}

/// An edit from its fields and its images.
pub fn with_images(fields: Fields<'_>, images: Vec<EncodedImage>) -> Result<Call, ApiError> {
    if images.is_empty() {
        return Err(ApiError::field("image", "is missing; send one to three as image or image[]"));
    }
    parse(fields, images, "/v1/images/edits")
}

fn parse(mut fields: Fields<'_>, images: Vec<EncodedImage>, route: &'static str) -> Result<Call, ApiError> {
    let one_of = |name: &str, got: Option<String>, wanted: &[&str]| match got {
        Some(got) if !wanted.contains(&got.as_str()) => {
            Err(ApiError::field(name, format!("got {:?}, wanted {}", clip(&got), wanted.join(" or "))))
        }
        got => Ok(got),
    };
    let prompt = fields
        .string("prompt")?
        .ok_or_else(|| ApiError::field("prompt", "is missing, wanted a description of the picture"))?;
    let size =
        fields.string("size")?.filter(|size| size != "auto").map(|size| parse_size(&size)).transpose()?;
    let count = fields.integer("n", 1..=MAX_PICTURES)?.unwrap_or(1) as usize;
    let seed = fields.integer("seed", 0..=flux2::request::SEED_END - 1)?;
    let steps = fields.integer("num_inference_steps", 0..=u64::MAX)?;
    let guidance = fields.number("guidance_scale")?;
    one_of("response_format", fields.string("response_format")?, &["b64_json"])?;
    one_of("background", fields.string("background")?, &["auto", "opaque"])?;
    let names: Vec<&str> = OutputFormat::ALL.map(OutputFormat::name).to_vec();
    let format = one_of("output_format", fields.string("output_format")?, &names)?
        .and_then(|name| OutputFormat::ALL.into_iter().find(|format| format.name() == name))
        .unwrap_or_default();
    let quality = fields.integer("output_compression", 0..=100)?.unwrap_or(100) as u8;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let partial = fields.integer("partial_images", 0..=3)?.unwrap_or(0) as usize;
    if stream && count > 1 {
        return Err(ApiError::field("n", format!("got {count}, must be 1 with stream")));
    }
    if fields.take("mask").is_some() {
        return Err(ApiError::field("mask", "is not supported; say in the prompt what to change"));
    }
    fields.ignore(&IGNORED);
    fields.end(&FIELDS)?;
    let previews = if stream { partial } else { 0 };
    let ask = Ask {
        route,
        prompt,
        width: size.map(|(width, _)| width),
        height: size.map(|(_, height)| height),
        seed,
        random_seed: true,
        steps,
        guidance,
        images,
        previews,
        count,
        format,
        quality,
        detached: false,
        names: parameter_names,
    };
    Ok(Call { ask, stream })
}

fn parse_size(size: &str) -> Result<(u64, u64), ApiError> {
    let side = |text: &str| fields::as_integer("size", text, &(1..=100_000)).ok();
    size.split_once('x')
        .and_then(|(width, height)| Some((side(width)?, side(height)?)))
        .ok_or_else(|| ApiError::field("size", format!("got {:?}, wanted WIDTHxHEIGHT or auto", clip(size))))
}

fn parameter_names(parameter: &str) -> String {
    match parameter {
        "width" | "height" => "size".to_owned(),
        "images" => "image".to_owned(),
        "steps" => "num_inference_steps".to_owned(),
        "guidance" => "guidance_scale".to_owned(),
        other => other.replacen("images[", "image[", 1),
    }
}

async fn answer(
    app: &Arc<App>,
    caller: &Caller,
    headers: &HeaderMap,
    call: Call,
    kind: Kind,
) -> Result<Response, ApiError> {
    let waiters = ask::submit(app, caller, headers, call.ask).await?;
    let Some(first) = waiters.first() else { return Err(ApiError::internal("no picture was asked for")) };
    let job = first.job.clone();
    if call.stream {
        let waiter = waiters.into_iter().next();
        return Ok(about(openai_stream::respond(app.clone(), job.clone(), waiter, kind), &job, None));
    }
    let data = collect(&waiters).await?;
    let params = &job.params;
    let answer = ImagesResponse {
        created: created(job.created),
        data,
        output_format: params.output_format,
        size: format!("{}x{}", params.width, params.height),
        size_source: if params.sized { "request" } else { "default" },
        background: "opaque",
        quality: "auto",
        usage: Usage::of(params),
        prompt_truncated: params.prompt_truncated,
    };
    Ok(about(Json(answer).into_response(), &job, None))
}

/// Waits for all pictures; the first failure is the request's.
async fn collect(waiters: &[Waiter]) -> Result<Vec<ImageData>, ApiError> {
    let mut data = Vec::new();
    for waiter in waiters {
        let picture = waiter.job.ended().await.map_err(|error| rename(error, parameter_names))?;
        let seed = waiter.job.params.seed;
        data.push(ImageData { b64_json: STANDARD.encode(&picture.file), seed, seed_text: seed.to_string() });
    }
    Ok(data)
}

/// Whole seconds since 1970.
pub fn created(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

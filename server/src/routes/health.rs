// SPDX-License-Identifier: Apache-2.0
//! What the server says about itself: readiness, liveness, what is served, and the counters.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    app::App, config::MAX_IMAGE_BASE64, lifecycle::Phase, openapi::Unauthorized, picture::OutputFormat,
};

/// Readiness.
#[derive(Serialize, ToSchema)]
pub struct Health {
    /// `starting`, `loading`, `warm`, `draining` or `lost`.
    pub status: &'static str,
    /// Whether work is taken.
    pub ready: bool,
    /// What is being done while loading: `load`, then `warm_up`.
    pub phase: Option<&'static str>,
    /// Part of it that is done, 0 to 1, where that is known.
    pub progress: Option<f64>,
    /// Why work is not taken.
    pub reason: Option<String>,
    /// Model.
    pub model: String,
    /// The published model whose code it runs by.
    pub family: &'static str,
    /// Device, once it is open.
    pub device: Option<String>,
    /// Rows and columns of the device's mesh of chips, once it is open.
    pub mesh_shape: Option<[usize; 2]>,
    /// The size that is served, `1024x1024`, or the range.
    pub resolution: String,
    /// Jobs that wait.
    pub queue_depth: usize,
    /// Seconds since the process started.
    pub uptime_s: f64,
}

/// Readiness: 200 once warm, 503 before and after.
#[utoipa::path(
    get, path = "/health", tag = "service",
    responses((status = 200, body = Health), (status = 503, body = Health))
)]
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let phase = app.life.phase();
    let (step, progress) = match &phase {
        Phase::Loading { step, progress } => (Some(*step), *progress),
        _ => (None, None),
    };
    let reason = match &phase {
        Phase::Warm => None,
        Phase::Lost(why) => Some(why.clone()),
        Phase::Starting | Phase::Loading { .. } => Some("the model is loading".to_owned()),
        Phase::Draining => Some("the server is shutting down".to_owned()),
    };
    let ready = phase == Phase::Warm;
    let health = Health {
        status: phase.name(),
        ready,
        phase: step,
        progress,
        reason,
        model: app.model_name(),
        family: app.spec.name,
        device: app.model().map(|model| model.info.device.clone()),
        mesh_shape: app.model().map(|model| model.info.mesh),
        resolution: app.sizes.resolution(),
        queue_depth: app.queue.depth(),
        uptime_s: (app.life.uptime().as_secs_f64() * 10.0).round() / 10.0,
    };
    if ready {
        return Json(health).into_response();
    }
    let retry = [(header::RETRY_AFTER, phase.retry_after().to_string())];
    (StatusCode::SERVICE_UNAVAILABLE, retry, Json(health)).into_response()
}

/// Liveness.
#[derive(Serialize, ToSchema)]
pub struct Liveness {
    /// Always `alive`.
    pub status: &'static str,
    /// Whether work is taken.
    pub model_ready: bool,
}

/// Liveness: 200 while the process lives.
#[utoipa::path(get, path = "/tt-liveness", tag = "service", responses((status = 200, body = Liveness)))]
pub async fn liveness(State(app): State<Arc<App>>) -> Json<Liveness> {
    Json(Liveness { status: "alive", model_ready: app.life.warm() })
}

/// Ranges of a request.
#[derive(Serialize, ToSchema)]
pub struct Ranges {
    /// Smallest width and height.
    pub min_side: usize,
    /// Largest width and height.
    pub max_side: usize,
    /// Width and height are multiples of this.
    pub grid: usize,
    /// Largest width × height.
    pub max_pixels: usize,
    /// Default width and height.
    pub default_size: [usize; 2],
    /// Width and height of the one size that is served; null where there are several.
    pub only_size: Option<[usize; 2]>,
    /// Most reference images.
    pub max_references: usize,
    /// Longest base64 text of one reference image.
    pub max_image_base64: usize,
    /// Longest prompt in characters.
    pub max_prompt_chars: usize,
    /// Prompt tokens that the model sees.
    pub max_prompt_tokens: usize,
    /// Fewest and most denoising steps.
    pub steps: [usize; 2],
    /// Denoising steps where none are asked for.
    pub default_steps: usize,
    /// Whether the model takes a guidance scale other than 1.
    pub guidance: bool,
    /// Guidance scale where none is asked for; null for a model that takes none.
    pub default_guidance: Option<f32>,
    /// Smallest seed.
    pub seed_min: u64,
    /// Largest seed.
    pub seed_max: u64,
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
}

/// What is served.
#[derive(Serialize, ToSchema)]
pub struct Info {
    /// Model.
    pub model: String,
    /// The published model whose code it runs by.
    pub family: &'static str,
    /// Revision of the weights.
    pub revision: String,
    /// Licence of the weights.
    pub license: String,
    /// Version of the server.
    pub version: &'static str,
    /// Digest of the package, if the server was told.
    pub package_digest: Option<String>,
    /// Device, once it is open.
    pub device: Option<String>,
    /// Rows and columns of the device's mesh of chips, once it is open.
    pub mesh_shape: Option<[usize; 2]>,
    /// Precision, once the device is open.
    pub precision: Option<&'static str>,
    /// What can be asked for.
    pub tasks: [&'static str; 3],
    /// File formats of results on the OpenAI routes.
    pub output_formats: [OutputFormat; 3],
    /// Ranges of a request.
    pub limits: Ranges,
    /// What an omitted seed is: `42` on the native routes, random on the OpenAI routes.
    pub omitted_seed: &'static str,
    /// Jobs that wait.
    pub queue_depth: usize,
    /// Jobs that may wait.
    pub queue_size: usize,
    /// Seconds that a picture of the default size takes; null before anything was measured.
    pub estimated_run_s: Option<f64>,
    /// Seconds that a new client would wait for its turn.
    pub estimated_wait_s: Option<f64>,
    /// Longest run in seconds.
    pub execution_limit_s: f64,
    /// Seconds that a finished job is kept.
    pub job_ttl_s: f64,
}

/// What is served, with every range.
#[utoipa::path(get, path = "/info", tag = "service", responses((status = 200, body = Info), Unauthorized))]
pub async fn info(State(app): State<Arc<App>>) -> Json<Info> {
    let limits = &app.sizes.limits;
    let default = app.default_request(String::new());
    let (run, wait) = app.queue.estimates(app.work(&default));
    Json(Info {
        model: app.model_name(),
        family: app.spec.name,
        revision: app.revision(),
        license: app.license(),
        version: env!("CARGO_PKG_VERSION"),
        package_digest: app.config.package_digest.clone(),
        device: app.model().map(|model| model.info.device.clone()),
        mesh_shape: app.model().map(|model| model.info.mesh),
        precision: app.model().map(|model| model.info.precision.name()),
        tasks: ["text-to-image", "edit", "reference-guided"],
        output_formats: OutputFormat::ALL,
        limits: Ranges {
            min_side: limits.min_side,
            max_side: limits.max_side,
            grid: limits.grid,
            max_pixels: limits.max_pixels,
            default_size: app.sizes.default,
            only_size: limits.only_size,
            max_references: limits.max_references,
            max_image_base64: MAX_IMAGE_BASE64,
            max_prompt_chars: limits.max_prompt_chars,
            max_prompt_tokens: app.spec.prompt.tokens,
            steps: [*limits.steps.start(), *limits.steps.end()],
            default_steps: default.steps,
            guidance: limits.guidance,
            default_guidance: default.guidance,
            seed_min: 0,
            seed_max: flux2::request::SEED_END - 1,
            max_body_bytes: app.body_bytes(),
        },
        omitted_seed: "42 on /predict and /generate; random on /v1/images",
        queue_depth: app.queue.depth(),
        queue_size: app.config.queue_size,
        estimated_run_s: run,
        estimated_wait_s: wait,
        execution_limit_s: app.config.execution_limit,
        job_ttl_s: app.config.job_ttl,
    })
}

/// A model, in OpenAI's shape.
#[derive(Serialize, ToSchema)]
pub struct ModelEntry {
    /// Name.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// Always 0.
    pub created: u64,
    /// Who made it.
    pub owned_by: &'static str,
}

/// The one model.
#[derive(Serialize, ToSchema)]
pub struct ModelList {
    /// Always `list`.
    pub object: &'static str,
    /// The one model.
    pub data: [ModelEntry; 1],
}

/// The models, in OpenAI's shape.
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses((status = 200, body = ModelList), Unauthorized))]
pub async fn models(State(app): State<Arc<App>>) -> Json<ModelList> {
    let entry =
        ModelEntry { id: app.model_name(), object: "model", created: 0, owned_by: "black-forest-labs" };
    Json(ModelList { object: "list", data: [entry] })
}

/// Counters for Prometheus.
#[utoipa::path(
    get, path = "/metrics", tag = "service",
    responses((status = 200, content_type = "application/openmetrics-text", body = String), Unauthorized)
)]
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    app.metrics.queue_size.set(app.queue.depth() as i64);
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.text()).into_response()
}

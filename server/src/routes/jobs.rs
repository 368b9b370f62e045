// SPDX-License-Identifier: Apache-2.0
//! The job API of the dev card: `POST /generate`, and what became of it.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    app::App,
    ask::{self, Ask, Caller},
    body,
    errors::{ApiError, ErrorObject},
    fields::Fields,
    openapi::{JobRefusals, Refusals},
    queue::{
        Found,
        job::{self, Job, Params, State as JobState, TimingMs},
    },
    routes::predict::{about, native},
};

/// Fields of `POST /generate`.
const FIELDS: [&str; 8] =
    ["prompt", "images", "width", "height", "seed", "num_inference_steps", "guidance_scale", "previews"];
/// How long a cancel waits for the run to stop, so that its answer can say that it did.
const CANCEL_WAIT: Duration = Duration::from_secs(2);

/// What to draw.
#[derive(ToSchema)]
#[allow(dead_code)] // Description only, as for `/predict`.
pub struct GenerateRequest {
    /// What to draw, or how to change the references.
    #[schema(min_length = 1, example = "a lighthouse in a thunderstorm")]
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
    num_inference_steps: Option<u64>,
    /// Guidance scale; default the model's own. klein takes none, or 1.0.
    guidance_scale: Option<f64>,
    /// Previews among the job's events; each costs one VAE decode.
    #[schema(minimum = 0, maximum = 3)]
    previews: Option<u64>,
}

/// A job was taken in.
#[derive(Serialize, ToSchema)]
pub struct Accepted {
    /// Id of the job.
    pub job_id: String,
    /// Its state.
    pub status: JobState,
    /// Jobs that wait before it.
    pub position: usize,
    /// Seconds until its turn; null before anything was measured.
    pub estimated_wait_s: Option<f64>,
    /// Seed that will be used.
    pub seed: u64,
}

/// A job.
#[derive(Serialize, ToSchema)]
pub struct JobView {
    /// Id.
    pub id: String,
    /// The same, under the dev card's name.
    pub job_id: String,
    /// State.
    pub state: JobState,
    /// The same, under the dev card's name.
    pub status: JobState,
    /// Jobs that wait before it, while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<usize>,
    /// Seconds until its turn, while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated_wait_s: Option<f64>,
    /// Stage, while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<&'static str>,
    /// Denoising steps done.
    pub step: usize,
    /// Denoising steps of the run.
    pub steps: usize,
    /// Part of the whole run that is done, 0 to 1.
    pub progress: f64,
    /// When it was created, in seconds since 1970.
    pub created_at: f64,
    /// When it came onto the device.
    pub started_at: Option<f64>,
    /// When it ended.
    pub finished_at: Option<f64>,
    /// What was asked.
    pub parameters: Params,
    /// Where the picture is, once there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_url: Option<String>,
    /// Milliseconds by stage, once done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing_ms: Option<TimingMs>,
    /// Why there is no picture.
    pub error: Option<ErrorObject>,
}

/// All jobs.
#[derive(Serialize, ToSchema)]
pub struct JobList {
    /// Jobs, oldest first.
    pub jobs: Vec<JobView>,
}

/// Queues one picture and answers at once.
#[utoipa::path(
    post, path = "/generate", tag = "jobs",
    request_body = GenerateRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key with the same body gets the same job")),
    responses(
        (status = 202, body = Accepted, headers(("Location" = String, description = "The job"))),
        Refusals
    )
)]
pub async fn generate(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    app.ready()?;
    body::content_type(&headers, false)?;
    let received = body::read(&app, &headers, body).await?;
    let waiters = ask::submit(&app, &caller, &headers, parse(&received.bytes)?).await?;
    let [waiter] = waiters.as_slice() else { return Err(ApiError::internal("one picture was asked for")) };
    let job = &waiter.job;
    let place = app.queue.place(&job.id);
    let accepted = Accepted {
        job_id: job.id.clone(),
        status: job.state(),
        position: place.map_or(0, |place| place.position),
        estimated_wait_s: place.map_or(Some(0.0), |place| place.wait),
        seed: job.params.seed,
    };
    let mut response = (StatusCode::ACCEPTED, Json(accepted)).into_response();
    if let Ok(location) = HeaderValue::from_str(&format!("/jobs/{}", job.id)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(about(response, job, None))
}

/// Reads the body of `POST /generate`.
pub fn parse(body: &[u8]) -> Result<Ask, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut ask = native(&mut fields, "/generate", "num_inference_steps", names)?;
    ask.previews = fields.integer("previews", 0..=3)?.unwrap_or(0) as usize;
    ask.detached = true;
    fields.end(&FIELDS)?;
    Ok(ask)
}

fn names(parameter: &str) -> String {
    match parameter {
        "steps" => "num_inference_steps".to_owned(),
        "guidance" => "guidance_scale".to_owned(),
        other => other.to_owned(),
    }
}

/// Every job that this process knows.
#[utoipa::path(get, path = "/jobs", tag = "jobs", responses((status = 200, body = JobList), JobRefusals))]
pub async fn list(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<JobList> {
    let jobs = app.queue.all();
    Json(JobList {
        jobs: jobs.iter().filter(|job| visible(&app, &caller, job)).map(|job| view(&app, job)).collect(),
    })
}

/// One job.
#[utoipa::path(
    get, path = "/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "Id of the job")),
    responses((status = 200, body = JobView), JobRefusals)
)]
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<JobView>, ApiError> {
    Ok(Json(view(&app, &find(&app, &caller, &id)?)))
}

/// The picture of a finished job.
#[utoipa::path(
    get, path = "/jobs/{id}/image", tag = "jobs", params(("id" = String, Path, description = "Id of the job")),
    responses((status = 200, content_type = "image/png", body = Vec<u8>), JobRefusals)
)]
pub async fn image(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let job = find(&app, &caller, &id)?;
    let conflict = |code, message| ApiError::new(StatusCode::CONFLICT, code, message).param("id");
    match job.outcome() {
        Some(Ok(picture)) => {
            let mime = job.params.output_format.mime();
            let response = ([(header::CONTENT_TYPE, mime)], picture.file.clone()).into_response();
            Ok(about(response, &job, Some(&picture)))
        }
        Some(Err(error)) => Err(conflict("no_image", format!("job {id} has no picture: {}", error.message))),
        None => {
            Err(conflict("not_done", format!("job {id} is not done yet; GET /jobs/{id} says how far it is"))
                .retry_after(1))
        }
    }
}

/// Cancels a job: a waiting one at once, a running one within one operation of a step.
#[utoipa::path(
    post, path = "/jobs/{id}/cancel", tag = "jobs", params(("id" = String, Path, description = "Id of the job")),
    responses((status = 200, body = JobView), JobRefusals)
)]
pub async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<JobView>, ApiError> {
    let job = find(&app, &caller, &id)?;
    if !app.queue.cancel(&job) {
        let state = format!("{:?}", job.state()).to_lowercase();
        let message = format!("job {id} has ended already: {state}");
        return Err(ApiError::new(StatusCode::CONFLICT, "already_ended", message).param("id"));
    }
    let _ = tokio::time::timeout(CANCEL_WAIT, job.ended()).await;
    Ok(Json(view(&app, &job)))
}

/// The job, if the caller may see it.
pub fn find(app: &App, caller: &Caller, id: &str) -> Result<Arc<Job>, ApiError> {
    let shown = crate::fields::clip(id);
    match app.queue.find(id) {
        Found::Job(job) if visible(app, caller, &job) => Ok(job),
        Found::Gone => Err(ApiError::reaped_job(&shown)),
        _ => Err(ApiError::unknown_job(&shown)),
    }
}

/// With API keys, everybody sees his own jobs alone.
fn visible(app: &App, caller: &Caller, job: &Job) -> bool {
    !app.keys.required() || job.client == caller.client
}

/// What is told about a job.
pub fn view(app: &App, job: &Arc<Job>) -> JobView {
    let snapshot = job.snapshot();
    let place = app.queue.place(&job.id);
    let (image_url, timing_ms, error) = match &snapshot.outcome {
        Some(Ok(picture)) => (Some(format!("/jobs/{}/image", job.id)), Some(picture.timing_ms.clone()), None),
        Some(Err(error)) => (None, None, Some(error.body().error)),
        None => (None, None, None),
    };
    let done = snapshot.state == JobState::Done;
    JobView {
        id: job.id.clone(),
        job_id: job.id.clone(),
        state: snapshot.state,
        status: snapshot.state,
        position: place.map(|place| place.position),
        estimated_wait_s: place.and_then(|place| place.wait),
        stage: snapshot.stage.map(job::stage_name),
        step: snapshot.step,
        steps: job.params.num_steps,
        progress: if done { 1.0 } else { job.progress() },
        created_at: unix_seconds(job.created),
        started_at: snapshot.started.map(unix_seconds),
        finished_at: snapshot.finished.map(unix_seconds),
        parameters: job.params.clone(),
        image_url,
        timing_ms,
        error,
    }
}

/// Seconds since 1970, to the millisecond.
pub fn unix_seconds(time: SystemTime) -> f64 {
    let millis = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    millis as f64 / 1e3
}

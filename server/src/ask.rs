// SPDX-License-Identifier: Apache-2.0
//! One request for pictures, whatever route it came by: checked, its references decoded, then queued.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use flux2::{
    Request, RequestError,
    request::{Limits, SEED_END},
};
use opentelemetry::trace::SpanContext;
use sha2::{Digest, Sha256};

use crate::{
    app::App,
    errors::ApiError,
    images::{self, EncodedImage},
    picture::OutputFormat,
    queue::{
        IdempotencyKey, Waiter,
        job::{Client, Job, Params},
    },
};

/// Seed of the native routes when none is given, as on the model's card.
pub const DEFAULT_SEED: u64 = 42;
/// Most pictures of one request.
pub const MAX_PICTURES: u64 = 10;
/// Longest `Idempotency-Key`.
const MAX_KEY: usize = 255;

/// Who asks; set by the middleware on every request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Id of the request, echoed as `X-Request-Id`.
    pub request_id: String,
    /// API key or peer address.
    pub client: Client,
    /// Span of the request; not valid where spans are not exported.
    pub trace: SpanContext,
}

/// What is asked.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Route, for messages and idempotency.
    pub route: &'static str,
    /// Prompt.
    pub prompt: String,
    /// Width in pixels, if given.
    pub width: Option<u64>,
    /// Height in pixels, if given.
    pub height: Option<u64>,
    /// Seed, if given.
    pub seed: Option<u64>,
    /// Whether an omitted seed is drawn at random instead of [`DEFAULT_SEED`].
    pub random_seed: bool,
    /// Denoising steps, if given.
    pub steps: Option<u64>,
    /// Guidance scale, if given.
    pub guidance: Option<f64>,
    /// Reference images.
    pub images: Vec<EncodedImage>,
    /// Number of previews, 0 to 3.
    pub previews: usize,
    /// Number of pictures; the seeds of the further ones count up.
    pub count: usize,
    /// File format.
    pub format: OutputFormat,
    /// JPEG quality.
    pub quality: u8,
    /// Whether it goes on when nobody waits.
    pub detached: bool,
    /// Renames the model's parameters to the route's fields.
    pub names: fn(&str) -> String,
}

impl Ask {
    /// Digest of everything that is asked.
    fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut add = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(self.route.as_bytes());
        add(self.prompt.as_bytes());
        let Self { width, height, seed, steps, guidance, previews, count, format, quality, .. } = self;
        add(format!("{:?}", (width, height, seed, steps, guidance, previews, count, format, quality))
            .as_bytes());
        for image in &self.images {
            add(image.as_bytes());
        }
        hash.finalize().into()
    }

    fn refused(&self, error: &RequestError) -> ApiError {
        ApiError::request(error, (self.names)(&error.parameter))
    }
}

/// The header's key, if there is one.
fn idempotency(headers: &HeaderMap, caller: &Caller, ask: &Ask) -> Result<Option<IdempotencyKey>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    match value.to_str() {
        Ok(key) if !key.is_empty() && key.len() <= MAX_KEY => Ok(Some(IdempotencyKey {
            client: caller.client.clone(),
            key: key.to_owned(),
            content: ask.digest(),
        })),
        _ => {
            Err(ApiError::field("Idempotency-Key", format!("wanted 1 to {MAX_KEY} visible ASCII characters")))
        }
    }
}

/// Steps after which a run of `steps` shows `count` previews, evenly spread; never after the last.
fn preview_steps(count: usize, steps: usize) -> Vec<usize> {
    let mut after: Vec<usize> = (1..=count).map(|index| (index * steps).div_ceil(count + 1)).collect();
    after.dedup();
    after.retain(|step| *step < steps);
    after
}

/// Checks the number of references before any is decoded: there may be a thousand.
///
/// # Errors
/// A refusal of `images`.
pub fn check_number(images: usize, limits: &Limits) -> Result<(), RequestError> {
    if images <= limits.max_references {
        return Ok(());
    }
    Err(RequestError::new("images", format!("got {images}, at most {} are allowed", limits.max_references)))
}

/// Checks `ask`, decodes its references and queues it.
///
/// # Errors
/// 503 before anything if no work is taken; 422 for the first thing that is wrong; 429 when there is no room.
pub async fn submit(
    app: &Arc<App>,
    caller: &Caller,
    headers: &HeaderMap,
    ask: Ask,
) -> Result<Vec<Waiter>, ApiError> {
    let model = app.ready()?;
    let key = idempotency(headers, caller, &ask)?;
    if let Some(key) = &key
        && let Some(known) = app.queue.find_key(key)?
    {
        return Ok(known);
    }
    let mut request = app.default_request(ask.prompt.clone());
    request.width = ask.width.map_or(request.width, |width| width as usize);
    request.height = ask.height.map_or(request.height, |height| height as usize);
    request.steps = ask.steps.map_or(request.steps, |steps| steps as usize);
    request.guidance = ask.guidance.map(|guidance| guidance as f32).or(request.guidance);
    request.seed = match ask.seed {
        Some(seed) => seed,
        None if ask.random_seed => random_seed()?,
        None => DEFAULT_SEED,
    };
    let limits = &model.info.limits;
    limits.check(&request).map_err(|error| ask.refused(&error))?;
    check_number(ask.images.len(), limits).map_err(|error| ask.refused(&error))?;

    let (ask, request) = prepare(app, ask, request).await?;
    limits.check(&request).map_err(|error| ask.refused(&error))?;
    let tokens = model
        .tokenizer
        .encode(&ask.prompt)
        .map_err(|error| ApiError::field((ask.names)("prompt"), error.to_string()))?;

    let work = app.work(&request);
    let jobs = (0..ask.count).map(|index| {
        let params = Params {
            prompt: ask.prompt.clone(),
            width: request.width,
            height: request.height,
            seed: (request.seed + index as u64) % SEED_END,
            num_steps: request.steps,
            guidance_scale: request.guidance,
            reference_count: request.references.len(),
            prompt_tokens: tokens.total,
            prompt_truncated: tokens.truncated(),
            output_format: ask.format,
            quality: ask.quality,
            previews: preview_steps(ask.previews, request.steps),
            sized: ask.width.is_some() || ask.height.is_some(),
        };
        Job::new(caller, params, request.references.clone(), work, ask.detached, key.is_some())
    });
    app.queue.submit(jobs.collect(), key.as_ref())
}

/// Decodes the references into the request, on a blocking thread.
async fn prepare(app: &Arc<App>, ask: Ask, mut request: Request) -> Result<(Ask, Request), ApiError> {
    if ask.images.is_empty() {
        return Ok((ask, request));
    }
    let slot = app.codec_slots.clone().acquire_owned().await;
    let decoding = tokio::task::spawn_blocking(move || {
        let _slot = slot;
        let decoded = images::decode_references(&ask.images);
        (ask, decoded)
    });
    let (ask, decoded) = decoding
        .await
        .map_err(|error| ApiError::internal(format!("decoding the references failed: {error}")))?;
    request.references = decoded.map_err(|error| ask.refused(&error))?;
    Ok((ask, request))
}

fn random_seed() -> Result<u64, ApiError> {
    getrandom::u64().map(|bits| bits % SEED_END).map_err(|error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "no_entropy", format!("no random seed: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn previews_are_spread_and_never_follow_the_last_step() {
        assert_eq!(preview_steps(0, 4), [0_usize; 0]);
        assert_eq!(preview_steps(1, 4), [2]);
        assert_eq!(preview_steps(2, 4), [2, 3]);
        assert_eq!(preview_steps(3, 4), [1, 2, 3]);
        assert_eq!(preview_steps(3, 2), [1]);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The streamed answer of the OpenAI routes: partial images, then the finished one.

use std::{convert::Infallible, sync::Arc};

use axum::response::{
    IntoResponse, Response,
    sse::{Event, Sse},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures_util::StreamExt;
use serde_json::{Value, json};

use super::{
    job_events::{News, news},
    openai::{Usage, created},
};
use crate::{
    app::App,
    queue::{
        Waiter,
        job::{Job, JobEvent},
    },
};

/// Which route is answered.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `/v1/images/generations`.
    Generation,
    /// `/v1/images/edits`.
    Edit,
}

impl Kind {
    const fn event(self, partial: bool) -> &'static str {
        match (self, partial) {
            (Self::Generation, true) => "image_generation.partial_image",
            (Self::Generation, false) => "image_generation.completed",
            (Self::Edit, true) => "image_edit.partial_image",
            (Self::Edit, false) => "image_edit.completed",
        }
    }
}

/// Streams a job's pictures. `waiter` lives as long as the stream: a client that goes away takes the run with him.
pub fn respond(app: Arc<App>, job: Arc<Job>, waiter: Option<Waiter>, kind: Kind) -> Response {
    let keep_alive = app.config.keep_alive();
    let mut partials = 0;
    let events = news(app, job.clone(), 0).filter_map(move |news| {
        let _held = &waiter;
        let event = match news {
            News::Event(_, JobEvent::Preview { file, .. }) => {
                partials += 1;
                let mut data = common(&job, kind.event(true), &file);
                data["partial_image_index"] = json!(partials - 1);
                Some((kind.event(true), data))
            }
            News::Event(_, JobEvent::Ended) => Some(match job.outcome() {
                Some(Ok(picture)) => {
                    let mut data = common(&job, kind.event(false), &picture.file);
                    data["usage"] = json!(Usage::of(&job.params));
                    data["timing_ms"] = json!(picture.timing_ms);
                    (kind.event(false), data)
                }
                Some(Err(error)) => ("error", json!({"type": "error", "error": error.body().error})),
                None => (
                    "error",
                    json!({"type": "error", "error": {"message": "the job ended without an outcome"}}),
                ),
            }),
            News::Event(..) | News::Place(_) => None,
        };
        let event = event
            .map(|(name, data)| Ok::<_, Infallible>(Event::default().event(name).data(data.to_string())));
        std::future::ready(event)
    });
    Sse::new(events).keep_alive(keep_alive).into_response()
}

fn common(job: &Job, kind: &str, file: &[u8]) -> Value {
    let params = &job.params;
    json!({
        "type": kind,
        "b64_json": STANDARD.encode(file),
        "created_at": created(job.created),
        "size": format!("{}x{}", params.width, params.height),
        "quality": "auto",
        "background": "opaque",
        "output_format": params.output_format.name(),
        "seed": params.seed,
    })
}

// SPDX-License-Identifier: Apache-2.0
//! `GET /jobs/{id}/events`: a job's life as server-sent events, from its beginning or from `Last-Event-ID`.

use std::{convert::Infallible, sync::Arc};

use axum::{
    Extension,
    extract::{Path, State},
    http::HeaderMap,
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures_util::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    app::App,
    ask::Caller,
    errors::ApiError,
    openapi::JobRefusals,
    queue::{
        Place,
        job::{Job, JobEvent, State as JobState},
    },
    routes::jobs::{find, view},
};

/// Follows a job: `queued` with its position, `started`, `step`, `preview`, then `done`, `error` or `cancelled`.
#[utoipa::path(
    get, path = "/jobs/{id}/events", tag = "jobs",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("Last-Event-ID" = Option<String>, Header, description = "Go on behind this event")
    ),
    responses((status = 200, content_type = "text/event-stream", body = Object), JobRefusals)
)]
pub async fn events(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let job = find(&app, &caller, &id)?;
    let seen = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let next = seen.map_or(0, |seen| seen.saturating_add(1));
    let keep_alive = app.config.keep_alive();
    Ok(Sse::new(follow(app, job, next)).keep_alive(keep_alive).into_response())
}

/// Something to tell about a job.
pub enum News {
    /// Event number `.0` of the job.
    Event(usize, JobEvent),
    /// Its place in the line changed.
    Place(Place),
}

struct Follower {
    app: Arc<App>,
    job: Arc<Job>,
    next: usize,
    ended: bool,
    place: Option<Place>,
    events: watch::Receiver<usize>,
    line: watch::Receiver<u64>,
}

/// Everything that happens to `job` from event `next` on, until it ends.
pub fn news(app: Arc<App>, job: Arc<Job>, next: usize) -> impl Stream<Item = News> + Send {
    let (events, line) = (job.watch(), app.queue.watch());
    let follower = Follower { app, job, next, ended: false, place: None, events, line };
    stream::unfold(follower, |mut follower| async move {
        loop {
            if follower.ended {
                return None;
            }
            follower.events.borrow_and_update();
            follower.line.borrow_and_update();
            if let Some(event) = follower.job.events_from(follower.next).into_iter().next() {
                let number = follower.next;
                follower.next += 1;
                follower.ended = matches!(event, JobEvent::Ended);
                return Some((News::Event(number, event), follower));
            }
            let state = follower.job.state();
            if !matches!(state, JobState::Queued | JobState::Running) {
                return None; // The client has seen the end already.
            }
            let place = follower.app.queue.place(&follower.job.id);
            if state == JobState::Queued
                && let Some(place) = place
                && follower.place.map(|place| place.position) != Some(place.position)
            {
                follower.place = Some(place);
                return Some((News::Place(place), follower));
            }
            tokio::select! {
                changed = follower.events.changed() => if changed.is_err() { return None },
                changed = follower.line.changed() => if changed.is_err() { return None },
            }
        }
    })
}

fn follow(app: Arc<App>, job: Arc<Job>, next: usize) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    use futures_util::StreamExt;
    news(app.clone(), job.clone(), next).map(move |news| {
        let (name, data) = match &news {
            News::Place(place) => {
                ("queued", json!({"position": place.position, "estimated_wait_s": place.wait}))
            }
            News::Event(_, event) => describe(&app, &job, event),
        };
        let event = Event::default().event(name).data(data.to_string());
        Ok(match news {
            News::Event(number, _) => event.id(number.to_string()),
            News::Place(_) => event,
        })
    })
}

fn describe(app: &App, job: &Arc<Job>, event: &JobEvent) -> (&'static str, Value) {
    match event {
        JobEvent::Started => ("started", json!({"steps": job.params.num_steps})),
        JobEvent::Step { step, steps, seconds } => {
            ("step", json!({"step": step, "steps": steps, "seconds": seconds}))
        }
        JobEvent::Preview { step, file } => {
            let format = job.params.output_format.name();
            ("preview", json!({"step": step, "b64_json": STANDARD.encode(file), "output_format": format}))
        }
        JobEvent::Ended => match job.outcome() {
            Some(Err(error)) if job.state() == JobState::Error => ("error", json!(error.body())),
            _ => {
                let name = if job.state() == JobState::Cancelled { "cancelled" } else { "done" };
                (name, json!(view(app, job)))
            }
        },
    }
}

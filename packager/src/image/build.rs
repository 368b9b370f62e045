// SPDX-License-Identifier: Apache-2.0
//! Building the image: the context goes to the engine, its messages come back, an image id remains.

use std::{collections::HashMap, path::Path, time::Duration};

use bollard::{
    body_try_stream,
    errors::Error,
    query_parameters::{BuildImageOptionsBuilder, BuilderVersion},
};
use clap::ValueEnum;
use futures_util::StreamExt as _;

use super::{
    context::Context,
    dockerfile::buildkit_features,
    engine::{Engine, ended_within_a_line},
    events::Follower,
    stream,
};
use crate::error::{At, Class, Failure, Result};

/// Which builder of the engine does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Builder {
    /// BuildKit if the engine has it; the classic one if BuildKit's session fails and the Dockerfile allows it.
    #[default]
    Auto,
    /// BuildKit only.
    Buildkit,
    /// The classic builder only.
    Classic,
}

/// What to build.
#[derive(Debug, Clone)]
pub struct Request {
    /// Path of the Dockerfile in the context.
    pub dockerfile: String,
    /// Its stage.
    pub target: Option<String>,
    /// Build arguments.
    pub args: HashMap<String, String>,
    /// Labels.
    pub labels: HashMap<String, String>,
    /// Name of the result in the engine.
    pub tag: String,
    /// Use no layer of an earlier build.
    pub from_scratch: bool,
    /// Which builder.
    pub builder: Builder,
    /// Longest time without any message.
    pub idle: Duration,
    /// Host network for RUN steps.
    pub host_network: bool,
}

/// Checks that need no build: a Dockerfile that the engine cannot do is refused before anything is sent.
pub fn preflight(engine: &Engine, dockerfile: &Path, builder: Builder) -> Result<Builder> {
    let text = std::fs::read_to_string(dockerfile).at("read", dockerfile)?;
    let features = buildkit_features(&text);
    // Podman builds these itself behind the classic call, and has no BuildKit call.
    let has_buildkit = !engine.podman && version(&engine.api) >= (1, 39);
    match (builder, features.first()) {
        (Builder::Classic, Some((line, feature))) if !engine.podman => {
            let failure =
                Failure::new(Class::Engine, format!("{}:{line} uses {feature}", dockerfile.display()));
            Err(failure.why("the classic builder does not know it").next("build without --builder classic"))
        }
        (Builder::Buildkit | Builder::Auto, Some((line, feature))) if !has_buildkit && !engine.podman => {
            let failure =
                Failure::new(Class::Engine, format!("{}:{line} uses {feature}", dockerfile.display()));
            Err(failure
                .why(format!("engine {} (API {}) has no BuildKit", engine.version, engine.api))
                .next("use Docker 18.09 or newer"))
        }
        (Builder::Buildkit, _) if !has_buildkit => {
            Err(Failure::new(Class::Engine, format!("engine {} has no BuildKit", engine.version))
                .next("build without --builder buildkit"))
        }
        (Builder::Auto, None) if !has_buildkit => Ok(Builder::Classic),
        (Builder::Auto, Some(_)) if engine.podman => Ok(Builder::Classic),
        (Builder::Auto, Some(_)) => Ok(Builder::Buildkit),
        (other, _) => Ok(other),
    }
}

/// "1.41" → (1, 41).
pub fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Builds; returns the image's id. The caller's Ctrl-C drops this future, which ends the build in the
/// engine and removes its containers.
pub async fn build(
    engine: &Engine,
    context: &Context,
    request: &Request,
    log: &Path,
    quiet: bool,
) -> Result<String> {
    let mut follower = Follower::new(log, quiet)?;
    let first = if request.builder == Builder::Classic { Builder::Classic } else { Builder::Buildkit };
    match attempt(engine, context.clone(), request, first, &mut follower).await {
        Err(Stopped::Session(why)) if request.builder == Builder::Auto => {
            follower.finish();
            if !quiet {
                eprintln!("BuildKit did not work here ({why}); using the classic builder");
            }
            let mut follower = Follower::new(log, quiet)?;
            attempt(engine, context.clone(), request, Builder::Classic, &mut follower)
                .await
                .map_err(|stopped| stopped.into_failure(&mut follower, request))
        }
        other => other.map_err(|stopped| stopped.into_failure(&mut follower, request)),
    }
}

enum Stopped {
    /// BuildKit's session or messages failed, not the build.
    Session(String),
    /// The engine reported an error of the build.
    Engine(String),
    /// Something else, already said in full.
    Other(Failure),
}

impl Stopped {
    fn into_failure(self, follower: &mut Follower, request: &Request) -> Failure {
        match self {
            Self::Other(failure) => {
                follower.finish();
                failure
            }
            Self::Engine(says) => follower.failure(&says),
            Self::Session(says) => {
                let bases: Vec<&str> = request
                    .args
                    .iter()
                    .filter(|(name, _)| name.contains("IMAGE"))
                    .map(|(_, value)| value.as_str())
                    .collect();
                let failure = follower.failure(&format!(
                    "BuildKit's session failed: {says} (base images: {})",
                    bases.join(", ")
                ));
                Failure {
                    next: format!(
                        "{}; build with --builder classic if the Dockerfile allows it",
                        failure.next
                    ),
                    ..failure
                }
            }
        }
    }
}

async fn attempt(
    engine: &Engine,
    context: Context,
    request: &Request,
    builder: Builder,
    follower: &mut Follower,
) -> Result<String, Stopped> {
    let mut options = BuildImageOptionsBuilder::default()
        .dockerfile(&request.dockerfile)
        .t(&request.tag)
        .rm(true)
        .forcerm(true)
        .nocache(request.from_scratch)
        .buildargs(&request.args)
        .labels(&request.labels);
    if let Some(target) = &request.target {
        options = options.target(target);
    }
    if request.host_network {
        options = options.networkmode("host");
    }
    if builder == Builder::Buildkit {
        options = options.version(BuilderVersion::BuilderBuildKit).session(&unique());
    }
    let (body, producer) = stream::produce(move |chunks| context.write(chunks));
    let mut messages =
        std::pin::pin!(engine.docker.build_image(options.build(), None, Some(body_try_stream(body))));
    let mut cut = false;
    loop {
        let message = tokio::time::timeout(request.idle, messages.next()).await.map_err(|_| {
            let limit = request.idle.as_secs();
            let failure =
                Failure::new(Class::Engine, format!("the build gave no sign of life for {limit} s"));
            Stopped::Other(failure.next("look at the engine's log; a longer limit: --idle-minutes"))
        })?;
        match message {
            None => break,
            Some(Ok(info)) => follower.take(info),
            // The image was reported; whether it is the one that has the tag is asked below.
            Some(Err(error)) if follower.image.is_some() && ended_within_a_line(&error) => {
                cut = true;
                break;
            }
            Some(Err(error)) => return Err(classify(error, producer, builder).await),
        }
    }
    if let Ok(Err(failure)) = producer.await {
        return Err(Stopped::Other(failure));
    }
    follower.finish();
    // A stream that ends without an image is a failure, whatever it said before.
    match engine.docker.inspect_image(&request.tag).await.map(|image| image.id) {
        Ok(Some(id)) if !cut || follower.image.as_ref() == Some(&id) => Ok(id),
        Ok(Some(id)) => Err(Stopped::Engine(format!(
            "the build made {}, but {} is {id}",
            follower.image.as_deref().unwrap_or_default(),
            request.tag
        ))),
        Ok(None) => Err(Stopped::Engine("the engine reports no image id".into())),
        Err(error) => Err(Stopped::Engine(format!(
            "the build ended without an image: {}",
            super::engine::root_cause(&error)
        ))),
    }
}

async fn classify(error: Error, producer: tokio::task::JoinHandle<Result<()>>, builder: Builder) -> Stopped {
    let text = match error {
        Error::DockerStreamError { error } => error,
        Error::DockerResponseServerError { message, .. } => message,
        // The engine's words were not understood: not the build's fault, and the other builder may do.
        Error::JsonDataError { message, .. } if builder == Builder::Buildkit => {
            return Stopped::Session(format!("a message of the engine cannot be read: {message}"));
        }
        other => {
            if let Ok(Ok(Err(failure))) = tokio::time::timeout(Duration::from_secs(5), producer).await {
                return Stopped::Other(failure);
            }
            super::engine::root_cause(&other)
        }
    };
    let session = ["no active session", "session healthcheck", "context deadline exceeded"]
        .iter()
        .any(|mark| text.contains(mark));
    if session && builder == Builder::Buildkit { Stopped::Session(text) } else { Stopped::Engine(text) }
}

/// A name that no other build has.
pub fn unique() -> String {
    use std::time::{SystemTime, UNIX_EPOCH};
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    crate::files::sha256(format!("{now} {}", std::process::id()))[..25].to_owned()
}

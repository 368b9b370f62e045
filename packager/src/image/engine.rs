// SPDX-License-Identifier: Apache-2.0
//! Finding the container engine: one resolver for every command, so that no two steps of a build can
//! talk to different engines.
//!
//! Order: `DOCKER_HOST`; the Docker CLI's context (`DOCKER_CONTEXT`, else its config file); then the
//! sockets where engines listen: Docker, rootless Docker, Podman. An explicit choice (the first two)
//! that does not answer is an error, never a reason to use another engine.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use bollard::{API_DEFAULT_VERSION, Docker};
use serde_json::Value;

use crate::{
    error::{Class, Failure, Result},
    files,
    pins::ImagePin,
};

/// Seconds until response headers must arrive. Sending a context counts, so the limit is far away; a
/// stalled transfer is noticed by the progress watchdog instead.
const HEADER_LIMIT: u64 = 4 * 60 * 60;
/// Engine versions this was run against.
pub const TESTED_API: (&str, &str) = ("1.41", "1.41");

/// A place where an engine may listen, and where the packager knows it from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// `unix:///path` or `tcp://host:port`.
    pub host: String,
    /// Who says so.
    pub from: String,
}

/// A connected engine that answered.
#[derive(Debug, Clone)]
pub struct Engine {
    /// The client, with the API version negotiated.
    pub docker: Docker,
    /// Where it listens.
    pub host: String,
    /// Server version, as it says.
    pub version: String,
    /// API version in use.
    pub api: String,
    /// True if the engine says it is Podman.
    pub podman: bool,
    /// True if it runs without root.
    pub rootless: bool,
}

/// What the resolver reads from the environment; apart, so that tests can set it.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `DOCKER_HOST`.
    pub docker_host: Option<String>,
    /// `DOCKER_CONTEXT`.
    pub docker_context: Option<String>,
    /// `DOCKER_CONFIG`, else `~/.docker`.
    pub config: PathBuf,
    /// `XDG_RUNTIME_DIR`.
    pub runtime: Option<PathBuf>,
    /// Home directory.
    pub home: PathBuf,
}

impl Environment {
    /// The process's own.
    pub fn read() -> Self {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let home = PathBuf::from(variable("HOME").unwrap_or_else(|| "/".into()));
        Self {
            docker_host: variable("DOCKER_HOST"),
            docker_context: variable("DOCKER_CONTEXT"),
            config: variable("DOCKER_CONFIG").map_or_else(|| home.join(".docker"), PathBuf::from),
            runtime: variable("XDG_RUNTIME_DIR").map(PathBuf::from),
            home,
        }
    }

    /// Where to try, in order. One entry if the user chose.
    pub fn candidates(&self) -> Result<Vec<Candidate>> {
        let one = |host: String, from: String| Ok(vec![Candidate { host, from }]);
        if let Some(host) = &self.docker_host {
            return one(host.clone(), "DOCKER_HOST".into());
        }
        let config = fs::read(self.config.join("config.json")).ok();
        let config: Value = config.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let (name, from) = match (&self.docker_context, config["currentContext"].as_str()) {
            (Some(name), _) => (Some(name.as_str()), "DOCKER_CONTEXT"),
            (None, name) => (name, "the current Docker context"),
        };
        if let Some(name) = name.filter(|name| *name != "default" && !name.is_empty()) {
            let Some(host) = self.context_host(name) else {
                let what =
                    format!("{from} is `{name}`, and no such context is stored in {}", self.config.display());
                let next = "run: docker context ls; then docker context use <name>, or set DOCKER_HOST";
                return Err(Failure::new(Class::Engine, what).next(next));
            };
            return one(host, format!("{from} ({name})"));
        }
        let unix = |path: &Path, from: &str| Candidate {
            host: format!("unix://{}", path.display()),
            from: from.into(),
        };
        let mut list = vec![unix(Path::new("/var/run/docker.sock"), "Docker's socket")];
        if let Some(runtime) = &self.runtime {
            list.push(unix(&runtime.join("docker.sock"), "rootless Docker's socket"));
        }
        list.push(unix(&self.home.join(".docker/run/docker.sock"), "Docker Desktop's socket"));
        if let Some(runtime) = &self.runtime {
            list.push(unix(&runtime.join("podman/podman.sock"), "rootless Podman's socket"));
        }
        list.push(unix(Path::new("/run/podman/podman.sock"), "Podman's socket"));
        Ok(list)
    }

    /// The CLI stores a context under the digest of its name.
    fn context_host(&self, name: &str) -> Option<String> {
        let path = self.config.join("contexts/meta").join(files::sha256(name)).join("meta.json");
        let meta: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        meta["Endpoints"]["docker"]["Host"].as_str().map(str::to_owned)
    }
}

/// The engine, by the environment of this process.
pub async fn find() -> Result<Engine> {
    find_in(&Environment::read()).await
}

/// The first candidate that answers; else an error that lists what was tried and why each failed.
pub async fn find_in(environment: &Environment) -> Result<Engine> {
    let mut tried = Vec::new();
    for candidate in environment.candidates()? {
        match connect(&candidate.host).await {
            Ok(engine) => return Ok(engine),
            Err(why) => tried.push(format!("{} ({}): {why}", candidate.host, candidate.from)),
        }
    }
    let failure = Failure::new(Class::Engine, "no container engine answers").why(tried.join("; "));
    Err(failure.next("start Docker (or Podman's socket service), or set DOCKER_HOST to where it listens"))
}

/// Connects and negotiates: an answer to a ping alone would not prove that requests will be understood.
async fn connect(host: &str) -> Result<Engine, String> {
    let docker = if let Some(path) = host.strip_prefix("unix://") {
        let meta = fs::metadata(path).map_err(|error| error.to_string())?;
        if !std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) {
            return Err("this is no socket".into());
        }
        Docker::connect_with_unix(path, HEADER_LIMIT, API_DEFAULT_VERSION)
    } else if host.starts_with("tcp://") || host.starts_with("http://") {
        Docker::connect_with_http(host, HEADER_LIMIT, API_DEFAULT_VERSION)
    } else {
        let scheme = host.split_once("://").map_or(host, |(scheme, _)| scheme);
        return Err(format!(
            "the scheme {scheme} is not supported here; use unix:// or tcp://, or forward the socket with ssh -L"
        ));
    };
    let docker = docker.map_err(|error| error.to_string())?;
    let attempt = async {
        let docker = docker.negotiate_version().await.map_err(|error| root_cause(&error))?;
        let version = docker.version().await.map_err(|error| root_cause(&error))?;
        let info = docker.info().await.map_err(|error| root_cause(&error))?;
        Ok::<_, String>((docker, version, info))
    };
    let (docker, version, info) = tokio::time::timeout(Duration::from_secs(5), attempt)
        .await
        .map_err(|_| "no answer within 5 s".to_owned())??;
    let podman = version.components.iter().flatten().any(|component| component.name.contains("Podman"));
    let rootless = info.security_options.iter().flatten().any(|option| option.contains("rootless"));
    let api = docker.client_version().to_string();
    Ok(Engine {
        docker,
        host: host.into(),
        version: version.version.unwrap_or_default(),
        api,
        podman,
        rootless,
    })
}

/// The innermost cause: "client error (Connect)" helps nobody.
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Whether a stream of messages ended with bytes that are no whole message. That is a message cut off, or
/// nothing but the last line's `\r\n`: bollard 0.21 takes a message as soon as its `}` is there, and when
/// the line's end comes in a later chunk it has `\r` left over. Who gets this must ask the engine what is true.
pub fn ended_within_a_line(error: &bollard::errors::Error) -> bool {
    // The words are tokio-util's (`Decoder::decode_eof`); the error has no type of its own.
    matches!(error, bollard::errors::Error::IOError { err } if err.to_string() == "bytes remaining on stream")
}

impl Engine {
    /// A failure of this engine.
    pub fn failed(&self, what: impl Into<String>, error: &bollard::errors::Error) -> Failure {
        use bollard::errors::Error;
        let why = match error {
            Error::DockerResponseServerError { message, .. } => message.clone(),
            Error::DockerStreamError { error } => error.clone(),
            other => root_cause(other),
        };
        let class = if why.contains("no space left on device") { Class::Disk } else { Class::Engine };
        Failure::new(class, what).why(why).next(format!("the engine is {} at {}", self.version, self.host))
    }

    /// What a base image's name stands for in this engine.
    pub async fn image_pin(&self, name: &str) -> Result<ImagePin> {
        let image = self.docker.inspect_image(name).await.map_err(|error| {
            self.failed(format!("base image {name} is not in the engine"), &error)
                .next(format!("run: docker pull {name}"))
        })?;
        let repository = name.split('@').next().unwrap_or(name);
        let repository = repository
            .rsplit_once(':')
            .filter(|(_, tag)| !tag.contains('/'))
            .map_or(repository, |(repository, _)| repository);
        let digest = image.repo_digests.iter().flatten().find_map(|entry| {
            let (owner, digest) = entry.split_once('@')?;
            (owner == repository || owner.ends_with(&format!("/{repository}"))).then(|| digest.to_owned())
        });
        Ok(ImagePin { name: name.into(), digest, id: image.id })
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Every setting of the server: a flag, its variable, its default, and one sentence of help.
//!
//! `flux2-server config` prints the effective values; secrets are shown as "set" or not at all.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use axum::response::sse::KeepAlive;
use clap::{Args, ValueEnum};
use flux2::{
    DeviceChoice,
    spec::{self, ModelSpec},
};
use serde_json::{Value, json};

use crate::sizes::Sizes;

/// Longest base64 text of one reference image, in bytes.
pub const MAX_IMAGE_BASE64: usize = 14_000_000;
/// Largest reference image file: what fits in [`MAX_IMAGE_BASE64`].
pub const MAX_IMAGE_BYTES: usize = MAX_IMAGE_BASE64 / 4 * 3;
/// Room in a body for everything that is not an image.
const BODY_SLACK: usize = 1 << 20;

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What the device computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// The reference.
    F32,
    /// The fast one.
    Bf16,
}

impl From<Dtype> for flux2::device::Precision {
    fn from(choice: Dtype) -> Self {
        match choice {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// A model whose published weights are known by repository and revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Published {
    /// FLUX.2 klein 4B.
    #[default]
    #[value(name = "klein-4b")]
    Klein4b,
    /// FLUX.2 dev, 32B.
    Dev,
}

impl Published {
    /// What is known of it.
    pub const fn spec(self) -> &'static ModelSpec {
        match self {
            Self::Klein4b => &spec::KLEIN,
            Self::Dev => &spec::DEV,
        }
    }
}

/// Settings of `serve`.
#[derive(Args, Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // Independent switches of a command line.
pub struct Config {
    /// Address to listen on; 0.0.0.0 for every network (then set an API key)
    #[arg(long, env = "FLUX2_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "FLUX2_PORT", default_value_t = 20000)]
    pub port: u16,

    /// Checkpoint directory in diffusers layout; what is in it decides which model is served [default: $KLEIN_SNAPSHOT,
    /// else the pinned revision of --model in the Hugging Face cache]
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub checkpoint: Option<PathBuf>,
    /// Published model to look for where no checkpoint is named
    #[arg(long, env = "FLUX2_MODEL", value_enum, default_value_t, help_heading = "Model")]
    pub model: Published,
    /// Download the pinned weights into the Hugging Face cache if they are not complete there (klein: about 16 GB; dev:
    /// 103 GB, gated; honours HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE)
    #[arg(long, env = "FLUX2_DOWNLOAD", help_heading = "Model")]
    pub download: bool,
    /// Take the text encoder from here: a diffusers text_encoder directory or a Qwen3 checkpoint [default:
    /// $KLEIN_TEXT_ENCODER, else the checkpoint's own]
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,
    /// f32 is the reference, bf16 the fast one; each draws its own noise from a seed
    #[arg(long, env = "FLUX2_DTYPE", value_enum, default_value = "bf16", help_heading = "Model")]
    pub dtype: Dtype,
    /// Threads of the CPU device [default: one per physical core]
    #[arg(long, env = "FLUX2_THREADS", value_name = "N", help_heading = "Model")]
    pub threads: Option<usize>,
    /// Side in pixels of the square picture that warms the device up, where any size is served; 0 for none
    #[arg(long, env = "FLUX2_WARM_UP", value_name = "PIXELS", default_value_t = 512, help_heading = "Model")]
    pub warm_up: usize,
    /// Width in pixels of the one size that is served; with --any-size, of a request that names none [default: any width
    /// for klein, 1024 for dev]
    #[arg(long, env = "FLUX2_WIDTH", value_name = "PIXELS", help_heading = "Model")]
    pub width: Option<usize>,
    /// Height in pixels, as the width
    #[arg(long, env = "FLUX2_HEIGHT", value_name = "PIXELS", help_heading = "Model")]
    pub height: Option<usize>,
    /// Serve every size of the model's range, whatever the model; the CPU can
    #[arg(long, env = "FLUX2_ANY_SIZE", help_heading = "Model")]
    pub any_size: bool,
    /// Largest width and height that are served, 512 to 1920 [default: the model's own]
    #[arg(long, env = "FLUX2_MAX_SIDE", value_name = "PIXELS", help_heading = "Model")]
    pub max_side: Option<usize>,
    /// Revision of the weights, to be reported [default: the snapshot directory's name]
    #[arg(long, env = "FLUX2_MODEL_REVISION", value_name = "REVISION", help_heading = "Model")]
    pub model_revision: Option<String>,
    /// Licence of the weights, to be reported [default: the model's own]
    #[arg(long, env = "FLUX2_MODEL_LICENSE", value_name = "SPDX", help_heading = "Model")]
    pub model_license: Option<String>,
    /// Digest of the package, to be reported and written into pictures
    #[arg(long, env = "FLUX2_PACKAGE_DIGEST", value_name = "DIGEST", help_heading = "Model")]
    pub package_digest: Option<String>,
    /// Accept sizes from 16 pixels, for tests and small checkpoints
    #[arg(long, env = "FLUX2_SMALL_SIZES", hide = true)]
    pub small_sizes: bool,

    /// Requests that may wait at the same time
    #[arg(long, env = "FLUX2_QUEUE_SIZE", value_name = "N", default_value_t = 64, help_heading = "Queue")]
    pub queue_size: usize,
    /// Requests of one client (API key or address) that may wait at the same time
    #[arg(
        long,
        env = "FLUX2_QUEUE_PER_CLIENT",
        value_name = "N",
        default_value_t = 48,
        help_heading = "Queue"
    )]
    pub queue_per_client: usize,
    /// Longest estimated wait in seconds; a request that would wait longer is refused with 429
    #[arg(
        long,
        env = "FLUX2_MAX_WAIT",
        value_name = "SECONDS",
        default_value_t = 900,
        help_heading = "Queue"
    )]
    pub max_wait: u64,
    /// Longest run of one picture in seconds, counted from the start of its execution
    #[arg(
        long,
        env = "FLUX2_EXECUTION_LIMIT",
        value_name = "SECONDS",
        default_value_t = 1200.0,
        help_heading = "Queue"
    )]
    pub execution_limit: f64,
    /// Seconds past the execution limit after which a device that does not answer is given up
    #[arg(
        long,
        env = "FLUX2_STALL_LIMIT",
        value_name = "SECONDS",
        default_value_t = 30.0,
        help_heading = "Queue"
    )]
    pub stall_limit: f64,
    /// Seconds that the running picture may take to finish after SIGTERM; at most 100
    #[arg(
        long,
        env = "FLUX2_DRAIN_LIMIT",
        value_name = "SECONDS",
        default_value_t = 60.0,
        help_heading = "Queue"
    )]
    pub drain_limit: f64,
    /// Seconds that a finished job is kept
    #[arg(
        long,
        env = "FLUX2_JOB_TTL",
        value_name = "SECONDS",
        default_value_t = 3600.0,
        help_heading = "Queue"
    )]
    pub job_ttl: f64,
    /// MiB of finished pictures that are kept; the oldest go first
    #[arg(long, env = "FLUX2_JOB_MEMORY", value_name = "MIB", default_value_t = 512, help_heading = "Queue")]
    pub job_memory: usize,
    /// Finished jobs that are kept; the oldest go first
    #[arg(long, env = "FLUX2_JOB_COUNT", value_name = "N", default_value_t = 1000, help_heading = "Queue")]
    pub job_count: usize,

    /// API key that clients send as "Authorization: Bearer KEY". Prefer the variable or the file: every user of a
    /// machine can see arguments
    #[arg(long, env = "API_KEY", value_name = "KEY", hide_env_values = true, help_heading = "Access")]
    pub api_key: Option<String>,
    /// File with one API key a line, "name:key" or "key"; # starts a comment
    #[arg(long, env = "FLUX2_API_KEY_FILE", value_name = "FILE", help_heading = "Access")]
    pub api_key_file: Option<PathBuf>,
    /// Origins that browsers may call from, comma-separated, "*" for all; none by default
    #[arg(
        long,
        env = "FLUX2_CORS_ORIGINS",
        value_name = "ORIGINS",
        value_delimiter = ',',
        help_heading = "Access"
    )]
    pub cors_origins: Vec<String>,
    /// Connections at the same time
    #[arg(
        long,
        env = "FLUX2_MAX_CONNECTIONS",
        value_name = "N",
        default_value_t = 512,
        help_heading = "Access"
    )]
    pub max_connections: usize,
    /// Seconds within which a client must have sent its headers, and after which an idle connection is closed
    #[arg(
        long,
        env = "FLUX2_HEADER_LIMIT",
        value_name = "SECONDS",
        default_value_t = 30.0,
        help_heading = "Access"
    )]
    pub header_limit: f64,
    /// Seconds of silence after which an event stream says that it is alive
    #[arg(
        long,
        env = "FLUX2_KEEP_ALIVE",
        value_name = "SECONDS",
        default_value_t = 15.0,
        help_heading = "Access"
    )]
    pub keep_alive: f64,
    /// Seconds within which a client must have sent its body
    #[arg(
        long,
        env = "FLUX2_BODY_LIMIT",
        value_name = "SECONDS",
        default_value_t = 120.0,
        help_heading = "Access"
    )]
    pub body_limit: f64,
    /// MiB of request bodies that are held at the same time; further requests wait
    #[arg(
        long,
        env = "FLUX2_BODY_MEMORY",
        value_name = "MIB",
        default_value_t = 256,
        help_heading = "Access"
    )]
    pub body_memory: usize,

    /// How log lines are written
    #[arg(long, env = "FLUX2_LOG_FORMAT", value_enum, default_value = "text", help_heading = "Logs")]
    pub log_format: LogFormat,
    /// Which log lines: error, warn, info, debug, trace, or a filter as "server=debug,info"
    #[arg(long, env = "FLUX2_LOG", value_name = "FILTER", default_value = "info", help_heading = "Logs")]
    pub log: String,
    /// Export spans of requests and pictures by OTLP over HTTP to this collector, as http://localhost:4318; none by default
    #[arg(long, env = "FLUX2_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logs")]
    pub otlp_endpoint: Option<String>,
    /// Write prompts into the log
    #[arg(long, env = "FLUX2_LOG_PROMPTS", help_heading = "Logs")]
    pub log_prompts: bool,
    /// Leave the prompt out of the pictures' metadata
    #[arg(long, env = "FLUX2_OMIT_PROMPT", help_heading = "Logs")]
    pub omit_prompt: bool,
}

/// A setting outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--{flag}: {message}")]
pub struct ConfigError {
    pub(crate) flag: &'static str,
    pub(crate) message: String,
}

impl Config {
    /// Checks what the parser cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let refuse = |flag, message: String| Err(ConfigError { flag, message });
        for (flag, value, max) in [
            ("execution-limit", self.execution_limit, 86_400.0),
            ("stall-limit", self.stall_limit, 86_400.0),
            ("drain-limit", self.drain_limit, 100.0),
            ("job-ttl", self.job_ttl, 31_536_000.0),
            ("header-limit", self.header_limit, 3600.0),
            ("body-limit", self.body_limit, 3600.0),
            ("keep-alive", self.keep_alive, 3600.0),
        ] {
            if !(value > 0.0 && value <= max) {
                return refuse(flag, format!("got {value} seconds, wanted more than 0 and at most {max}"));
            }
        }
        for (flag, value) in [
            ("queue-size", self.queue_size),
            ("queue-per-client", self.queue_per_client),
            ("max-connections", self.max_connections),
            ("threads", self.threads.unwrap_or(1)),
        ] {
            if value == 0 {
                return refuse(flag, "got 0, wanted at least 1".into());
            }
        }
        let least = if self.small_sizes { 16 } else { 512 };
        if let Some(side) = self.max_side.filter(|side| !(least..=1920).contains(side)) {
            return refuse("max-side", format!("got {side}, wanted {least} to 1920"));
        }
        if self.body_memory * (1 << 20) < self.body_bytes(3) {
            let least = self.body_bytes(3).div_ceil(1 << 20);
            return refuse("body-memory", format!("got {} MiB, wanted at least {least}", self.body_memory));
        }
        if let Some(endpoint) = &self.otlp_endpoint
            && (!endpoint.starts_with("http://") || endpoint.contains(['@', '?', '#']))
        {
            let wanted = "wanted http://host:port of a collector; TLS and passwords are the collector's part";
            return refuse("otlp-endpoint", format!("got {endpoint:?}, {wanted}"));
        }
        for origin in &self.cors_origins {
            if origin != "*" && !(origin.starts_with("http://") || origin.starts_with("https://")) {
                return refuse(
                    "cors-origins",
                    format!("got {origin:?}, wanted \"*\" or http(s)://host[:port]"),
                );
            }
        }
        Ok(())
    }

    /// Largest request body: the images at their limit, and slack.
    pub const fn body_bytes(&self, references: usize) -> usize {
        references * MAX_IMAGE_BASE64 + BODY_SLACK
    }

    /// The execution limit.
    pub fn execution_limit(&self) -> Duration {
        Duration::from_secs_f64(self.execution_limit)
    }

    /// Comments on an event stream that has nothing to tell, so that nothing in between takes it for dead.
    pub fn keep_alive(&self) -> KeepAlive {
        KeepAlive::new().interval(Duration::from_secs_f64(self.keep_alive))
    }

    /// The checkpoint's directory: the one named, or where it is looked for.
    ///
    /// # Errors
    /// Every place looked at and what to do.
    pub fn checkpoint(&self) -> flux2::Result<PathBuf> {
        flux2::snapshot::find(self.model.spec(), self.checkpoint.as_deref())
    }

    /// The device to open.
    pub const fn device(&self) -> DeviceChoice {
        DeviceChoice::Cpu { threads: self.threads }
    }

    /// The text encoder's directory, where it is not the checkpoint's own.
    pub fn text_encoder(&self) -> Option<PathBuf> {
        self.text_encoder.clone().or_else(flux2::snapshot::text_encoder_override)
    }

    /// The effective values, without secrets. Width, height and whether any size is served are the checkpoint's, if there
    /// is one.
    pub fn effective(&self) -> Value {
        let checkpoint = self.checkpoint().ok();
        let sizes = checkpoint.as_deref().and_then(|path| Sizes::of_checkpoint(self, path).ok());
        let only = sizes.as_ref().and_then(|sizes| sizes.limits.only_size);
        json!({
            "host": self.host, "port": self.port,
            "checkpoint": checkpoint, "model": self.model.spec().name, "text_encoder": self.text_encoder(), "download": self.download,
            "dtype": flux2::device::Precision::from(self.dtype).name(), "threads": self.threads,
            "width": sizes.as_ref().map_or(self.width, |sizes| Some(sizes.default[0])),
            "height": sizes.as_ref().map_or(self.height, |sizes| Some(sizes.default[1])),
            "any_size": sizes.as_ref().map_or(self.any_size, |_| only.is_none()),
            "warm_up": self.warm_up, "max_side": self.max_side, "model_revision": self.model_revision, "model_license": self.model_license,
            "package_digest": self.package_digest,
            "queue_size": self.queue_size, "queue_per_client": self.queue_per_client, "max_wait": self.max_wait,
            "execution_limit": self.execution_limit, "stall_limit": self.stall_limit, "drain_limit": self.drain_limit,
            "job_ttl": self.job_ttl, "job_memory": self.job_memory, "job_count": self.job_count,
            "api_key": self.api_key.as_ref().map(|_| "set"), "api_key_file": self.api_key_file,
            "cors_origins": self.cors_origins, "max_connections": self.max_connections,
            "header_limit": self.header_limit, "keep_alive": self.keep_alive,
            "body_limit": self.body_limit, "body_memory": self.body_memory,
            "log_format": if self.log_format == LogFormat::Json { "json" } else { "text" }, "log": self.log,
            "otlp_endpoint": self.otlp_endpoint, "log_prompts": self.log_prompts, "omit_prompt": self.omit_prompt,
        })
    }
}

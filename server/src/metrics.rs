// SPDX-License-Identifier: Apache-2.0
//! What Prometheus reads. Names follow tt-media-server where it has one, so that its dashboards fit.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// Upper bounds in seconds, from a refused request to the execution limit.
const SECONDS: [f64; 18] = [
    0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 600.0,
    1200.0,
];

/// Labels of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// Method.
    pub method: String,
    /// Route pattern; `unknown` for paths that are none.
    pub route: String,
    /// Status code.
    pub status: u16,
}

/// Label of a route alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RouteLabel {
    /// Route pattern.
    pub route: String,
}

/// Label of an error code.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CodeLabel {
    /// The error's `code`.
    pub code: &'static str,
}

/// Whether a model load went well.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// `success` or `failure`.
    pub status: &'static str,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

/// Counters of the process.
pub struct Metrics {
    registry: Registry,
    /// Requests by route and status.
    pub requests: Family<RequestLabels, Counter>,
    /// Their durations.
    pub request_duration: Histograms<RouteLabel>,
    /// Refusals (4xx and 503) by code.
    pub rejections: Family<CodeLabel, Counter>,
    /// Failures (500 and 504) by code.
    pub failures: Family<CodeLabel, Counter>,
    /// Jobs on the device or being encoded.
    pub in_progress: Gauge,
    /// Jobs that wait.
    pub queue_size: Gauge,
    /// How long jobs waited.
    pub queue_wait: Histogram,
    /// Denoising steps.
    pub denoise_step: Histogram,
    /// VAE decodes.
    pub vae_decode: Histogram,
    /// Pictures made.
    pub images: Counter,
    /// References taken from the cache.
    pub reference_cache_hits: Counter,
    /// Model loads.
    pub model_load: Family<OutcomeLabel, Counter>,
    /// Time of the warm-up.
    pub warm_up: Gauge<f64, AtomicU64>,
    /// Memory that the weights take on the device.
    pub device_memory: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let metrics = Self {
            registry: Registry::with_prefix("tt_media_server"),
            requests: Family::default(),
            request_duration: Family::new_with_constructor(seconds),
            rejections: Family::default(),
            failures: Family::default(),
            in_progress: Gauge::default(),
            queue_size: Gauge::default(),
            queue_wait: seconds(),
            denoise_step: seconds(),
            vae_decode: seconds(),
            images: Counter::default(),
            reference_cache_hits: Counter::default(),
            model_load: Family::default(),
            warm_up: Gauge::default(),
            device_memory: Gauge::default(),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        registry.register("requests", "Requests by route and status", self.requests.clone());
        registry.register_with_unit(
            "request_duration",
            "Time from the request's head to the response's head",
            Unit::Seconds,
            self.request_duration.clone(),
        );
        registry.register("rejections", "Refused requests by error code", self.rejections.clone());
        registry.register("failures", "Failed requests by error code", self.failures.clone());
        registry.register(
            "jobs_in_progress",
            "Jobs on the device or being encoded",
            self.in_progress.clone(),
        );
        registry.register("queue_size", "Jobs that wait", self.queue_size.clone());
        registry.register_with_unit("queue_wait", "Time jobs waited", Unit::Seconds, self.queue_wait.clone());
        registry.register_with_unit(
            "image_denoise_step_duration",
            "Time of a denoising step",
            Unit::Seconds,
            self.denoise_step.clone(),
        );
        registry.register_with_unit(
            "image_vae_decode_duration",
            "Time of decoding latents to pixels",
            Unit::Seconds,
            self.vae_decode.clone(),
        );
        registry.register("images", "Pictures made", self.images.clone());
        registry.register(
            "reference_cache_hits",
            "References whose encoding was taken from the cache",
            self.reference_cache_hits.clone(),
        );
        registry.register("model_load", "Model loads", self.model_load.clone());
        registry.register_with_unit(
            "device_warmup_duration",
            "Time of the warm-up",
            Unit::Seconds,
            self.warm_up.clone(),
        );
        registry.register_with_unit(
            "device_memory",
            "Memory that the weights take on the device",
            Unit::Bytes,
            self.device_memory.clone(),
        );
        self
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

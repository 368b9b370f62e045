// SPDX-License-Identifier: Apache-2.0
//! Log lines: text or JSON, on stderr, one a request and one a job. Prompts only where asked for.

use std::sync::Arc;

use tracing_subscriber::{EnvFilter, fmt};

use crate::{
    app::App,
    config::{Config, LogFormat},
    exit::{Exit, StartError},
    queue::job::Job,
};

/// Installs the log of the process.
///
/// # Errors
/// A filter that cannot be read.
pub fn install(config: &Config) -> Result<(), StartError> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| StartError::new(Exit::Usage, format!("--log {:?}: {error}", config.log)))?;
    let builder = fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A closed standard error is no reason to panic in the middle of a request.
    let builder = builder.log_internal_errors(false);
    let installed = match config.log_format {
        LogFormat::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
        LogFormat::Text => {
            let colour = std::io::IsTerminal::is_terminal(&std::io::stderr())
                && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
            builder.with_ansi(colour).try_init()
        }
    };
    installed.map_err(|error| StartError::new(Exit::Failure, format!("the log cannot be set up: {error}")))
}

/// Stage times of a picture that is made, as JSON.
pub fn timing(job: &Job) -> Option<String> {
    let picture = job.outcome()?.ok()?;
    serde_json::to_string(&picture.timing_ms).ok()
}

/// One line for a job that has ended.
pub fn job_ended(app: &App, job: &Arc<Job>) {
    let snapshot = job.snapshot();
    let params = &job.params;
    let error = snapshot.outcome.as_ref().and_then(|outcome| outcome.as_ref().err());
    tracing::info!(
        request_id = job.request_id,
        job = job.id,
        state = ?snapshot.state,
        size = format_args!("{}x{}", params.width, params.height),
        seed = params.seed,
        steps = params.num_steps,
        references = params.reference_count,
        timing_ms = timing(job),
        error = error.map(|error| error.message.as_str()),
        prompt = app.config.log_prompts.then_some(params.prompt.as_str()),
        "job"
    );
}

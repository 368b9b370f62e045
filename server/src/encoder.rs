// SPDX-License-Identifier: Apache-2.0
//! From the worker's pixels to files, on blocking threads, in the order in which the worker made them.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::{
    app::App,
    errors::ApiError,
    picture,
    queue::job::{Picture, State},
    worker::{self, Raster},
};

/// Encodes until the worker is gone and everything is encoded.
pub async fn run(app: Arc<App>, mut rasters: mpsc::UnboundedReceiver<Raster>) {
    while let Some(raster) = rasters.recv().await {
        match raster {
            Raster::Preview { job, step, image } => {
                if let Ok(file) = encode(&app, &job.params, image).await {
                    job.preview(step, file);
                }
            }
            Raster::Final { job, image, timing_ms, cached_references } => {
                let outcome = encode(&app, &job.params, image)
                    .await
                    .map(|file| Picture { file, timing_ms, cached_references })
                    .map_err(|why| ApiError::internal(format!("encoding the picture failed: {why}")));
                let state = if outcome.is_ok() { State::Done } else { State::Error };
                worker::end(&app, &job, state, outcome);
            }
        }
    }
}

async fn encode(
    app: &App,
    params: &crate::queue::job::Params,
    image: flux2::RgbImage,
) -> Result<bytes::Bytes, String> {
    let (format, quality, metadata) = (params.output_format, params.quality, app.metadata(params));
    tokio::task::spawn_blocking(move || picture::encode(&image, format, quality, &metadata))
        .await
        .map_err(|error| error.to_string())?
}

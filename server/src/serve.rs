// SPDX-License-Identifier: Apache-2.0
//! The life of the process: bind, load, serve, drain.
//!
//! [`start`] is the whole server without signals and without printing, so that tests run it inside their own process.

use std::{
    net::{SocketAddr, TcpListener as StdListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

pub use crate::engine::drain;
use crate::{
    app::App,
    config::Config,
    engine::Engine,
    exit::{Exit, StartError},
    listener, routes,
    worker::Opener,
};

/// A running server.
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its state.
    pub app: Arc<App>,
    engine: Engine,
    listener: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

/// Starts to serve on `listener` and to load `checkpoint`. `ready` is called from the worker's thread once warm.
///
/// # Errors
/// A key file that cannot be read, a listener that cannot be used, a thread that cannot be made.
pub fn start(
    config: &Config,
    checkpoint: PathBuf,
    listener: StdListener,
    opener: Opener,
    ready: impl FnOnce(SocketAddr) + Send + 'static,
) -> Result<Server, StartError> {
    let failure = |error: std::io::Error| StartError::new(Exit::Failure, error.to_string());
    let address = listener.local_addr().map_err(failure)?;
    let listener = TcpListener::from_std(listener).map_err(failure)?;
    let engine = Engine::start(config, checkpoint, opener, move || ready(address))?;
    let app = engine.app.clone();
    let (stop, stopping) = watch::channel(false);
    let listener = tokio::spawn(listener::serve(
        listener,
        routes::router(app.clone()),
        config.max_connections,
        Duration::from_secs_f64(config.header_limit),
        stopping,
    ));
    Ok(Server { address, app, engine, listener, stop })
}

impl Server {
    /// Takes no new work, fails what waits, and lets the running picture finish. [`Self::wait`] returns when that is done.
    pub fn drain(&self) {
        drain(&self.app);
    }

    /// Waits for the end: after [`Self::drain`], or because loading failed or the device was lost.
    ///
    /// # Errors
    /// What went wrong, with its exit code.
    pub async fn wait(mut self) -> Result<(), StartError> {
        let result = self.engine.wait().await;
        let _ = self.stop.send(true);
        let _ = self.listener.await;
        self.engine.end().await;
        result
    }
}

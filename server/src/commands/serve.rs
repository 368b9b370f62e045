// SPDX-License-Identifier: Apache-2.0
//! `serve`: the HTTP server, until a signal ends it.

use std::{io::Write, net::SocketAddr, sync::Arc, time::Duration};

use clap::Args;
use server::{
    app::App,
    config::Config,
    download,
    exit::{Exit, StartError},
    listener, logging, preflight,
    serve::{drain, start},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::Failure;

/// How long leftover threads may take at the very end.
const SHUTDOWN: Duration = Duration::from_secs(1);

/// Serve pictures over HTTP (the default command)
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    config: Config,
}

impl Serve {
    /// Runs the command until a signal, a failed load or a lost device ends it.
    pub fn run(&self) -> Result<(), Failure> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|error| StartError::new(Exit::Failure, format!("no threads for the server: {error}")))?;
        let result = runtime.block_on(async {
            // First of all: PID 1 of a container does not even die of a signal that it does not handle.
            let mut signals = Signals::new()?;
            logging::install(&self.config)?;
            if self.config.download {
                tokio::select! {
                    result = download::weights(&self.config) => result?,
                    () = signals.next() => {
                        let told = "interrupted while downloading; the next start goes on where it stopped";
                        return Err(StartError::new(Exit::Interrupted, told));
                    }
                }
            }
            let checkpoint = preflight::run(&self.config)?;
            let listener = listener::bind(&self.config)?;
            let server = start(&self.config, checkpoint, listener, Box::new(flux2::open), announce)?;
            tracing::info!(address = %server.address, "listening, loading the model");
            if !server.address.ip().is_loopback() && !server.app.keys.required() {
                tracing::warn!(
                    "listening on a public address without an API key: anybody who reaches it may use it"
                );
            }
            tokio::spawn(signals.obey(server.app.clone()));
            server.wait().await
        });
        runtime.shutdown_timeout(SHUTDOWN);
        result.map_err(Failure::from)
    }
}

/// The line that consumers wait for, whichever of the two texts they look for.
fn announce(address: SocketAddr) {
    let mut out = std::io::stdout().lock();
    // A closed standard output is no reason not to serve.
    let _ = writeln!(
        out,
        "{{\"event\": \"ready\", \"message\": \"Application startup complete\", \"address\": \"http://{address}\"}}"
    );
    let _ = out.flush();
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, StartError> {
        let listen = |kind| {
            signal(kind).map_err(|error| {
                StartError::new(Exit::Failure, format!("signals cannot be handled: {error}"))
            })
        };
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The first signal drains, the second ends the process at once.
    async fn obey(mut self, app: Arc<App>) {
        self.next().await;
        drain(&app);
        self.next().await;
        std::process::exit(Exit::Interrupted as i32);
    }
}

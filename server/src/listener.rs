// SPDX-License-Identifier: Apache-2.0
//! From sockets to the router, with limits on connections, headers and slow clients.

use std::{
    net::{SocketAddr, TcpListener as StdListener},
    sync::Arc,
    time::Duration,
};

use axum::{Router, extract::Request};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

use crate::{
    config::Config,
    exit::{Exit, StartError},
    middleware::Peer,
};

/// Most bytes of a request's head.
const MAX_HEAD: usize = 64 << 10;
/// Most headers of a request.
const MAX_HEADERS: usize = 100;
/// How long a client may take nothing of an answer before its connection is given up.
const WRITE_STALL: Duration = Duration::from_mins(1);
/// How long open connections may take to end after the last work.
const CLOSING: Duration = Duration::from_secs(5);

/// Listens on the configured address.
///
/// # Errors
/// The address is taken, not ours, or not allowed.
pub fn bind(config: &Config) -> Result<StdListener, StartError> {
    let address = SocketAddr::new(config.host, config.port);
    let fail = |error: std::io::Error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another process listens there; stop it or choose another --port"
            }
            std::io::ErrorKind::PermissionDenied => {
                "ports below 1024 need a privilege; choose another --port"
            }
            std::io::ErrorKind::AddrNotAvailable => "no network interface has this address; see --host",
            _ => "see --host and --port",
        };
        StartError::new(Exit::Address, format!("cannot listen on {address}: {hint} ({error})"))
    };
    let listener = StdListener::bind(address).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    Ok(listener)
}

/// Serves until `stop` is true, then lets open connections end.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    max_connections: usize,
    header_limit: Duration,
    mut stop: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(max_connections));
    let graceful = GracefulShutdown::new();
    loop {
        let slot = tokio::select! {
            slot = slots.clone().acquire_owned() => slot,
            () = stopped(&mut stop) => break,
        };
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, mostly: it passes when connections end.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            () = stopped(&mut stop) => break,
        };
        let connection = graceful.watch(connection(stream, peer, router.clone(), header_limit));
        tokio::spawn(async move {
            let _slot = slot;
            // Broken connections are the client's business; the access log has what matters.
            let _ = connection.await;
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(CLOSING, graceful.shutdown()).await;
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is the end as well.
    let _ = stop.wait_for(|stop| *stop).await;
}

fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    header_limit: Duration,
) -> impl hyper_util::server::graceful::GracefulConnection<Error = hyper::Error> {
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_STALL));
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer.ip().to_canonical()));
        router.clone().oneshot(request)
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_limit)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(Box::pin(stream)), service)
}

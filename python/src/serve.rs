// SPDX-License-Identifier: Apache-2.0
//! The Rust server's router behind an ASGI server: requests come from Python, answers go back piece by piece.
//!
//! Everything that takes time returns a `concurrent.futures.Future`, which Python awaits in its own event loop.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, Once, OnceLock},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, BodyDataStream},
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{StreamExt, stream::poll_fn};
use pyo3::{
    exceptions::{PyConnectionError, PyRuntimeError},
    prelude::*,
    types::PyBytes,
};
use server::{
    app::App,
    config::Config,
    download,
    engine::{self, Engine},
    errors::ApiError,
    exit::{Exit, StartError},
    logging,
    middleware::Peer,
    preflight, routes,
};
use tokio::{
    runtime::{Handle, Runtime},
    sync::{mpsc, oneshot, watch},
    task::AbortHandle,
};
use tower::ServiceExt;

use crate::{errors, turn::lock, weights};

/// How long threads that are left may take at the very end.
const SHUTDOWN: Duration = Duration::from_secs(1);

/// A `concurrent.futures.Future` that Rust fulfils.
struct Promise(Py<PyAny>);

impl Promise {
    fn new(py: Python<'_>) -> PyResult<Self> {
        Ok(Self(py.import("concurrent.futures")?.getattr("Future")?.call0()?.unbind()))
    }

    fn future(&self, py: Python<'_>) -> Py<PyAny> {
        self.0.clone_ref(py)
    }

    /// Fulfils it. One that is fulfilled or cancelled stays so; an interpreter that is ending is left alone.
    fn settle(&self, value: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>>) {
        Python::try_attach(|py| {
            let future = self.0.bind(py);
            let settled = match value(py) {
                Ok(value) => future.call_method1("set_result", (value,)),
                Err(error) => future.call_method1("set_exception", (error,)),
            };
            drop(settled);
        });
    }
}

/// Spawns `work` and returns the future of its value.
fn promised<T: Send + 'static>(
    py: Python<'_>,
    runtime: &Handle,
    work: impl Future<Output = T> + Send + 'static,
    value: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Py<PyAny>> {
    let promise = Promise::new(py)?;
    let future = promise.future(py);
    runtime.spawn(async move {
        let result = work.await;
        promise.settle(|py| value(py, result));
    });
    Ok(future)
}

/// What a server has once it has started.
struct Parts {
    app: Arc<App>,
    router: Router,
}

/// The server: one model, its queue and its routes.
#[pyclass(frozen, module = "tt_flux2_klein._native")]
pub struct Server {
    runtime: Mutex<Option<Runtime>>,
    parts: Arc<OnceLock<Parts>>,
    stop: watch::Sender<bool>,
}

#[pymethods]
impl Server {
    #[new]
    fn new() -> PyResult<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime
            .map_err(|error| PyRuntimeError::new_err(format!("no threads for the server: {error}")))?;
        Ok(Self {
            runtime: Mutex::new(Some(runtime)),
            parts: Arc::default(),
            stop: watch::Sender::new(false),
        })
    }

    /// Starts to load. Three futures: routes answer, the model is warm, everything has ended. A failure is the exception of
    /// all that are not fulfilled yet.
    fn start(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, Py<PyAny>, Py<PyAny>)> {
        let config = weights::settings()?;
        let [started, warm, ended] = [Promise::new(py)?, Promise::new(py)?, Promise::new(py)?].map(Arc::new);
        let futures = (started.future(py), warm.future(py), ended.future(py));
        let (parts, mut stop) = (self.parts.clone(), self.stop.subscribe());
        self.handle()?.spawn(async move {
            let begun = begin(&config, parts, warm.clone());
            let begun = tokio::select! {
                begun = begun => begun,
                _ = stop.wait_for(|stop| *stop) => {
                    Err(StartError::new(Exit::Interrupted, "the server was stopped before it had started"))
                }
            };
            let result = match begun {
                Err(error) => Err(error),
                Ok(mut engine) => {
                    started.settle(|py| Ok(py.None()));
                    let result = engine.wait().await;
                    engine.end().await;
                    result
                }
            };
            if let Err(error) = &result {
                for promise in [&started, &warm, &ended] {
                    promise.settle(|py| Err(errors::serve(py, error)));
                }
            }
            ended.settle(|py| Ok(py.None()));
        });
        Ok(futures)
    }

    /// Takes no new work, fails what waits, lets the running picture finish.
    fn drain(&self) {
        self.stop.send_replace(true);
        if let Some(parts) = self.parts.get() {
            engine::drain(&parts.app);
        }
    }

    /// Ends the threads.
    fn close(&self, py: Python<'_>) {
        let runtime = lock(&self.runtime).take();
        py.detach(|| runtime.map(|runtime| runtime.shutdown_timeout(SHUTDOWN)));
    }

    /// Hands a request to the router.
    fn open(
        &self,
        method: &str,
        target: &[u8],
        headers: Vec<(Vec<u8>, Vec<u8>)>,
        peer: Option<&str>,
    ) -> PyResult<Exchange> {
        let runtime = self.handle()?;
        let Some(parts) = self.parts.get() else {
            return Err(PyRuntimeError::new_err("the server has not started"));
        };
        let router = parts.router.clone();
        let (sender, mut receiver) = mpsc::channel::<Bytes>(1);
        let body = Body::from_stream(
            poll_fn(move |context| receiver.poll_recv(context)).map(Ok::<_, std::convert::Infallible>),
        );
        let request = request(method, target, headers, peer, body);
        let (answer, response) = oneshot::channel();
        let task = runtime.spawn(async move {
            let response = match request {
                Ok(request) => match router.oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                },
                Err(what) => ApiError::new(StatusCode::BAD_REQUEST, "bad_request", what).into_response(),
            };
            // Nobody listens when the client has gone.
            let _ = answer.send(response);
        });
        Ok(Exchange {
            runtime,
            task: task.abort_handle(),
            sender: Mutex::new(Some(sender)),
            response: Mutex::new(Some(response)),
            body: Arc::default(),
            closed: watch::Sender::new(false),
        })
    }
}

impl Server {
    fn handle(&self) -> PyResult<Handle> {
        let runtime = lock(&self.runtime);
        let runtime = runtime.as_ref().ok_or_else(|| PyRuntimeError::new_err("the server has ended"))?;
        Ok(runtime.handle().clone())
    }
}

/// As `flux2-server serve` begins, but for the listener.
async fn begin(
    config: &Config,
    parts: Arc<OnceLock<Parts>>,
    warm: Arc<Promise>,
) -> Result<Engine, StartError> {
    static LOG: Once = Once::new();
    let mut log = Ok(());
    LOG.call_once(|| log = logging::install(config));
    log?;
    let (handle, settings) = (Handle::current(), config.clone());
    let found = tokio::task::spawn_blocking(move || {
        handle.block_on(download::weights(&settings))?;
        preflight::run(&settings)
    });
    let checkpoint = found.await.map_err(|error| StartError::new(Exit::Failure, error.to_string()))??;
    let ready = move || warm.settle(|py| Ok(py.None()));
    let engine = Engine::start(config, checkpoint, Box::new(flux2::open), ready)?;
    // Nothing else sets them: a server starts once.
    let _ = parts.set(Parts { app: engine.app.clone(), router: routes::router(engine.app.clone()) });
    Ok(engine)
}

/// The request, or what is wrong with it.
fn request(
    method: &str,
    target: &[u8],
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    peer: Option<&str>,
    body: Body,
) -> Result<Request, String> {
    let mut request = Request::new(body);
    *request.method_mut() =
        Method::from_bytes(method.as_bytes()).map_err(|error| format!("the method is no method: {error}"))?;
    *request.uri_mut() = Uri::try_from(target).map_err(|error| format!("the path is no path: {error}"))?;
    let mut map = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let name =
            HeaderName::from_bytes(&name).map_err(|error| format!("a header's name is none: {error}"))?;
        let value = HeaderValue::from_bytes(&value).map_err(|error| format!("header {name}: {error}"))?;
        map.append(name, value);
    }
    *request.headers_mut() = map;
    if let Some(peer) = peer.and_then(|peer| peer.parse::<IpAddr>().ok()) {
        request.extensions_mut().insert(Peer(peer.to_canonical()));
    }
    Ok(request)
}

/// One request and its answer.
#[pyclass(frozen, module = "tt_flux2_klein._native")]
pub struct Exchange {
    runtime: Handle,
    task: AbortHandle,
    sender: Mutex<Option<mpsc::Sender<Bytes>>>,
    response: Mutex<Option<oneshot::Receiver<Response>>>,
    body: Arc<tokio::sync::Mutex<Option<BodyDataStream>>>,
    closed: watch::Sender<bool>,
}

#[pymethods]
impl Exchange {
    /// Gives a piece of the request's body; the future is fulfilled when there is room for the next.
    fn feed(&self, py: Python<'_>, piece: &[u8]) -> PyResult<Py<PyAny>> {
        let (sender, piece) = (lock(&self.sender).clone(), Bytes::copy_from_slice(piece));
        let give = async move {
            if let Some(sender) = sender {
                // A handler that has read enough takes no more.
                let _ = sender.send(piece).await;
            }
        };
        promised(py, &self.runtime, give, |py, ()| Ok(py.None()))
    }

    /// The request's body is whole.
    fn end_body(&self) {
        lock(&self.sender).take();
    }

    /// The answer's status and headers; none if the exchange was closed.
    fn response(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let (response, body) = (lock(&self.response).take(), self.body.clone());
        let wait = async move {
            let (parts, stream) = response?.await.ok()?.into_parts();
            *body.lock().await = Some(stream.into_data_stream());
            Some(parts)
        };
        promised(py, &self.runtime, wait, |py, parts| {
            let head = parts.map(|parts| {
                let bytes = |value: &[u8]| PyBytes::new(py, value).unbind();
                let headers = parts.headers.iter();
                let headers = headers.map(|(name, value)| (bytes(name.as_ref()), bytes(value.as_bytes())));
                (parts.status.as_u16(), headers.collect::<Vec<_>>())
            });
            Ok(head.into_pyobject(py)?.unbind())
        })
    }

    /// The next piece of the answer's body; none at its end.
    fn piece(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let (body, mut closed) = (self.body.clone(), self.closed.subscribe());
        let next = async move {
            let mut stream = body.lock().await;
            let piece = tokio::select! {
                piece = async { stream.as_mut()?.next().await } => piece,
                _ = closed.wait_for(|closed| *closed) => None,
            };
            if piece.is_none() {
                stream.take();
            }
            piece
        };
        promised(py, &self.runtime, next, |py, piece| match piece {
            None => Ok(py.None()),
            Some(Ok(piece)) => Ok(PyBytes::new(py, &piece).into_any().unbind()),
            Some(Err(error)) => Err(PyConnectionError::new_err(format!("the answer broke off: {error}"))),
        })
    }

    /// The client has its answer, or has gone: what is still done for it alone ends.
    fn close(&self) {
        self.closed.send_replace(true);
        self.task.abort();
        lock(&self.sender).take();
        if let Ok(mut body) = self.body.try_lock() {
            body.take();
        }
    }
}

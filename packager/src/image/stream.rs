// SPDX-License-Identifier: Apache-2.0
//! Between blocking archives and the async client: a few chunks in flight, never the whole.

use std::{
    io::{self, Read, Write},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use tokio::{sync::mpsc, task::JoinHandle};

use crate::error::{Class, Failure, Result};

/// Bytes handed over at once.
const CHUNK: usize = 256 * 1024;
/// Longest time without a byte from the engine while an image is exported or loaded.
pub const IDLE: Duration = Duration::from_mins(10);

/// Runs `write` on another thread; what it writes comes out of the stream. Its own result says what went
/// wrong: the error that the HTTP client shows hides the cause.
pub fn produce<F>(
    write: F,
) -> (impl Stream<Item = io::Result<Bytes>> + Send + 'static, JoinHandle<Result<()>>)
where
    F: FnOnce(&mut Chunks) -> Result<()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(8);
    let task = tokio::task::spawn_blocking(move || {
        let mut chunks = Chunks { sender: sender.clone(), buffer: Vec::with_capacity(CHUNK) };
        let result = write(&mut chunks).and_then(|()| {
            chunks
                .flush()
                .map_err(|error| Failure::new(Class::Engine, "cannot send to the engine").why(error))
        });
        if let Err(failure) = &result {
            // Without this the engine would take the cut archive for a whole one.
            let _ = sender.blocking_send(Err(io::Error::other(failure.to_string())));
        }
        result
    });
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|item| (item, receiver))
    });
    (stream, task)
}

/// Collects small writes into chunks.
pub struct Chunks {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buffer: Vec<u8>,
}

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        self.sender
            .blocking_send(Ok(chunk.into()))
            .map_err(|_| io::Error::other("the engine stopped reading"))
    }
}

/// Feeds a stream to `read` on another thread. No limit on the whole; a stream that stalls is an error.
pub async fn consume<S, E, T, F>(stream: S, read: F) -> Result<T>
where
    S: Stream<Item = Result<Bytes, E>>,
    E: std::error::Error,
    T: Send + 'static,
    F: FnOnce(Source) -> Result<T> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(8);
    let task = tokio::task::spawn_blocking(move || read(Source { receiver, chunk: Bytes::new() }));
    let mut stream = std::pin::pin!(stream);
    loop {
        let failed =
            |why: String| Failure::new(Class::Engine, "the image could not be read from the engine").why(why);
        let next = tokio::time::timeout(IDLE, stream.next()).await;
        match next.map_err(|_| failed(format!("no byte came for {} s", IDLE.as_secs())))? {
            None => break,
            Some(Ok(chunk)) => {
                // The reader may have all it wants, or has failed: its own result says which.
                if sender.send(Ok(chunk)).await.is_err() {
                    break;
                }
            }
            Some(Err(error)) => {
                let why = super::engine::root_cause(&error);
                let _ = sender.send(Err(io::Error::other(why.clone()))).await;
                return Err(failed(why));
            }
        }
    }
    drop(sender);
    task.await.map_err(|error| Failure::new(Class::Failure, "the reader of the image stopped").why(error))?
}

/// The blocking end of a stream.
pub struct Source {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    chunk: Bytes,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.receiver.blocking_recv() {
                Some(chunk) => self.chunk = chunk?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.chunk.len());
        buffer[..count].copy_from_slice(&self.chunk.split_to(count));
        Ok(count)
    }
}

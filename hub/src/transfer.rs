// SPDX-License-Identifier: Apache-2.0
//! One file from a hub into its blob: ranges in parallel, each going on where it was cut, then the hash of every byte.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;
use reqwest::{
    Response, StatusCode, Url,
    header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, RANGE},
};
use tokio::sync::Semaphore;

use crate::{
    cache::{Cache, is_right},
    error::{At, Error, Kind, Result},
    http::{Call, Client, Fault, hub, reason, show},
    listing::File,
    partial::{Owner, Partial, others},
    progress::size,
};

/// Longest range of one request.
const LONGEST: u64 = 64 << 20;
/// How often another process's download is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// What the downloads of one repository have in common.
pub struct Source<'a> {
    /// The hub.
    pub client: &'a Client<'a>,
    /// The cache.
    pub cache: &'a Cache,
    /// organisation/name.
    pub repo: &'a str,
    /// Commit.
    pub commit: &'a str,
    /// Connections that may still be opened.
    pub connections: &'a Semaphore,
}

/// What is known about one file's source.
struct Download<'a> {
    source: &'a Source<'a>,
    file: &'a File,
    partial: &'a Partial,
    /// Where the Hub redirected to; asked again when that place refuses.
    place: Mutex<Option<Url>>,
}

/// Outcome of one request.
enum Miss {
    Fault(Fault),
    /// The whole file comes instead of a range.
    NoRanges,
}

impl<T: Into<Fault>> From<T> for Miss {
    fn from(fault: T) -> Self {
        Self::Fault(fault.into())
    }
}

impl Source<'_> {
    /// Puts a file's blob into the cache. Returns the bytes that came over the network.
    pub async fn download(&self, file: &File) -> Result<u64> {
        let target = self.cache.blob(&file.id);
        if self.wait_for_others(file, &target).await? {
            return Ok(0);
        }
        let partial = Arc::new(Partial::open(&self.cache.blobs(), file.id.hex(), file.size)?);
        let have = partial.have();
        self.client.progress.add(have as i64);
        let download = Download { source: self, file, partial: &partial, place: Mutex::new(None) };
        download.ranges(LONGEST).await?;
        if !self.verified(&partial, file).await? {
            let told =
                format!("{}: the bytes are not those that the Hub lists; getting them again", file.path);
            self.client.progress.note(&told);
            self.client.progress.add(-(file.size as i64));
            partial.restart()?;
            // The same place may give the same bytes: ask the Hub again.
            *download.place.lock().expect("no holder panics") = None;
            download.ranges(LONGEST).await?;
            if !self.verified(&partial, file).await? {
                partial.discard();
                let error = Error::new(
                    Kind::Verification,
                    format!("{}: {} arrived damaged twice", self.repo, file.path),
                );
                let why = format!("the bytes do not hash to {}; nothing of them was kept", file.id.hex());
                return Err(error.why(why).next("try another network, or another HF_ENDPOINT"));
            }
        }
        self.settle(&partial, &target, file).await?;
        Ok(file.size - have)
    }

    async fn verified(&self, partial: &Partial, file: &File) -> Result<bool> {
        let (path, file) = (partial.path().to_path_buf(), file.clone());
        blocking(move || is_right(&path, &file)).await
    }

    /// The rename; afterwards the blob is looked at once more, by its size.
    async fn settle(&self, partial: &Arc<Partial>, target: &Path, file: &File) -> Result<()> {
        let (finished, place) = (partial.clone(), target.to_path_buf());
        match blocking(move || finished.finish(&place)).await {
            // Whoever took it over has finished the same bytes.
            Err(_) if !partial.path().exists() && target.exists() => {}
            result => result?,
        }
        let meta = std::fs::metadata(target).at("inspect", target)?;
        if meta.len() == file.size {
            return Ok(());
        }
        let error = Error::new(
            Kind::Verification,
            format!("{} changed while it was put into place", target.display()),
        );
        Err(error.next("find out what else writes to this cache, then run the command again"))
    }

    /// Waits while another living process downloads the same blob. True if it finished it.
    async fn wait_for_others(&self, file: &File, target: &Path) -> Result<bool> {
        let mut told = false;
        let mut seen = (0, Instant::now());
        loop {
            if target.exists() {
                let (path, wanted) = (target.to_path_buf(), file.clone());
                if blocking(move || is_right(&path, &wanted)).await? {
                    self.client.progress.add(file.size as i64);
                    return Ok(true);
                }
            }
            let own = std::process::id();
            let living =
                others(&self.cache.blobs(), file.id.hex()).into_iter().find_map(
                    |(path, owner)| match owner {
                        Owner::Living(pid) if pid != own => Some((path, pid)),
                        _ => None,
                    },
                );
            let Some((path, pid)) = living else { return Ok(false) };
            if !told {
                told = true;
                let note =
                    format!("{}: process {pid} is downloading it to {}; waiting", file.path, path.display());
                self.client.progress.note(&note);
            }
            // Ranges are written out of order, so the time of the last write says more than the length.
            let changed = std::fs::metadata(&path)
                .and_then(|meta| meta.modified())
                .map_or(0, |at| at.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos()));
            if changed != seen.0 {
                seen = (changed, Instant::now());
            } else if seen.1.elapsed() > self.client.settings.stall {
                let note = format!("{}: process {pid} makes no progress; downloading it here", file.path);
                self.client.progress.note(&note);
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Download<'_> {
    /// Fetches every missing range.
    async fn ranges(&self, longest: u64) -> Result<()> {
        let missing = self.partial.missing(longest);
        let parts = missing.into_iter().map(|(start, end)| self.range(start, end));
        if try_join_all(parts).await?.into_iter().all(|whole| whole) {
            return Ok(());
        }
        // A server without ranges: one request for everything, and a cut one skips what is there.
        self.source
            .client
            .progress
            .note(&format!("{}: the server ignores ranges; one connection is used", self.file.path));
        self.source.client.progress.add(-(self.partial.have() as i64));
        self.partial.restart()?;
        self.range(0, self.file.size).await.map(|_| ())
    }

    /// Fetches `[start, end)`. False if the server sends no ranges and this is one.
    async fn range(&self, start: u64, end: u64) -> Result<bool> {
        let _connection = self.source.connections.acquire().await.expect("never closed");
        let client = self.source.client;
        let (mut at, mut failures, mut refused) = (start, 0, false);
        while at < end {
            let before = at;
            let fault = match self.request(start, &mut at, end, &mut refused).await {
                Ok(()) => continue,
                Err(Miss::NoRanges) => {
                    client.progress.add(-((at - start) as i64));
                    return Ok(false);
                }
                Err(Miss::Fault(fault)) => fault,
            };
            // What arrived shows that the way is open: only failures without a byte count up.
            failures = if at > before { 1 } else { failures + 1 };
            refused &= at == before;
            client.pause(&self.file.path, fault, failures).await?;
        }
        Ok(true)
    }

    /// One request; `at` says how far it came, `refused` that the storage refused the address before this one.
    async fn request(&self, start: u64, at: &mut u64, end: u64, refused: &mut bool) -> Result<(), Miss> {
        let (client, file) = (self.source.client, self.file);
        let whole = start == 0 && end == file.size;
        let known = self.place.lock().expect("no holder panics").clone();
        let origin = client.file_url(self.source.repo, self.source.commit, &file.path)?;
        let mut call = Call::get(known.clone().unwrap_or(origin));
        if !whole || *at > 0 {
            call = call.header(RANGE, &format!("bytes={at}-{}", end - 1));
        }
        let (response, url) = client.send(&call).await?;
        let status = response.status();
        if !status.is_success() {
            *self.place.lock().expect("no holder panics") = None;
            if status == StatusCode::RANGE_NOT_SATISFIABLE {
                let why = format!("{} says that the file ends before byte {at}", show(&url));
                return Err(Fault::again(why).into());
            }
            if matches!(status.as_u16(), 401 | 403) && !client.is_endpoint(&url) {
                return Err(self.expired(&url, status, std::mem::replace(refused, true)).into());
            }
            return Err(client.refusal(self.source.repo, &url, &response).into());
        }
        let skip = self.check(&response, &url, *at, end, whole)?;
        *self.place.lock().expect("no holder panics") = Some(url.clone());
        self.receive(response, &url, skip, at, end).await.map_err(Miss::Fault)
    }

    /// A signed address ends after a while: a fresh one is asked for, once.
    fn expired(&self, url: &Url, status: StatusCode, again: bool) -> Fault {
        let client = self.source.client;
        let why = format!("{} answers {status}", show(url));
        if !again {
            return Fault::again(format!(
                "{why}, as for a signed address that has expired; asking for a fresh one"
            ));
        }
        let what =
            format!("{}: the storage refuses {} at a fresh address too", self.source.repo, self.file.path);
        let error = Error::new(Kind::Auth, what).why(format!("{why}; {}", client.settings.token_source()));
        Fault::Final(error.next(
            "check this machine's clock (signed addresses end after a while) and that the token may still read the repository",
        ))
    }

    /// Whether the answer is what was asked for; returns the bytes to leave out at its start.
    fn check(&self, response: &Response, url: &Url, at: u64, end: u64, whole: bool) -> Result<u64, Miss> {
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let place = show(url);
        if let Some(encoding) = header(CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
            let what = format!("{place} sends {} with Content-Encoding {encoding}", self.file.path);
            return Err(hub(
                what,
                "the bytes themselves were asked for; a proxy that compresses must be told not to",
            )
            .into());
        }
        let partial = response.status() == StatusCode::PARTIAL_CONTENT;
        if !partial && !whole {
            return Err(Miss::NoRanges);
        }
        let wanted = if partial { end - at } else { self.file.size };
        // Proxies strip both headers; then the count of the bytes and their hash decide.
        if let Some(range) = header(CONTENT_RANGE).filter(|_| partial) {
            let expected = format!("bytes {at}-{}/", end - 1);
            let total = range.rsplit_once('/').and_then(|(_, total)| total.parse::<u64>().ok());
            if !range.starts_with(&expected) || total.is_some_and(|total| total != self.file.size) {
                return Err(Fault::again(format!(
                    "{place} sends Content-Range {range:?} for {expected}{}",
                    self.file.size
                ))
                .into());
            }
        }
        if let Some(length) = header(CONTENT_LENGTH).and_then(|text| text.parse::<u64>().ok())
            && length != wanted
        {
            return Err(
                Fault::again(format!("{place} sends Content-Length {length} for {wanted} bytes")).into()
            );
        }
        Ok(if partial { 0 } else { at })
    }

    async fn receive(
        &self,
        mut response: Response,
        url: &Url,
        mut skip: u64,
        at: &mut u64,
        end: u64,
    ) -> Result<(), Fault> {
        let client = self.source.client;
        let far = |at: u64| format!("{} stopped after {} of {}", show(url), size(at), size(self.file.size));
        loop {
            let piece = match tokio::time::timeout(client.settings.stall, response.chunk()).await {
                Err(_) => {
                    let seconds = client.settings.stall.as_secs_f64();
                    return Err(Fault::again(format!("{} and sent nothing for {seconds} s", far(*at))));
                }
                Ok(Err(error)) => return Err(Fault::again(format!("{}: {}", far(*at), reason(error)))),
                Ok(Ok(None)) if *at < end => return Err(Fault::again(far(*at))),
                Ok(Ok(None)) => return Ok(()),
                Ok(Ok(Some(piece))) => piece,
            };
            let left_out = skip.min(piece.len() as u64);
            skip -= left_out;
            let bytes = &piece[left_out as usize..];
            if bytes.len() as u64 > end - *at {
                // Not a byte of it can be trusted; the hash would say so after gigabytes.
                return Err(Fault::again(format!(
                    "{} sends more than the {} listed",
                    show(url),
                    size(self.file.size)
                )));
            }
            self.partial.write(*at, bytes)?;
            *at += bytes.len() as u64;
            client.progress.add(bytes.len() as i64);
        }
    }
}

/// Hashing on a thread of its own.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::new(Kind::Other, "a thread ended").why(error)),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Large files into the Hub's storage, by Git LFS: the batch answer says per object where to put it, or nothing if it
//! is there already. That is what makes a push resumable: objects are named by their SHA-256, and a second run is told
//! of those that the first one finished. An object that was cut is sent again from its start; its parts are not,
//! within one run.
//!
//! Sources: the batch API of git-lfs (docs/api/batch.md, basic-transfers.md), and for `multipart` what huggingface_hub
//! 2.4 sends: parts to the addresses `00001`, `00002`, … of the upload action's header, each `chunk_size` long, then
//! `{oid, parts: [{partNumber, etag}]}` to its `href`. Xet is not offered: the Hub still takes both transfers.

use std::collections::HashMap;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::{
    Method, StatusCode, Url,
    header::{ACCEPT, CONTENT_TYPE, ETAG, HeaderName},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::local::Local;
use crate::{
    error::{Error, Kind, Result},
    http::{Call, Client, Fault, hub, show},
};

const MEDIA: &str = "application/vnd.git-lfs+json";
/// Objects of one batch request, as huggingface_hub has it.
const BATCH: usize = 256;
/// Connections that send at the same time.
const CONNECTIONS: usize = 4;

/// What the Hub wants to be done for an object.
#[derive(Debug, Clone, Deserialize)]
struct Object {
    oid: String,
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Debug, Clone, Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Debug, Clone, Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Option<HashMap<String, Value>>,
}

impl Action {
    fn text(&self, name: &str) -> Option<String> {
        let value = self.header.as_ref()?.get(name)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
    }
}

/// Storage that refuses a signed address.
struct Refused(String);

/// Uploads into the storage of one repository.
pub struct Storage<'a> {
    /// The hub.
    pub client: &'a Client<'a>,
    /// organisation/name.
    pub repo: &'a str,
    /// Branch.
    pub revision: &'a str,
}

impl Storage<'_> {
    /// Sends what the storage lacks of `files`. Returns their paths.
    pub async fn upload(&self, files: &[&Local]) -> Result<Vec<String>> {
        let mut sent = Vec::new();
        let connections = Semaphore::new(CONNECTIONS);
        for chunk in files.chunks(BATCH) {
            let mut objects = self.batch(chunk).await?;
            let work = chunk.iter().filter_map(|file| {
                let actions = objects.remove(&file.sha256)?;
                Some((*file, actions))
            });
            let work: Vec<_> = work.collect();
            for file in chunk.iter().filter(|file| !work.iter().any(|(other, _)| other.sha256 == file.sha256))
            {
                self.client.progress.add(file.size as i64);
            }
            let paths: Vec<String> = stream::iter(work)
                .map(|(file, actions)| {
                    let connections = &connections;
                    async move { self.object(file, actions, connections).await.map(|()| file.path.clone()) }
                })
                .buffer_unordered(CONNECTIONS)
                .try_collect()
                .await?;
            // What the storage says about itself, before anything is made to refer to it.
            let stored: Vec<&Local> =
                chunk.iter().copied().filter(|file| paths.contains(&file.path)).collect();
            if !stored.is_empty()
                && let Some(lost) = self.batch(&stored).await?.into_keys().next()
            {
                let path = stored.iter().find(|file| file.sha256 == lost).map_or("a file", |file| &file.path);
                let what = format!("{}: the storage does not have {path} after it was sent", self.repo);
                return Err(Error::new(Kind::Verification, what)
                    .why("nothing was committed, so the repository shows what it showed before")
                    .next("run the command again: it sends what is missing"));
            }
            sent.extend(paths);
        }
        Ok(sent)
    }

    /// What the storage lacks, by SHA-256.
    async fn batch(&self, files: &[&Local]) -> Result<HashMap<String, Actions>> {
        let objects: Vec<Value> =
            files.iter().map(|file| json!({"oid": file.sha256, "size": file.size})).collect();
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "objects": objects,
            "hash_algo": "sha256", "ref": {"name": self.revision},
        });
        let url = self.client.url(&format!("{}.git/info/lfs/objects/batch", self.repo))?;
        let mut call = Call::post(url, &body).header(ACCEPT, MEDIA);
        call = call.header(CONTENT_TYPE, MEDIA);
        let answer = self.client.ask("asking where to put large files", self.repo, &call, &[]).await?.json();
        if !matches!(answer["transfer"].as_str(), None | Some("basic" | "multipart")) {
            let what = format!("{} takes large files by another transfer than asked for", self.repo);
            return Err(hub(what, &answer["transfer"].to_string()));
        }
        let objects: Vec<Object> = serde_json::from_value(answer["objects"].clone()).map_err(|error| {
            hub(format!("{}: the LFS answer cannot be read", self.repo), &error.to_string())
        })?;
        let mut lacking = HashMap::new();
        for object in objects {
            if let Some(error) = object.error {
                let path = files.iter().find(|file| file.sha256 == object.oid).map_or("a file", |f| &f.path);
                let what = format!("{}: the storage refuses {path}", self.repo);
                let why = error["message"].as_str().unwrap_or("it does not say why").to_owned();
                return Err(Error::new(Kind::Network, what)
                    .why(why)
                    .next("see the limits of the account at the Hub"));
            }
            if let Some(actions) = object.actions.filter(|actions| actions.upload.is_some()) {
                lacking.insert(object.oid, actions);
            }
        }
        Ok(lacking)
    }

    /// One object, with a fresh address if the first one is refused.
    async fn object(&self, file: &Local, mut actions: Actions, connections: &Semaphore) -> Result<()> {
        let mut again = false;
        loop {
            let Err(Refused(why)) = self.transfer(file, &actions, connections).await? else { break };
            if again {
                let what = format!("{}: the storage refuses {} at a fresh address too", self.repo, file.path);
                let error = Error::new(Kind::Auth, what)
                    .why(format!("{why}; {}", self.client.settings.token_source()));
                return Err(error.next(
                    "check this machine's clock (signed addresses end after a while) and the token's rights",
                ));
            }
            again = true;
            self.client.progress.note(&format!(
                "{}: {why}, as for a signed address that has expired; asking for a fresh one",
                file.path
            ));
            match self.batch(&[file]).await?.remove(&file.sha256) {
                Some(fresh) => actions = fresh,
                None => return Ok(()),
            }
        }
        let Some(verify) = &actions.verify else { return Ok(()) };
        let url = self.place(verify)?;
        let call = with(Call::post(url, &json!({"oid": file.sha256, "size": file.size})), verify);
        let answer = self.client.ask(&file.path, self.repo, &call, &[400, 404, 409, 422]).await?;
        if answer.status < 300 {
            return Ok(());
        }
        let what = format!("{}: the storage did not get {} right", self.repo, file.path);
        let why = format!(
            "it answers {} when asked to compare {} bytes and their SHA-256",
            answer.status, file.size
        );
        Err(Error::new(Kind::Verification, what)
            .why(why)
            .next("run the command again: it sends this file once more"))
    }

    async fn transfer(
        &self,
        file: &Local,
        actions: &Actions,
        connections: &Semaphore,
    ) -> Result<Result<(), Refused>> {
        let Some(upload) = &actions.upload else { return Ok(Ok(())) };
        let url = self.place(upload)?;
        let Some(chunk) = upload.text("chunk_size") else {
            let call = with(Call::send(Method::PUT, url, file.content(0, file.size)), upload);
            return Ok(self.put(file, &call, connections).await?.map(|_| ()));
        };
        let malformed =
            |why: &str| hub(format!("{}: the parts of {} cannot be read", self.repo, file.path), why);
        let chunk: u64 =
            chunk.parse().ok().filter(|size| *size > 0).ok_or_else(|| malformed("chunk_size"))?;
        let mut parts = Vec::new();
        for number in 1..=file.size.div_ceil(chunk) {
            let header = upload.header.iter().flatten();
            let place =
                header.clone().find(|(name, _)| name.parse() == Ok(number)).and_then(|(_, v)| v.as_str());
            let url = place
                .and_then(|place| Url::parse(place).ok())
                .ok_or_else(|| malformed("an address is missing"))?;
            self.safe(&url)?;
            let (start, end) = ((number - 1) * chunk, (number * chunk).min(file.size));
            parts.push((number, Call::send(Method::PUT, url, file.content(start, end))));
        }
        let mut done = Vec::new();
        let mut sending = stream::iter(&parts)
            .map(|(number, call)| async move { (number, self.put(file, call, connections).await) })
            .buffer_unordered(CONNECTIONS);
        while let Some((number, result)) = sending.next().await {
            match result? {
                Ok(etag) if etag.is_empty() => return Err(malformed("a part was stored without an ETag")),
                Ok(etag) => done.push((*number, etag)),
                Err(refused) => {
                    // The parts that arrived belong to the upload that ended with its addresses.
                    let sent =
                        done.iter().map(|(n, _)| (n * chunk).min(file.size) - (n - 1) * chunk).sum::<u64>();
                    self.client.progress.add(-(sent as i64));
                    return Ok(Err(refused));
                }
            }
        }
        done.sort_unstable();
        let parts: Vec<Value> =
            done.iter().map(|(number, etag)| json!({"partNumber": number, "etag": etag})).collect();
        let call = Call::post(url, &json!({"oid": file.sha256, "parts": parts}));
        let call = call.header(ACCEPT, MEDIA).header(CONTENT_TYPE, MEDIA);
        self.client.ask(&format!("{}: putting its parts together", file.path), self.repo, &call, &[]).await?;
        Ok(Ok(()))
    }

    /// A PUT into the storage; its ETag.
    async fn put(
        &self,
        file: &Local,
        call: &Call,
        connections: &Semaphore,
    ) -> Result<Result<String, Refused>> {
        let _connection = connections.acquire().await.expect("never closed");
        let client = self.client;
        client
            .retry(&file.path, || async {
                let (response, url) = client.send(call).await?;
                let status = response.status();
                if status.is_success() {
                    let etag = response.headers().get(ETAG).and_then(|etag| etag.to_str().ok());
                    return Ok(Ok(etag.unwrap_or_default().to_owned()));
                }
                if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
                    && !client.is_endpoint(&url)
                {
                    return Ok(Err(Refused(format!("{} answers {status}", show(&url)))));
                }
                Err::<_, Fault>(client.refusal(self.repo, &url, &response))
            })
            .await
    }

    fn place(&self, action: &Action) -> Result<Url> {
        let url = Url::parse(&action.href)
            .map_err(|_| hub(format!("{}: the storage's address is no URL", self.repo), "field href"))?;
        self.safe(&url)?;
        Ok(url)
    }

    fn safe(&self, url: &Url) -> Result<()> {
        let plain = url.scheme() == "http" && self.client.settings.endpoint.scheme() == "https";
        if plain || !matches!(url.scheme(), "http" | "https") {
            return Err(hub(format!("{}: files are to go to {}", self.repo, show(url)), "that is not safe"));
        }
        Ok(())
    }
}

/// The headers that an action asks for.
fn with(mut call: Call, action: &Action) -> Call {
    for (name, value) in action.header.iter().flatten() {
        if let (Ok(name), Some(value)) = (HeaderName::from_bytes(name.as_bytes()), value.as_str()) {
            call = call.header(name, value);
        }
    }
    call
}

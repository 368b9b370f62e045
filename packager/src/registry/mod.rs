// SPDX-License-Identifier: Apache-2.0
//! The image to a registry, straight from the package's layout, and the package pointed at it.
//!
//! Order decides what a failure leaves behind. The package that will point at the registry is made aside and proved
//! first. Then blobs, each only if the registry lacks it; then the manifest under its digest; then everything is read
//! back; only then the tag moves, and the package takes its place. Until the tag moves, the registry serves what it
//! served before, and the package on disk is the one that was there.

mod credentials;
mod point;
mod remote;
mod target;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use hub::Progress;
use serde::Serialize;
use serde_json::Value;

use self::remote::Remote;
pub use self::{
    credentials::{Credentials, Source},
    target::Target,
};
use crate::{
    error::{At, Class, Failure, Result},
    layout::{Identity, read},
    verify,
};

/// Blobs that are sent at the same time.
const AT_ONCE: usize = 3;

/// What to push and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The package's directory.
    pub package: PathBuf,
    /// Where the image goes.
    pub target: Target,
    /// Send nothing and change nothing; say what would be sent.
    pub dry_run: bool,
    /// Plain HTTP to a host that is not this one.
    pub plain_http: bool,
    /// Leave `image/` out of the package once the registry has it.
    pub drop_image: bool,
}

/// A file of the layout that the registry has to hold.
#[derive(Debug, Clone, Serialize)]
pub struct Blob {
    /// `sha256:` and 64 digits.
    pub digest: String,
    /// Bytes.
    pub size: u64,
    /// `config` or `layer`.
    pub role: &'static str,
    /// True if the registry has it already.
    pub there: bool,
    #[serde(skip)]
    path: PathBuf,
}

/// What a push did, or would do.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name that the tag gives it: `HOST/REPO:TAG`.
    pub image: String,
    /// Name that cannot move: `HOST/REPO@sha256:…`.
    pub pinned: String,
    /// What the tag stood for before; null if it is new.
    pub replaces: Option<String>,
    /// Blobs of the image.
    pub blobs: Vec<Blob>,
    /// Bytes sent, or to be sent.
    pub bytes_sent: u64,
    /// False for a dry run.
    pub pushed: bool,
    /// True if the registry was asked for all of it again afterwards.
    pub read_back: bool,
    /// True if the package's files were rewritten to point at it.
    pub package_updated: bool,
    /// Where the credentials came from.
    pub credentials: Source,
}

/// Pushes the image of a package and points the package at it.
pub async fn push(
    options: &Options,
    credentials: Credentials,
    progress: Arc<dyn Progress>,
) -> Result<Report> {
    let (dir, mut target) = (&options.package, options.target.clone());
    let image = dir.join("image");
    if !image.is_dir() {
        let failure = Failure::new(Class::Usage, format!("{} has no image/ to push", dir.display()));
        return Err(failure.next("build the package again, or push the one that still has its image"));
    }
    let remote = Remote::new(&target, credentials, options.plain_http, progress.clone())?;
    verify::verify(dir)?;
    let identity = read::read(&image)?.identity;
    let tag = target.tag.get_or_insert_with(|| identity.short().to_owned()).clone();
    let (manifest, mut blobs) = blobs(&image, &identity)?;

    // Before the first byte: who we are, and what is there already.
    remote.log_in().await?;
    for blob in &mut blobs {
        blob.there = remote.has(&blob.digest).await?;
    }
    let replaces = remote.digest_of(&tag).await?;
    let mut report = Report {
        image: target.tagged(&tag),
        pinned: target.pinned(&identity.manifest),
        replaces: replaces.filter(|digest| *digest != identity.manifest),
        bytes_sent: blobs.iter().filter(|blob| !blob.there).map(|blob| blob.size).sum(),
        blobs,
        pushed: false,
        read_back: false,
        package_updated: false,
        credentials: remote.source.clone(),
    };
    if options.dry_run {
        return Ok(report);
    }
    let prepared = point::prepare(dir, &target, &identity, options.drop_image)?;
    send(&remote, &report.blobs, &*progress).await?;
    remote.put_manifest(&identity.manifest, &manifest).await?;
    read_back(&remote, &identity.manifest, &manifest, &report.blobs).await?;
    remote.put_manifest(&tag, &manifest).await?;
    let served = remote.digest_of(&tag).await?;
    if served.as_ref() != Some(&identity.manifest) {
        let why =
            format!("it serves {} instead of {}", served.as_deref().unwrap_or("nothing"), identity.manifest);
        return Err(Failure::new(Class::Verify, format!("{} does not serve what was pushed", report.image))
            .why(why)
            .next("another push may have moved the tag meanwhile; push again, or choose another tag"));
    }
    (report.pushed, report.read_back) = (true, true);
    if let Some(prepared) = prepared {
        prepared.commit()?;
        report.package_updated = true;
    }
    Ok(report)
}

/// The manifest, and the files it names, the smallest first: a refusal then comes before the large ones.
fn blobs(image: &Path, identity: &Identity) -> Result<(Vec<u8>, Vec<Blob>)> {
    let path_of = |digest: &str| image.join("blobs/sha256").join(digest.trim_start_matches("sha256:"));
    let path = path_of(&identity.manifest);
    let bytes = fs::read(&path).at("read", &path)?;
    let manifest: Value = serde_json::from_slice(&bytes)
        .map_err(|error| Failure::new(Class::Verify, format!("{} is not JSON", path.display())).why(error))?;
    let blob = |descriptor: &Value, role| {
        let digest = descriptor["digest"].as_str().unwrap_or_default().to_owned();
        let size = descriptor["size"].as_u64().unwrap_or_default();
        Blob { path: path_of(&digest), digest, size, role, there: false }
    };
    let mut blobs = vec![blob(&manifest["config"], "config")];
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        let layer = blob(layer, "layer");
        // One layer can stand in an image twice; it is one blob.
        if blobs.iter().all(|other| other.digest != layer.digest) {
            blobs.push(layer);
        }
    }
    blobs.sort_by_key(|blob| blob.size);
    Ok((bytes, blobs))
}

async fn send(remote: &Remote, blobs: &[Blob], progress: &dyn Progress) -> Result<()> {
    let total: u64 = blobs.iter().map(|blob| blob.size).sum();
    let there: u64 = blobs.iter().filter(|blob| blob.there).map(|blob| blob.size).sum();
    let mut missing = blobs.iter().filter(|blob| !blob.there);
    if there == total {
        return Ok(());
    }
    progress.start(total, there, blobs.len());
    let work = async {
        // The first one alone: it shows whether this account may push, at the price of a few kilobytes.
        if let Some(first) = missing.next() {
            remote.send(first).await?;
        }
        let rest: Vec<_> = missing.map(|blob| remote.send(blob)).collect();
        stream::iter(rest).buffer_unordered(AT_ONCE).try_collect::<()>().await
    };
    let result = work.await;
    progress.finish();
    result
}

/// Asks the registry for all that was pushed: the manifest byte for byte, every blob with its size.
async fn read_back(remote: &Remote, digest: &str, manifest: &[u8], blobs: &[Blob]) -> Result<()> {
    let wrong = |what: String, why: String| {
        let next = "the tag was not moved; push again, and tell the registry's operator if it stays so";
        Err(Failure::new(Class::Verify, what).why(why).next(next))
    };
    match remote.manifest(digest).await? {
        Some(bytes) if bytes == manifest => {}
        Some(_) => {
            return wrong(
                format!("the registry's manifest {digest} has other bytes"),
                "read back after the push".into(),
            );
        }
        None => {
            return wrong(format!("the registry lacks the manifest {digest}"), "although it took it".into());
        }
    }
    for blob in blobs {
        match remote.size(&blob.digest).await? {
            Some(size) if size == blob.size => {}
            Some(size) => {
                let why = format!("{size} bytes instead of {}", blob.size);
                return wrong(format!("the registry's {} {} has another size", blob.role, blob.digest), why);
            }
            None => {
                return wrong(
                    format!("the registry lacks the {} {}", blob.role, blob.digest),
                    "although it took it".into(),
                );
            }
        }
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Finding out what the names of a manifest stand for now.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use super::{FilePin, GitPin, ImagePin, Lock, SfpiPin, Unpinned, WeightsPin, WheelPin};
use crate::{
    error::{Class, Failure, Result},
    files, git,
    image::engine,
    manifest::{
        Loaded,
        model::{GitSource, Root, TtMetal, Weights},
    },
};

/// Where to look.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Ask no network.
    pub offline: bool,
    /// Directory with wheel files.
    pub wheels: Option<PathBuf>,
    /// Build arguments that replace `build.base_images`.
    pub base_images: BTreeMap<String, String>,
}

/// Resolves what it can; the rest is listed in `unpinned`.
pub async fn resolve(loaded: &Loaded, options: &Options) -> Result<Lock> {
    let manifest = &loaded.manifest;
    let (mut unpinned, mut unlisted) = (Vec::new(), Vec::new());
    let mut miss = |what: String, why: String| unpinned.push(Unpinned { what, why });

    let mut weights = Vec::new();
    for entry in std::iter::once(&manifest.weights).chain(&manifest.auxiliary_weights) {
        let pin = weights_pin(&entry.full())?;
        if pin.revision.is_none() {
            miss(
                format!("weights {}", pin.repo),
                "its revision is no 40-digit commit, and the Hugging Face cache does not know it".into(),
            );
        } else if pin.files.is_empty() {
            let why = "the Hugging Face cache does not hold this revision".into();
            unlisted.push(Unpinned { what: format!("files of {}", pin.repo), why });
        }
        weights.push(pin);
    }

    let mut git = Vec::new();
    for source in git_sources(loaded) {
        if options.offline && !git::is_commit(&source.reference) {
            miss(format!("{}@{}", source.repo, source.reference), "offline".into());
            continue;
        }
        match git::resolve(source) {
            Ok(commit) => {
                git.push(GitPin { repo: source.repo.clone(), reference: source.reference.clone(), commit });
            }
            Err(error) => miss(format!("{}@{}", source.repo, source.reference), error.to_string()),
        }
    }

    let wheel = match &manifest.source.tt_metal {
        TtMetal::Wheel(source) => {
            let pin = wheel_pin(&source.wheel, options.wheels.as_deref())?;
            if pin.is_none() {
                let why = "no such wheel file; download it (pip download --no-deps) and name its directory with --wheels";
                miss(source.wheel.clone(), why.into());
            }
            pin
        }
        _ => None,
    };

    let mut base_images = BTreeMap::new();
    let build = manifest.build.as_ref();
    for (argument, name) in build.map(|build| build.base_images.clone()).unwrap_or_default() {
        let name = options.base_images.get(&argument).cloned().unwrap_or(name);
        let pin = match engine::find().await {
            Ok(engine) => engine.image_pin(&name).await,
            Err(error) => Err(error),
        };
        let pin = pin.unwrap_or_else(|error| {
            miss(format!("{argument} {name}"), error.what);
            ImagePin {
                digest: name.split_once('@').map(|(_, digest)| digest.to_owned()),
                name: name.clone(),
                id: None,
            }
        });
        base_images.insert(argument, pin);
    }

    let root = build.map_or_else(|| loaded.dir.clone(), |build| loaded.dir.join(&build.root));
    let in_context = |name: &str| build.is_some_and(|build| build.context.iter().any(|path| path.0 == name));
    let cargo_lock = in_context("Cargo.lock")
        .then(|| files::sha256_file(&root.join("Cargo.lock")))
        .transpose()?
        .map(|(digest, _)| digest);
    let toolchain = cargo_lock.as_ref().and_then(|_| toolchain(&root.join("rust-toolchain.toml")));
    Ok(Lock { version: 1, weights, wheel, git, base_images, cargo_lock, toolchain, unpinned, unlisted })
}

fn git_sources(loaded: &Loaded) -> Vec<&GitSource> {
    let source = &loaded.manifest.source;
    let metal = match &source.tt_metal {
        TtMetal::Git(git) => Some(git),
        _ => None,
    };
    let extra = source.extra_code.iter().filter_map(|extra| match &extra.root {
        Root::Git(git) => Some(git),
        Root::Path(_) => None,
    });
    metal.into_iter().chain(extra).collect()
}

/// The cache of the Hugging Face libraries.
pub fn hub_cache() -> PathBuf {
    hub::settings::cache(|name| env::var_os(name))
}

fn weights_pin(weights: &Weights) -> Result<WeightsPin> {
    let cache = hub_cache().join(format!("models--{}", weights.repo.replace('/', "--")));
    let named = weights.revision.clone().unwrap_or_else(|| "main".into());
    let revision = if git::is_commit(&named) {
        Some(named)
    } else {
        fs::read_to_string(cache.join("refs").join(&named))
            .ok()
            .map(|text| text.trim().to_owned())
            .filter(|text| git::is_commit(text))
    };
    if let Some(revision) = &revision {
        refuse_half(weights, revision)?;
    }
    let mut files = Vec::new();
    let snapshot =
        revision.as_ref().map(|revision| cache.join("snapshots").join(revision)).filter(|dir| dir.is_dir());
    for entry in snapshot.map(|dir| files::walk(&dir)).transpose()?.unwrap_or_default() {
        if entry.full.is_file() {
            let (sha256, size) = files::sha256_file(&entry.full)?;
            files.push(FilePin { path: entry.path, size, sha256 });
        }
    }
    Ok(WeightsPin { repo: weights.repo.clone(), revision, files })
}

/// A pin is taken for the list of a snapshot, so half a snapshot must not become one: every file that the commit is
/// known to have, and the manifest wants, must be there.
fn refuse_half(weights: &Weights, revision: &str) -> Result<()> {
    let cache = hub::cache::Cache::new(&hub_cache(), &weights.repo);
    let Some(record) = cache.record(revision) else { return Ok(()) };
    let (allow, ignore) = (weights.allow_patterns.as_deref(), weights.ignore_patterns.as_deref());
    let wanted = record.files.iter().filter(|file| {
        hub::pattern::selected(&file.path, allow.unwrap_or_default(), ignore.unwrap_or_default())
    });
    let wanted: Vec<_> = wanted.collect();
    let there = |path: &str| fs::metadata(cache.snapshot(revision).join(path)).ok();
    let absent: Vec<&str> = wanted
        .iter()
        .filter(|file| there(&file.path).is_none_or(|meta| meta.len() != file.size))
        .map(|file| file.path.as_str())
        .collect();
    // Without a single one there is nothing to be taken for a whole.
    if absent.is_empty() || absent.len() == wanted.len() {
        return Ok(());
    }
    let what = format!(
        "the cache holds {} of the {} files of {}@{revision} that the manifest wants",
        wanted.len() - absent.len(),
        wanted.len(),
        weights.repo
    );
    Err(Failure::new(Class::Verify, what)
        .why(format!("missing or cut: {}; half a snapshot is not pinned", absent.join(", ")))
        .next("run `packager fetch --weights`, then `packager pin` again"))
}

/// Finds the wheel of `name==version` in a directory; its own name says both.
fn wheel_pin(requirement: &str, dir: Option<&Path>) -> Result<Option<WheelPin>> {
    let (Some(dir), Some((name, version))) = (dir, requirement.split_once("==")) else { return Ok(None) };
    let start = format!("{}-{version}-", name.replace(['-', '.'], "_").to_lowercase());
    let mut entries = files::walk(dir)?.into_iter();
    let found = entries.find(|entry| {
        entry.path.to_lowercase().starts_with(&start) && entry.full.extension().is_some_and(|e| e == "whl")
    });
    let Some(entry) = found else { return Ok(None) };
    let (sha256, _) = files::sha256_file(&entry.full)?;
    let sfpi = super::wheel::member(&entry.full, "tt_metal/sfpi-version")?.map(|text| sfpi(&text));
    Ok(Some(WheelPin { requirement: requirement.into(), file: entry.path, sha256, sfpi }))
}

/// The file `sfpi-version` is made of shell assignments: `sfpi_version=7.89.0`, `sfpi_x86_64_deb_hash=…`.
fn sfpi(text: &str) -> SfpiPin {
    let pairs = text
        .lines()
        .filter_map(|line| line.trim().split_once('='))
        .map(|(key, value)| (key.trim(), value.trim().trim_matches(['\'', '"'])));
    let mut version = String::new();
    let mut sha256 = BTreeMap::new();
    for (key, value) in pairs {
        if key == "sfpi_version" {
            value.clone_into(&mut version);
        } else if value.len() == 64 && value.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            sha256.insert(key.to_owned(), value.to_owned());
        }
    }
    SfpiPin { version, sha256 }
}

fn toolchain(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("channel")?.trim().strip_prefix('='))?;
    Some(line.trim().trim_matches('"').to_owned())
}

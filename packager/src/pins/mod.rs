// SPDX-License-Identifier: Apache-2.0
//! `manifest.lock`: what the names of a manifest stood for when it was pinned.
//!
//! A manifest says "this branch, that image"; the lock says which commit, which digest. What could
//! not be found out (no network, no engine) is listed in `unpinned` with the reason, never guessed.

pub mod resolve;
mod wheel;

use std::{collections::BTreeMap, fs, path::Path};

pub use resolve::{Options, resolve};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Class, Failure, Result},
    files,
    manifest::model::GitSource,
};

/// File name of the lock, beside the manifest.
pub const FILE: &str = "manifest.lock";

const HEADER: &str =
    "# Written by `packager pin`. Checked by `packager pin --check` and by every build; not for editing.\n";

/// Everything a package is pinned to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Version of this file's format.
    pub version: u32,
    /// Weights repositories in the manifest's order.
    pub weights: Vec<WeightsPin>,
    /// tt-metal, if it comes as a wheel.
    pub wheel: Option<WheelPin>,
    /// Git sources: URL and ref → commit.
    pub git: Vec<GitPin>,
    /// Build argument → base image.
    pub base_images: BTreeMap<String, ImagePin>,
    /// SHA-256 of Cargo.lock, if the build context has one.
    pub cargo_lock: Option<String>,
    /// Rust toolchain of the build context.
    pub toolchain: Option<String>,
    /// What could not be pinned, and why.
    pub unpinned: Vec<Unpinned>,
    /// What is pinned by its commit, but not file by file, and why.
    pub unlisted: Vec<Unpinned>,
}

/// A weights repository at one commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsPin {
    /// organisation/name.
    pub repo: String,
    /// 40-digit commit.
    pub revision: Option<String>,
    /// Files of that commit; empty if they could not be listed.
    pub files: Vec<FilePin>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilePin {
    /// Path in the repository.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of the content.
    pub sha256: String,
}

/// A wheel file, and the compiler it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WheelPin {
    /// `ttnn==0.81.1`.
    pub requirement: String,
    /// File name.
    pub file: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// The compiler for the card, as the wheel names it.
    pub sfpi: Option<SfpiPin>,
}

/// The RISC-V compiler that tt-metal uses at run time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SfpiPin {
    /// Its version.
    pub version: String,
    /// SHA-256 of the archives by kind (deb, txz, …).
    pub sha256: BTreeMap<String, String>,
}

/// A Git source at one commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GitPin {
    /// URL.
    pub repo: String,
    /// The ref of the manifest.
    #[serde(rename = "ref")]
    pub reference: String,
    /// 40-digit commit.
    pub commit: String,
}

/// A base image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImagePin {
    /// As the manifest names it.
    pub name: String,
    /// Manifest digest in its registry; none for an image that was never in one.
    pub digest: Option<String>,
    /// Image id (config digest) in the engine that resolved it.
    pub id: Option<String>,
}

/// Something that could not be pinned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unpinned {
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
}

impl Lock {
    /// Reads the lock beside a manifest; none if there is no file.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::io("read", &path, &error)),
        };
        let broken = |why: String| {
            let failure =
                Failure::new(Class::Manifest, format!("{} cannot be read", path.display())).why(why);
            failure.next("write it again with `packager pin`")
        };
        let lock: Self = serde_yaml::from_str(&text).map_err(|error| broken(error.to_string()))?;
        if lock.version != 1 {
            return Err(broken(format!("version {} is not known here", lock.version)));
        }
        Ok(Some(lock))
    }

    /// The file's text.
    pub fn render(&self) -> String {
        format!("{HEADER}{}", serde_yaml::to_string(self).expect("a lock is plain data"))
    }

    /// Writes the lock beside a manifest.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(FILE);
        files::write_aside(&path, self.render().as_bytes())
    }

    /// The commit of a Git source.
    pub fn commit(&self, source: &GitSource) -> Option<String> {
        let found = self.git.iter().find(|pin| pin.repo == source.repo && pin.reference == source.reference);
        found.map(|pin| pin.commit.clone())
    }

    /// The commit of a weights repository.
    pub fn revision(&self, repo: &str) -> Option<&str> {
        self.weights.iter().find(|pin| pin.repo == repo)?.revision.as_deref()
    }
}

/// One difference between the lock and what the names stand for now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// Dotted path in the lock.
    pub what: String,
    /// In the lock.
    pub locked: String,
    /// Now.
    pub now: String,
}

/// Differences; what cannot be resolved now is no drift as long as the lock has it.
pub fn drift(locked: &Lock, now: &Lock) -> Vec<Drift> {
    let mut found = Vec::new();
    let mut compare = |what: String, locked: Option<String>, now: Option<String>, resolved: bool| {
        if locked != now && (resolved || now.is_some()) {
            let show = |value: Option<String>| value.unwrap_or_else(|| "nothing".into());
            found.push(Drift { what, locked: show(locked), now: show(now) });
        }
    };
    let repos = |lock: &Lock| lock.weights.iter().map(|pin| pin.repo.clone()).collect::<Vec<_>>().join(", ");
    compare("weights".into(), Some(repos(locked)), Some(repos(now)), true);
    for pin in &locked.weights {
        let Some(other) = now.weights.iter().find(|other| other.repo == pin.repo) else { continue };
        compare(
            format!("weights.{}.revision", pin.repo),
            pin.revision.clone(),
            other.revision.clone(),
            false,
        );
        for file in pin.files.iter().filter(|_| !other.files.is_empty()) {
            let same = other.files.iter().find(|candidate| candidate.path == file.path);
            compare(
                format!("weights.{}.{}", pin.repo, file.path),
                Some(file.sha256.clone()),
                same.map(|file| file.sha256.clone()),
                true,
            );
        }
    }
    let wheel =
        |lock: &Lock| lock.wheel.as_ref().map(|wheel| (wheel.requirement.clone(), wheel.sha256.clone()));
    compare("wheel.requirement".into(), wheel(locked).map(|w| w.0), wheel(now).map(|w| w.0), false);
    compare("wheel.sha256".into(), wheel(locked).map(|w| w.1), wheel(now).map(|w| w.1), false);
    for pin in &now.git {
        let old = locked.git.iter().find(|old| (&old.repo, &old.reference) == (&pin.repo, &pin.reference));
        compare(
            format!("git.{}@{}", pin.repo, pin.reference),
            old.map(|old| old.commit.clone()),
            Some(pin.commit.clone()),
            true,
        );
    }
    let names: std::collections::BTreeSet<_> =
        locked.base_images.keys().chain(now.base_images.keys()).collect();
    for name in names {
        let image = |lock: &Lock| lock.base_images.get(name).cloned();
        let (old, new) = (image(locked), image(now));
        let field =
            |image: &Option<ImagePin>, get: fn(&ImagePin) -> Option<String>| image.as_ref().and_then(get);
        compare(
            format!("base_images.{name}.name"),
            field(&old, |i| Some(i.name.clone())),
            field(&new, |i| Some(i.name.clone())),
            true,
        );
        compare(
            format!("base_images.{name}.digest"),
            field(&old, |i| i.digest.clone()),
            field(&new, |i| i.digest.clone()),
            false,
        );
        compare(
            format!("base_images.{name}.id"),
            field(&old, |i| i.id.clone()),
            field(&new, |i| i.id.clone()),
            false,
        );
    }
    compare("cargo_lock".into(), locked.cargo_lock.clone(), now.cargo_lock.clone(), true);
    compare("toolchain".into(), locked.toolchain.clone(), now.toolchain.clone(), true);
    found
}

// SPDX-License-Identifier: Apache-2.0
//! What `fetch` asks the Hub for: the manifest's weights as they are pinned, or a package by its name.

use hub::{Kind, Pin, Want};

use crate::{
    error::{Class, Failure},
    git,
    manifest::Loaded,
    pins::{Lock, WeightsPin},
};

impl From<hub::Error> for Failure {
    fn from(error: hub::Error) -> Self {
        let class = match error.kind {
            Kind::Usage => Class::Usage,
            Kind::Network => Class::Network,
            Kind::Auth => Class::Auth,
            Kind::Disk => Class::Disk,
            Kind::Verification => Class::Verify,
            Kind::Other => Class::Failure,
        };
        Self::new(class, error.what).why(error.why).next(error.next)
    }
}

/// The manifest's weights, the primary first: each at its pinned commit with the hashes of the lock, else as named.
pub fn weights(loaded: &Loaded, lock: Option<&Lock>) -> Vec<Want> {
    let manifest = &loaded.manifest;
    let all = std::iter::once(&manifest.weights).chain(&manifest.auxiliary_weights);
    let want = |weights: crate::manifest::model::Weights| {
        let named = weights.revision.clone().unwrap_or_else(|| "main".into());
        let pin = lock.and_then(|lock| lock.weights.iter().find(|pin| pin.repo == weights.repo));
        // A commit in the manifest is newer than a lock that says otherwise: the lock does not move it.
        let pin = pin.filter(|pin| !git::is_commit(&named) || pin.revision.as_ref() == Some(&named));
        Want {
            repo: weights.repo,
            revision: pin.and_then(|pin| pin.revision.clone()).unwrap_or(named),
            allow: weights.allow_patterns.unwrap_or_default(),
            ignore: weights.ignore_patterns.unwrap_or_default(),
            pins: pin.map(pins).unwrap_or_default(),
            verify: false,
        }
    };
    all.map(|weights| want(weights.full())).collect()
}

fn pins(pin: &WeightsPin) -> Vec<Pin> {
    let files = pin.files.iter();
    files.map(|file| Pin { path: file.path.clone(), size: file.size, sha256: file.sha256.clone() }).collect()
}

/// `REPO[@REVISION]`; main without a revision.
pub fn package(name: &str) -> Want {
    let (repo, revision) = name.split_once('@').unwrap_or((name, "main"));
    Want { repo: repo.into(), revision: revision.into(), ..Want::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_named_with_or_without_its_revision() {
        let want = package("org/name@refs/pr/1");
        assert_eq!((want.repo.as_str(), want.revision.as_str()), ("org/name", "refs/pr/1"));
        assert_eq!(package("org/name").revision, "main");
    }
}

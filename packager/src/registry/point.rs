// SPDX-License-Identifier: Apache-2.0
//! Points a package at the registry that has its image. The new package is made beside the old one from hard links
//! and proved before anything is sent, so that a full disk is known of in time; it takes its place in one step.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::Target;
use crate::{
    card,
    error::{At, Result},
    files::{self, FileType},
    layout::Identity,
    package, verify,
    wire::{self, Wire},
};

/// A package that waits to take the place of another.
pub struct Prepared {
    work: TempDir,
    dir: PathBuf,
}

impl Prepared {
    fn next(&self) -> PathBuf {
        self.work.path().join("package")
    }

    /// Puts it in place.
    pub fn commit(self) -> Result<()> {
        package::replace(&self.next(), &self.dir, &self.work)
    }
}

/// The package with another wire manifest, card and list of digests; none if it says all that already.
pub fn prepare(
    dir: &Path,
    target: &Target,
    identity: &Identity,
    drop_image: bool,
) -> Result<Option<Prepared>> {
    let mut wire = verify::read_wire(dir)?;
    let image = &mut wire.container.image;
    let wanted = (target.namespace(), target.name().to_owned(), Some(identity.manifest.clone()));
    if (&image.registry, &image.repository, &image.digest) == (&wanted.0, &wanted.1, &wanted.2) && !drop_image
    {
        return Ok(None);
    }
    (image.registry, image.repository, image.digest) = wanted;
    let dir = fs::canonicalize(dir).at("find", dir)?;
    let parent = dir.parent().unwrap_or(Path::new("/"));
    let work =
        tempfile::Builder::new().prefix(".push.").tempdir_in(parent).at("create a directory in", parent)?;
    let prepared = Prepared { work, dir };
    let next = prepared.next();
    link(&prepared.dir, &next, &wire, drop_image)?;
    verify::write_sums(&next)?;
    verify::verify(&next)?;
    Ok(Some(prepared))
}

/// The same package with another wire manifest. The card of another version's words stays as it is.
fn link(from: &Path, to: &Path, wire: &Wire, drop_image: bool) -> Result<()> {
    fs::create_dir(to).at("create", to)?;
    let card = if wire.producer.tt_kernel_version == env!("CARGO_PKG_VERSION") {
        Some(card::render(wire)?)
    } else {
        None
    };
    for entry in files::walk(from)? {
        let path = to.join(&entry.path);
        if drop_image && (entry.path == "image" || entry.path.starts_with("image/")) {
            continue;
        }
        match (entry.class, entry.path.as_str(), &card) {
            (FileType::Directory, ..) => fs::create_dir(&path).at("create", &path)?,
            (_, wire::FILE, _) => fs::write(&path, wire.render()).at("write", &path)?,
            (_, card::FILE, Some(card)) => fs::write(&path, card).at("write", &path)?,
            (_, verify::SUMS, _) => {}
            // A file system without hard links copies.
            _ => fs::hard_link(&entry.full, &path)
                .or_else(|_| fs::copy(&entry.full, &path).map(drop))
                .at("copy", &path)?,
        }
    }
    Ok(())
}

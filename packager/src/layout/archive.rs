// SPDX-License-Identifier: Apache-2.0
//! Reading what an engine exports, in every form that engines write: the old `docker save` (one
//! directory per layer), the OCI layout of Docker 25 and newer, with or without the old manifest beside
//! it, layers plain or gzipped, the index pointing to an index.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::error::{At, Class, Failure, Result};

/// Larger than any configuration or manifest.
const MAX_JSON: u64 = 16 << 20;

/// An exported image, unpacked into a directory: one file per archive entry.
pub struct Archive {
    files: BTreeMap<String, PathBuf>,
    links: BTreeMap<String, String>,
}

/// An image found in an archive.
#[derive(Debug)]
pub struct Image {
    /// Its configuration, byte for byte.
    pub config: Vec<u8>,
    /// Its layers, base first.
    pub layers: Vec<PathBuf>,
}

fn broken(why: impl std::fmt::Display) -> Failure {
    let failure = Failure::new(Class::Engine, "the engine's export cannot be read").why(why);
    failure.next("if this engine is newer than those this program was tested with, please report it")
}

impl Archive {
    /// Reads a tar stream once and spools its entries to `dir`.
    pub fn unpack(stream: impl Read, dir: &Path) -> Result<Self> {
        let (mut files, mut links) = (BTreeMap::new(), BTreeMap::new());
        let mut tar = tar::Archive::new(stream);
        for (index, entry) in tar.entries().map_err(broken)?.enumerate() {
            let mut entry = entry.map_err(broken)?;
            let name = clean(&entry.path().map_err(broken)?.to_string_lossy());
            let kind = entry.header().entry_type();
            if kind.is_file() {
                let path = dir.join(index.to_string());
                let mut file = File::create(&path).at("create", &path)?;
                std::io::copy(&mut entry, &mut file).at("write", &path)?;
                files.insert(name, path);
            } else if kind.is_symlink() || kind.is_hard_link() {
                let target =
                    entry.link_name().map_err(broken)?.unwrap_or_default().to_string_lossy().into_owned();
                let target = if kind.is_hard_link() { clean(&target) } else { beside(&name, &target) };
                links.insert(name, target);
            }
        }
        Ok(Self { files, links })
    }

    fn file(&self, name: &str) -> Result<&Path> {
        let mut name = clean(name);
        for _ in 0..8 {
            if let Some(path) = self.files.get(&name) {
                return Ok(path);
            }
            match self.links.get(&name) {
                Some(target) => name.clone_from(target),
                None => break,
            }
        }
        Err(broken(format!("it names {name}, which is not in it")))
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.file(name)?;
        let mut bytes = Vec::new();
        File::open(path).at("open", path)?.take(MAX_JSON).read_to_end(&mut bytes).at("read", path)?;
        Ok(bytes)
    }

    fn json(&self, name: &str) -> Result<Value> {
        serde_json::from_slice(&self.bytes(name)?).map_err(|error| broken(format!("{name}: {error}")))
    }

    /// The one image in it. The layout is preferred; the old manifest's paths are taken as they stand.
    pub fn image(&self) -> Result<Image> {
        if self.files.contains_key("oci-layout") && self.files.contains_key("index.json") {
            return self.by_index(&self.json("index.json")?, 0);
        }
        let manifest = self.json("manifest.json")?;
        let image = &manifest[0];
        let config = image["Config"].as_str().ok_or_else(|| broken("manifest.json names no Config"))?;
        let layers = image["Layers"].as_array().ok_or_else(|| broken("manifest.json lists no Layers"))?;
        let layers = layers
            .iter()
            .map(|layer| self.file(layer.as_str().unwrap_or_default()).map(Path::to_path_buf))
            .collect::<Result<_>>()?;
        Ok(Image { config: self.bytes(config)?, layers })
    }

    /// Follows an index to the manifest of an image; indexes can be nested, and attestations stand
    /// beside images under the platform "unknown".
    fn by_index(&self, index: &Value, depth: usize) -> Result<Image> {
        if depth > 4 {
            return Err(broken("its indexes are nested too deep"));
        }
        let entries = index["manifests"].as_array().ok_or_else(|| broken("an index without manifests"))?;
        let is_image = |entry: &&Value| entry["platform"]["os"].as_str() != Some("unknown");
        let entry = entries.iter().find(is_image).ok_or_else(|| broken("an index without an image"))?;
        let document = self.json(&blob(entry)?)?;
        if document["manifests"].is_array() {
            return self.by_index(&document, depth + 1);
        }
        let layers = document["layers"].as_array().ok_or_else(|| broken("a manifest without layers"))?;
        let layers = layers
            .iter()
            .map(|layer| self.file(&blob(layer)?).map(Path::to_path_buf))
            .collect::<Result<_>>()?;
        Ok(Image { config: self.bytes(&blob(&document["config"])?)?, layers })
    }
}

fn blob(descriptor: &Value) -> Result<String> {
    let digest = descriptor["digest"].as_str().and_then(|digest| digest.split_once(':'));
    let (algorithm, hex) = digest.ok_or_else(|| broken("a descriptor without digest"))?;
    Ok(format!("blobs/{algorithm}/{hex}"))
}

fn clean(path: &str) -> String {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/")
}

/// A link's target, seen from the directory of the link.
fn beside(name: &str, target: &str) -> String {
    let mut parts: Vec<&str> = name.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            ".." => {
                parts.pop();
            }
            "" | "." => {}
            other => parts.push(other),
        }
    }
    parts.join("/")
}

// SPDX-License-Identifier: Apache-2.0
//! Reading a layout back and proving it: every blob against its name, every layer against its diff id,
//! both index entries and `manifest.json` against each other, nothing unknown beside them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::Path,
};

use serde_json::Value;

use super::{Identity, normalize};
use crate::{
    error::{At, Class, Failure, Result},
    files::{self, FileType},
};

/// A layout that holds together.
#[derive(Debug)]
pub struct Layout {
    /// The image.
    pub identity: Identity,
    /// Its configuration.
    pub config: Value,
    /// Names it carries: of `manifest.json`, and of the index.
    pub tag: String,
    /// Paths of the layer blobs, base first.
    pub layers: Vec<std::path::PathBuf>,
}

fn wrong(what: impl Into<String>, why: impl std::fmt::Display) -> Failure {
    Failure::new(Class::Verify, what).why(why)
}

/// Reads and proves `dir`. The first disagreement is the error, with the file's name.
pub fn read(dir: &Path) -> Result<Layout> {
    let json = |name: &str| -> Result<Value> {
        let path = dir.join(name);
        let bytes = fs::read(&path)
            .at("read", &path)
            .map_err(|failure| Failure { class: Class::Verify, ..failure })?;
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|error| wrong(format!("image/{name} is not JSON"), error))?;
        // Only the bytes that the writer makes: a changed space is a change.
        if serde_json::to_vec(&value).ok().as_deref() == Some(bytes.as_slice()) {
            Ok(value)
        } else {
            Err(wrong(format!("image/{name} was changed"), "it is not in its written form"))
        }
    };
    for entry in files::walk(dir)? {
        let known = ["blobs", "blobs/sha256", "index.json", "manifest.json", "oci-layout"]
            .contains(&entry.path.as_str());
        if let (Some(name), FileType::File(_)) = (entry.path.strip_prefix("blobs/sha256/"), entry.class) {
            let (digest, _) = files::sha256_file(&entry.full)?;
            if digest != name {
                return Err(wrong(
                    format!("image/{} has other bytes than its name says", entry.path),
                    format!("sha256 is {digest}"),
                ));
            }
        } else if !known {
            return Err(wrong(format!("image/{} does not belong to a layout", entry.path), "unknown file"));
        }
    }
    if json("oci-layout")? != serde_json::json!({"imageLayoutVersion": "1.0.0"}) {
        return Err(wrong("image/oci-layout is not version 1.0.0", "unknown content"));
    }
    let index = json("index.json")?;
    let entries = index["manifests"].as_array().map(Vec::as_slice).unwrap_or_default();
    let [latest, named] = entries else {
        return Err(wrong("image/index.json must have two entries", format!("it has {}", entries.len())));
    };
    let strip = |entry: &Value| (entry["mediaType"].clone(), entry["digest"].clone(), entry["size"].clone());
    if strip(latest) != strip(named) {
        return Err(wrong("image/index.json names two different images", "the entries must agree"));
    }
    let reference = |entry: &Value| entry["annotations"]["org.opencontainers.image.ref.name"].clone();
    if reference(latest) != "latest" {
        return Err(wrong("image/index.json has no entry `latest`", reference(latest)));
    }
    let mut used = BTreeSet::new();
    let mut blob = |descriptor: &Value| -> Result<std::path::PathBuf> {
        let digest =
            descriptor["digest"].as_str().and_then(|text| text.strip_prefix("sha256:")).unwrap_or_default();
        let path = dir.join("blobs/sha256").join(digest);
        let size = fs::metadata(&path)
            .map_err(|_| wrong(format!("image/blobs/sha256/{digest} is missing"), "the layout names it"))?
            .len();
        if Some(size) != descriptor["size"].as_u64() {
            return Err(wrong(
                format!("image/blobs/sha256/{digest} has another size than its descriptor"),
                size,
            ));
        }
        used.insert(digest.to_owned());
        Ok(path)
    };
    let parse = |path: &Path| -> Result<Value> {
        let bytes = fs::read(path).at("read", path)?;
        serde_json::from_slice(&bytes)
            .map_err(|error| wrong(format!("{} is not JSON", path.display()), error))
    };
    let manifest = parse(&blob(latest)?)?;
    let config = parse(&blob(&manifest["config"])?)?;
    let layers =
        manifest["layers"].as_array().into_iter().flatten().map(&mut blob).collect::<Result<Vec<_>>>()?;
    let loaded = json("manifest.json")?;
    let path_of = |descriptor: &Value| {
        format!(
            "blobs/sha256/{}",
            descriptor["digest"].as_str().unwrap_or_default().trim_start_matches("sha256:")
        )
    };
    let listed: Vec<String> = manifest["layers"].as_array().into_iter().flatten().map(path_of).collect();
    if loaded[0]["Config"] != path_of(&manifest["config"]) || loaded[0]["Layers"] != serde_json::json!(listed)
    {
        return Err(wrong(
            "image/manifest.json names other blobs than the index",
            "docker load and skopeo would get different images",
        ));
    }
    let tag = loaded[0]["RepoTags"][0].as_str().unwrap_or_default().to_owned();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if text(&named["annotations"]["io.containerd.image.name"]) != format!("docker.io/{tag}")
        || !tag.ends_with(&format!(":{}", text(&reference(named))))
    {
        return Err(wrong("image/index.json and image/manifest.json name the image differently", &tag));
    }
    let stated: Vec<String> =
        config["rootfs"]["diff_ids"].as_array().into_iter().flatten().map(text).collect();
    let mut sizes = Vec::new();
    for (path, stated) in layers.iter().zip(&stated) {
        let (digest, size) = hash(path)?;
        if format!("sha256:{digest}") != *stated {
            return Err(wrong(
                format!("layer {} does not unpack to its diff id", path.display()),
                format!("{digest} instead of {stated}"),
            ));
        }
        sizes.push(size);
    }
    if stated.len() != layers.len() {
        return Err(wrong(
            "the image's configuration lists another number of layers than its manifest",
            stated.len(),
        ));
    }
    let present: BTreeSet<String> = fs::read_dir(dir.join("blobs/sha256"))
        .at("list", dir)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    if let Some(extra) = present.difference(&used).next() {
        return Err(wrong(
            format!("image/blobs/sha256/{extra} belongs to nothing"),
            "the layout does not name it",
        ));
    }
    let identity = Identity {
        config: text(&manifest["config"]["digest"]),
        manifest: text(&latest["digest"]),
        diff_ids: stated,
        sizes,
        base_layers: 0,
    };
    Ok(Layout { identity, config, tag, layers })
}

fn hash(path: &Path) -> Result<(String, u64)> {
    use super::compress::Hashing;
    let mut reader = Hashing::new(normalize::open(path)?);
    std::io::copy(&mut reader, &mut std::io::sink())
        .at("unpack", path)
        .map_err(|failure| Failure { class: Class::Verify, ..failure })?;
    let (_, digest, size) = reader.finish();
    Ok((digest, size))
}

/// A file of the image's root filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// SHA-256 of its content, or the target of a link.
    pub content: String,
    /// Permission bits.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
}

/// Files and links of an image by their path.
pub type Tree = BTreeMap<String, Found>;

/// Files and links below a directory of the image, as the layers leave them: whiteouts applied. The
/// content of the file `captured` comes back too.
pub fn files_below(layout: &Layout, directory: &str, captured: &str) -> Result<(Tree, Option<Vec<u8>>)> {
    let directory = directory.trim_matches('/');
    let start = if directory.is_empty() { String::new() } else { format!("{directory}/") };
    let (mut found, mut content_of) = (BTreeMap::new(), None);
    for layer in &layout.layers {
        let mut archive = tar::Archive::new(normalize::open(layer)?);
        for entry in archive.entries().at("read", layer)? {
            let mut entry = entry.at("read", layer)?;
            let path = entry
                .path()
                .at("read", layer)?
                .to_string_lossy()
                .trim_start_matches("./")
                .trim_end_matches('/')
                .to_owned();
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", &path));
            if name == ".wh..wh..opq" {
                found.retain(|key: &String, _| !format!("{start}{key}").starts_with(&format!("{parent}/")));
                continue;
            }
            if let Some(gone) = name.strip_prefix(".wh.") {
                let gone = if parent.is_empty() { gone.to_owned() } else { format!("{parent}/{gone}") };
                found.retain(|key: &String, _| {
                    let full = format!("{start}{key}");
                    full != gone && !full.starts_with(&format!("{gone}/"))
                });
                continue;
            }
            if path == captured {
                let mut content = Vec::new();
                entry.read_to_end(&mut content).at("read", layer)?;
                content_of = Some(content);
                continue;
            }
            let Some(below) = path.strip_prefix(&start).map(str::to_owned) else { continue };
            let kind = entry.header().entry_type();
            let mode = entry.header().mode().at("read", layer)? & 0o7777;
            if kind.is_file() {
                let mut content = Vec::new();
                entry.read_to_end(&mut content).at("read", layer)?;
                found.insert(
                    below,
                    Found { content: files::sha256(&content), mode, size: content.len() as u64 },
                );
            } else if kind.is_symlink() || kind.is_hard_link() {
                let target =
                    entry.link_name().at("read", layer)?.unwrap_or_default().to_string_lossy().into_owned();
                found.insert(below, Found { content: format!("link to {target}"), mode, size: 0 });
            }
        }
    }
    Ok((found, content_of))
}

/// True if some path of the image has a directory of this name.
pub fn has_directory(layout: &Layout, name: &str) -> Result<bool> {
    for layer in &layout.layers {
        let mut archive = tar::Archive::new(normalize::open(layer)?);
        for entry in archive.entries().at("read", layer)? {
            let entry = entry.at("read", layer)?;
            if entry.path().at("read", layer)?.components().any(|part| part.as_os_str() == name) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

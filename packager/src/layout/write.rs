// SPDX-License-Identifier: Apache-2.0
//! Writing the layout that every consumer can read: `manifest.json` for `docker load`, and two index
//! entries for the one manifest, `latest` for skopeo and the full name for containerd.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{
    Identity,
    archive::Image,
    config,
    normalize::{diff_id, keep, rewrite},
};
use crate::{
    error::{At, Result},
    files,
};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Media type of the image's manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Writes the normalised image to `out` (which it creates). Layers of the base image (`base`: their diff
/// ids) stay byte for byte what they are, so that they are shared with other images on the same base.
pub fn write(image: &Image, base: &[String], name: &str, epoch: u64, out: &Path) -> Result<Identity> {
    let blobs = out.join("blobs/sha256");
    fs::create_dir_all(&blobs).at("create", &blobs)?;
    let (mut descriptors, mut diff_ids, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
    let mut base_layers = 0;
    for (index, layer) in image.layers.iter().enumerate() {
        let is_base = base_layers == index
            && base
                .get(index)
                .is_some_and(|id| diff_id(layer).is_ok_and(|found| *id == format!("sha256:{found}")));
        let partial = out.join("layer.partial");
        let blob = if is_base {
            base_layers += 1;
            keep(layer, &partial)?
        } else {
            rewrite(layer, &out.join("layer.plain"), &partial, epoch)?
        };
        let path = blobs.join(&blob.digest);
        fs::rename(&partial, &path).at("write", &path)?;
        descriptors.push(
            json!({"mediaType": LAYER, "digest": format!("sha256:{}", blob.digest), "size": blob.size}),
        );
        diff_ids.push(format!("sha256:{}", blob.diff));
        sizes.push(blob.unpacked);
    }
    let config = config::normalize(&image.config, &diff_ids, &timestamp(epoch))?;
    let config_descriptor = descriptor(CONFIG, &put(&blobs, &config)?, config.len());
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config_descriptor, "layers": descriptors});
    let manifest = serde_json::to_vec(&manifest).expect("plain data");
    let digest = put(&blobs, &manifest)?;
    let identity = Identity {
        config: text(&config_descriptor["digest"]),
        manifest: digest.clone(),
        diff_ids,
        sizes,
        base_layers,
    };
    let tag = identity.tag(name);
    let entry = |annotations: Value| {
        let mut entry = descriptor(MANIFEST, &digest, manifest.len());
        entry["annotations"] = annotations;
        entry
    };
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
        entry(json!({"org.opencontainers.image.ref.name": "latest"})),
        entry(json!({"io.containerd.image.name": format!("docker.io/{tag}"), "org.opencontainers.image.ref.name": identity.short()})),
    ]});
    let blob_path = |descriptor: &Value| {
        format!("blobs/sha256/{}", text(&descriptor["digest"]).trim_start_matches("sha256:"))
    };
    let layers: Vec<String> = descriptors.iter().map(blob_path).collect();
    let loaded = json!([{"Config": blob_path(&config_descriptor), "RepoTags": [tag], "Layers": layers}]);
    for (file, value) in [
        ("index.json", index),
        ("manifest.json", loaded),
        ("oci-layout", json!({"imageLayoutVersion": "1.0.0"})),
    ] {
        let path = out.join(file);
        fs::write(&path, serde_json::to_vec(&value).expect("plain data")).at("write", &path)?;
    }
    Ok(identity)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn descriptor(media_type: &str, digest: &str, size: usize) -> Value {
    json!({"mediaType": media_type, "digest": digest, "size": size})
}

fn put(blobs: &Path, bytes: &[u8]) -> Result<String> {
    let digest = files::sha256(bytes);
    let path = blobs.join(&digest);
    fs::write(&path, bytes).at("write", &path)?;
    Ok(format!("sha256:{digest}"))
}

/// Seconds since 1970 as RFC 3339.
pub fn timestamp(seconds: u64) -> String {
    let time = i64::try_from(seconds)
        .ok()
        .and_then(|seconds| chrono::DateTime::from_timestamp(seconds, 0))
        .unwrap_or_default();
    time.format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

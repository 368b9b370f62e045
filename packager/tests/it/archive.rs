// SPDX-License-Identifier: Apache-2.0
//! Every form in which engines export an image gives the same layout: the archives here are made by
//! hand as the engines' documentation and reports describe them, since one engine writes one form.

use std::{fs, io::Write as _, path::Path};

use packager::{
    files::sha256,
    layout::{Identity, archive::Archive, read, write},
};
use serde_json::{Value, json};
use tempfile::tempdir;

type Entry = (String, Vec<u8>);

/// A layer with entries in this order and with this time.
fn layer(files: &[(&str, &str)], mtime: u64, owner: &str) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mtime(mtime);
        header.set_mode(0o644);
        header.set_uid(7);
        header.set_gid(8);
        header.set_username(owner).expect("name");
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, path, content.as_bytes()).expect("entry");
    }
    tar.into_inner().expect("tar")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).expect("gzip");
    encoder.finish().expect("gzip")
}

fn archive(entries: &[Entry]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, path, content.as_slice()).expect("entry");
    }
    tar.into_inner().expect("tar")
}

fn config(layers: &[Vec<u8>], extra: &Value) -> Vec<u8> {
    let diff_ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", sha256(layer))).collect();
    let mut config = json!({"architecture": "amd64", "os": "linux", "created": "2026-01-02T03:04:05Z",
        "config": {"Env": ["A=1"], "Labels": {"b": "2", "a": "1"}, "Cmd": ["x"]},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": layers.iter().map(|_| json!({"created": "2026-01-02T03:04:05Z", "created_by": "step"})).collect::<Vec<_>>()});
    for (key, value) in extra.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    serde_json::to_vec(&config).expect("JSON")
}

fn bytes(value: &Value) -> Vec<u8> {
    serde_json::to_vec(value).expect("JSON")
}

fn normalized(entries: &[Entry], base: &[String]) -> (Identity, tempfile::TempDir) {
    let dir = tempdir().expect("dir");
    let (spool, out) = (dir.path().join("spool"), dir.path().join("image"));
    fs::create_dir(&spool).expect("dir");
    let image =
        Archive::unpack(archive(entries).as_slice(), &spool).expect("readable").image().expect("an image");
    let identity = write::write(&image, base, "pkg", 1_700_000_000, &out).expect("written");
    read::read(&out).expect("a layout that holds together");
    (identity, dir)
}

/// `docker save` below 25: a directory per layer, a layer as a link to an equal one.
fn old_form(layers: &[Vec<u8>], extra: &Value) -> Vec<Entry> {
    let config = config(layers, extra);
    let name = format!("{}.json", sha256(&config));
    let paths: Vec<String> = (0..layers.len()).map(|index| format!("layer{index}/layer.tar")).collect();
    let mut entries: Vec<Entry> =
        layers.iter().zip(&paths).map(|(layer, path)| (path.clone(), layer.clone())).collect();
    entries.push((name.clone(), config));
    entries.push((
        "manifest.json".into(),
        bytes(&json!([{"Config": name, "RepoTags": ["x:1"], "Layers": paths}])),
    ));
    entries.push(("repositories".into(), b"{}".to_vec()));
    entries
}

/// The OCI form; `nested`: the index points to an index with an attestation beside the image.
fn oci_form(layers: &[Vec<u8>], extra: &Value, compressed: bool, nested: bool) -> Vec<Entry> {
    let mut entries = vec![("oci-layout".into(), bytes(&json!({"imageLayoutVersion": "1.0.0"})))];
    let mut blob = |content: Vec<u8>| {
        let digest = sha256(&content);
        let descriptor = json!({"digest": format!("sha256:{digest}"), "size": content.len()});
        entries.push((format!("blobs/sha256/{digest}"), content));
        descriptor
    };
    let descriptors: Vec<Value> =
        layers.iter().map(|layer| blob(if compressed { gzip(layer) } else { layer.clone() })).collect();
    let config = blob(config(layers, extra));
    let path =
        |descriptor: &Value| format!("blobs/sha256/{}", &descriptor["digest"].as_str().expect("digest")[7..]);
    let legacy = json!([{"Config": path(&config), "RepoTags": ["x:1"], "Layers": descriptors.iter().map(path).collect::<Vec<_>>()}]);
    let mut top = blob(bytes(&json!({"schemaVersion": 2, "config": config, "layers": descriptors})));
    if nested {
        let mut attestation = blob(b"{\"layers\":[]}".to_vec());
        attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
        top["platform"] = json!({"os": "linux", "architecture": "amd64"});
        top = blob(bytes(&json!({"schemaVersion": 2, "manifests": [attestation, top]})));
    }
    entries.push(("index.json".into(), bytes(&json!({"schemaVersion": 2, "manifests": [top]}))));
    // The old manifest beside it, whose paths already start with blobs/sha256/.
    entries.push(("manifest.json".into(), bytes(&legacy)));
    entries
}

#[test]
fn case_4_case_5_every_form_of_export_gives_one_identity() {
    let layers = [layer(&[("etc/a", "1"), ("b", "2")], 100, "root"), layer(&[("opt/x", "3")], 200, "root")];
    let nothing = json!({});
    let (expected, _dir) = normalized(&old_form(&layers, &nothing), &[]);
    for (compressed, nested) in [(false, false), (true, false), (true, true), (false, true)] {
        let (identity, _dir) = normalized(&oci_form(&layers, &nothing, compressed, nested), &[]);
        assert_eq!(identity, expected, "gzip {compressed}, nested {nested}");
    }
    let mut only_legacy = oci_form(&layers, &nothing, true, false);
    only_legacy.retain(|(path, _)| path != "index.json" && path != "oci-layout");
    assert_eq!(normalized(&only_legacy, &[]).0, expected, "the old manifest's paths are taken as they stand");
}

#[test]
fn case_2_times_order_owner_names_and_engine_keys_do_not_change_the_identity() {
    let one = [layer(&[("a", "1"), ("b/c", "2")], 100, "root")];
    let two = [layer(&[("b/c", "2"), ("a", "1")], 999, "builder")];
    let classic = json!({"container": "abc", "container_config": {"Hostname": "h"}, "docker_version": "20.10", "created": "2030-01-01T00:00:00Z"});
    let (first, _a) = normalized(&old_form(&one, &json!({})), &[]);
    let (second, _b) = normalized(&old_form(&two, &classic), &[]);
    assert_eq!(first, second);
    let (other, _c) =
        normalized(&old_form(&[layer(&[("a", "1"), ("b/c", "3")], 100, "root")], &json!({})), &[]);
    assert_ne!(first.config, other.config, "another content is another image");
}

#[test]
fn layers_of_the_base_stay_byte_for_byte() {
    let layers = [layer(&[("base", "1")], 123, "root"), layer(&[("own", "2")], 456, "root")];
    let base = vec![format!("sha256:{}", sha256(&layers[0]))];
    let (identity, _dir) = normalized(&old_form(&layers, &json!({})), &base);
    assert_eq!((identity.base_layers, &identity.diff_ids[0]), (1, &base[0]));
    assert_ne!(identity.diff_ids[1], format!("sha256:{}", sha256(&layers[1])), "ours has the fixed time");
}

#[test]
fn case_4_what_cannot_be_read_says_what_is_missing() {
    let layers = [layer(&[("a", "1")], 1, "root")];
    let fails = |entries: &[Entry]| {
        let dir = tempdir().expect("dir");
        let result =
            Archive::unpack(archive(entries).as_slice(), dir.path()).and_then(|archive| archive.image());
        result.expect_err("broken").to_string()
    };
    let mut missing = old_form(&layers, &json!({}));
    missing.remove(0);
    assert!(fails(&missing).contains("layer0/layer.tar, which is not in it"));
    assert!(fails(&[]).contains("manifest.json"));
    let dir = tempdir().expect("dir");
    let path = dir.path().join("zstd");
    fs::write(&path, [0x28, 0xb5, 0x2f, 0xfd, 0]).expect("written");
    assert!(packager::layout::normalize::open(&path).err().expect("refused").to_string().contains("zstd"));
}

#[test]
fn whiteouts_and_later_layers_decide_what_is_in_the_image() {
    let layers = [
        layer(&[("opt/c/a", "1"), ("opt/c/d/b", "2"), ("opt/c/e/f", "3")], 1, "root"),
        layer(
            &[("opt/c/a", "changed"), ("opt/c/.wh.d", ""), ("opt/c/e/.wh..wh..opq", ""), ("opt/c/e/g", "4")],
            1,
            "root",
        ),
    ];
    let (_identity, dir) = normalized(&old_form(&layers, &json!({})), &[]);
    let layout = read::read(&dir.path().join("image")).expect("layout");
    let (files, captured) = read::files_below(&layout, "/opt/c", "opt/c/e/g").expect("files");
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(names, ["a"], "the captured file comes back by itself");
    assert_eq!(
        (files["a"].content.as_str(), captured.as_deref()),
        (sha256("changed").as_str(), Some(b"4".as_slice()))
    );
}

#[test]
fn a_layout_is_refused_when_any_of_its_files_disagrees() {
    let layers = [layer(&[("a", "1")], 1, "root")];
    let (identity, dir) = normalized(&old_form(&layers, &json!({})), &[]);
    let image = dir.path().join("image");
    let check = |path: &Path, change: &dyn Fn(&str) -> String| {
        let good = fs::read_to_string(path).expect("text");
        fs::write(path, change(&good)).expect("written");
        let failure = read::read(&image).expect_err("noticed").to_string();
        fs::write(path, good).expect("restored");
        failure
    };
    assert!(
        check(&image.join("index.json"), &|text| text.replacen("latest", "newest", 1)).contains("latest")
    );
    assert!(check(&image.join("index.json"), &|text| format!("{text} ")).contains("written form"));
    assert!(check(&image.join("oci-layout"), &|text| text.replace("1.0.0", "2.0.0")).contains("oci-layout"));
    assert!(
        check(&image.join("manifest.json"), &|text| text.replace("pkg:", "other:")).contains("differently")
    );
    let config = image.join("blobs/sha256").join(&identity.config[7..]);
    assert!(check(&config, &|text| text.replace("A=1", "A=2")).contains("other bytes than its name says"));
    fs::write(image.join("blobs/sha256").join(sha256("x")), "x").expect("written");
    assert!(read::read(&image).expect_err("extra").to_string().contains("belongs to nothing"));
}

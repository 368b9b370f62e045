// SPDX-License-Identifier: Apache-2.0
//! Proving a package offline: every file against the list of digests, and every statement against the
//! thing it is about. Exit code 8 and the name of what disagrees, or a list of what was proved.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Serialize;
use serde_json::Value;

use crate::{
    card, digest,
    error::{At, Class, Failure, Result},
    evidence::{slsa, spdx},
    files::{self, FileType},
    layout::read::{self, Layout},
    pins::Lock,
    wire::{self, Wire},
};

/// File with the digests of all others.
pub const SUMS: &str = "SHA256SUMS";

/// What was proved.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// One sentence each.
    pub proved: Vec<String>,
}

fn wrong(what: impl Into<String>, why: impl std::fmt::Display) -> Failure {
    let next = "do not use this package; get it again from where it was published, or build it again";
    Failure::new(Class::Verify, what).why(why).next(next)
}

/// Proves a package directory, or a bare image layout.
pub fn verify(dir: &Path) -> Result<Report> {
    let mut report = Report::default();
    if dir.join("oci-layout").is_file() {
        let layout = read::read(dir)?;
        report.proved.push(format!(
            "layout: {} layers, image {}",
            layout.layers.len(),
            layout.identity.config
        ));
        return Ok(report);
    }
    if !dir.join(wire::FILE).is_file() {
        let failure =
            Failure::new(Class::Usage, format!("{} is no package and no image layout", dir.display()));
        return Err(failure
            .why(format!("it has neither {} nor oci-layout", wire::FILE))
            .next("give build/<name>, or an image layout"));
    }
    let count = sums(dir)?;
    report.proved.push(format!("{SUMS}: {count} files as listed, none missing, none besides"));
    let wire = read_wire(dir)?;
    report.proved.push(format!("{}: schema {}, as this program writes it", wire::FILE, wire.schema_version));
    report.proved.push(code(dir, &wire)?);
    if wire.container.image.registry == "hf" || dir.join("image").exists() {
        let layout = read::read(&dir.join("image"))?;
        image(dir, &wire, &layout)?;
        report.proved.push(format!(
            "image: {} layers unpack to their digests; name, labels and code/ agree",
            layout.layers.len()
        ));
    } else {
        let image = &wire.container.image;
        let digest = image.digest.as_deref().unwrap_or_default();
        // The provenance names the same manifest, so that the pointer cannot be bent alone.
        if digest != wire.built("manifest_digest") {
            return Err(wrong("container.image.digest is not the manifest that was built", digest));
        }
        let place = format!("{}/{}@{digest}", image.registry, image.repository);
        report.proved.push(format!("image: {place} is the one that was built; a registry has its bytes"));
    }
    let ours = env!("CARGO_PKG_VERSION");
    let theirs = &wire.producer.tt_kernel_version;
    if theirs == ours {
        same_text(
            dir,
            card::FILE,
            &shown(dir, card::render(&wire)?, &wire),
            "it is not the card that the manifest gives",
        )?;
        report.proved.push(format!("{}: every figure is the manifest's", card::FILE));
    } else {
        // Another version words the card in another way: its bytes are proved by the list alone.
        report.proved.push(format!(
            "{}: not computed again, as it is of packager {theirs} and this is {ours}",
            card::FILE
        ));
    }
    evidence(dir, &wire)?;
    report.proved.push("evidence: bill of materials and provenance are about this image and its pins".into());
    Ok(report)
}

/// The card as a push changes it: its commands name where it was pushed, and a tag lists it in the catalogue.
fn shown(dir: &Path, card: String, wire: &Wire) -> String {
    let Ok(found) = fs::read_to_string(dir.join(card::FILE)) else { return card };
    let card = match card::target(&found) {
        Some(repo) if repo != wire.repo() => card::repoint(&card, repo),
        _ => card,
    };
    if card::front_matter(&found).is_ok() && card::is_listed(&found) {
        card::set_listed(&card, true)
    } else {
        card
    }
}

/// The list of digests of a package in which `path` has other bytes.
pub fn sums_with(dir: &Path, path: &str, bytes: &[u8]) -> Result<String> {
    let sums = dir.join(SUMS);
    let text = fs::read_to_string(&sums).at("read", &sums)?;
    let end = format!("  {path}");
    let line = |line: &str| {
        if line.ends_with(&end) { format!("{}{end}\n", files::sha256(bytes)) } else { format!("{line}\n") }
    };
    Ok(text.lines().map(line).collect())
}

/// Writes the list of digests, sorted by path.
pub fn write_sums(dir: &Path) -> Result<()> {
    let text = render_sums(&list(dir)?);
    let path = dir.join(SUMS);
    fs::write(&path, text).at("write", &path)
}

fn render_sums(entries: &BTreeMap<String, String>) -> String {
    entries.iter().map(|(path, digest)| format!("{digest}  {path}\n")).collect()
}

fn list(dir: &Path) -> Result<BTreeMap<String, String>> {
    let mut entries = BTreeMap::new();
    for entry in files::walk(dir)? {
        match entry.class {
            // The Hub's own file, in every repository.
            FileType::File(_) if entry.path == ".gitattributes" => {}
            FileType::File(_) if entry.path != SUMS => {
                entries.insert(entry.path, files::sha256_file(&entry.full)?.0);
            }
            FileType::Link => return Err(wrong(format!("{} is a link", entry.path), "a package holds none")),
            _ => {}
        }
    }
    Ok(entries)
}

fn sums(dir: &Path) -> Result<usize> {
    let path = dir.join(SUMS);
    let text = fs::read_to_string(&path).map_err(|error| wrong(format!("{SUMS} cannot be read"), error))?;
    let stated: BTreeMap<String, String> = text
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(digest, path)| (path.to_owned(), digest.to_owned()))
        .collect();
    let found = list(dir)?;
    let mut differences = Vec::new();
    for (path, digest) in &found {
        match stated.get(path) {
            None => differences.push(format!("{path} is not listed")),
            Some(other) if other != digest => differences.push(format!("{path} has other bytes than listed")),
            Some(_) => {}
        }
    }
    differences.extend(
        stated
            .keys()
            .filter(|path| !found.contains_key(*path))
            .map(|path| format!("{path} is listed and missing")),
    );
    if !differences.is_empty() {
        return Err(wrong(
            format!(
                "{} differ from {SUMS}",
                if differences.len() == 1 { "1 file".into() } else { format!("{} files", differences.len()) }
            ),
            differences.join("; "),
        ));
    }
    if render_sums(&found) != text {
        return Err(wrong(format!("{SUMS} was changed"), "it is not in its written form"));
    }
    Ok(found.len())
}

/// Reads the wire manifest strictly: what this program would write, byte for byte.
pub fn read_wire(dir: &Path) -> Result<Wire> {
    let path = dir.join(wire::FILE);
    let text = fs::read_to_string(&path).at("read", &path)?;
    let wire: Wire = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("{} is not a wire manifest", wire::FILE), error))?;
    if wire.render() == text {
        Ok(wire)
    } else {
        Err(wrong(format!("{} was changed", wire::FILE), "it is not in its written form"))
    }
}

fn same_text(dir: &Path, file: &str, expected: &str, why: &str) -> Result<()> {
    let path = dir.join(file);
    let text = fs::read_to_string(&path).map_err(|error| wrong(format!("{file} cannot be read"), error))?;
    if text == expected {
        return Ok(());
    }
    let line = text
        .lines()
        .zip(expected.lines())
        .position(|(a, b)| a != b)
        .unwrap_or_else(|| text.lines().count().min(expected.lines().count()));
    Err(wrong(format!("{file} line {} disagrees", line + 1), why))
}

/// Both digests of code/. The Hub keeps no modes, so that in what comes from there no file is executable: then the
/// modes are those of the image.
fn code(dir: &Path, wire: &Wire) -> Result<String> {
    let code = dir.join("code");
    let unreadable = |failure| wrong("code/ cannot be read", failure);
    let mut digests = digest::digest(&code).map_err(unreadable)?;
    let mut said = "code/: both digests as stated".to_owned();
    let executable = |entry: &files::Entry| entry.class == FileType::File(true);
    let stated = wire.built("code_tree_sha256");
    if digests.code_tree_sha256 != stated && !files::walk(&code)?.iter().any(executable) {
        match wire.container.built.get("code_in_image").and_then(Value::as_str) {
            Some(place) if dir.join("image").exists() => {
                let (inside, _) = read::files_below(&read::read(&dir.join("image"))?, place, "")?;
                let mode = |path: &str, _| inside.get(path).is_some_and(|found| found.mode & 0o111 != 0);
                digests = digest::digest_as(&code, mode).map_err(unreadable)?;
                said = "code/: both digests as stated, with the image's modes (here no file has any)".into();
            }
            _ => {
                stated.clone_into(&mut digests.code_tree_sha256);
                said =
                    "code/: code_sha256 as stated; the framed digest needs modes, and none are here".into();
            }
        }
    }
    for (key, found) in
        [("code_sha256", &digests.code_sha256), ("code_tree_sha256", &digests.code_tree_sha256)]
    {
        if wire.built(key) != found {
            return Err(wrong(
                format!("code/ does not have the stated {key}"),
                format!("{found} instead of {}", wire.built(key)),
            ));
        }
    }
    Ok(said)
}

fn image(dir: &Path, wire: &Wire, layout: &Layout) -> Result<()> {
    let stated = &wire.container.image;
    let expect = |what: &str, stated: &str, found: &str| {
        if stated == found {
            Ok(())
        } else {
            Err(wrong(format!("{what} disagrees with the image"), format!("{stated} instead of {found}")))
        }
    };
    expect("container.image.tag", &stated.tag, &layout.tag)?;
    let pulled_by = layout.identity.pulled_by(&stated.registry);
    expect("container.image.digest", stated.digest.as_deref().unwrap_or_default(), pulled_by)?;
    expect("built.image_digest", wire.built("image_digest"), &layout.identity.config)?;
    expect("built.manifest_digest", wire.built("manifest_digest"), &layout.identity.manifest)?;
    expect("the tag's digits", stated.tag.rsplit(':').next().unwrap_or_default(), layout.identity.short())?;
    let diff_ids = wire.container.built.get("diff_ids").cloned().unwrap_or_default();
    expect(
        "built.diff_ids",
        &diff_ids.to_string(),
        &serde_json::json!(layout.identity.diff_ids).to_string(),
    )?;
    for (label, value) in labels(wire) {
        expect(
            &format!("label {label}"),
            layout.config["config"]["Labels"][&label].as_str().unwrap_or("nothing"),
            &value,
        )?;
    }
    if let Some(place) = wire.container.built.get("code_in_image").and_then(Value::as_str) {
        code_in_image(dir, layout, place)?;
    }
    Ok(())
}

/// Compares `code/` with what the image holds at `place`, byte for byte.
pub fn code_in_image(dir: &Path, layout: &Layout, place: &str) -> Result<()> {
    let (inside, _) = read::files_below(layout, place, "")?;
    let mut outside = BTreeMap::new();
    for entry in files::walk(&dir.join("code"))? {
        if let FileType::File(_) = entry.class {
            outside.insert(entry.path.clone(), files::sha256_file(&entry.full)?.0);
        }
    }
    for (path, digest) in &outside {
        match inside.get(path) {
            None => {
                return Err(wrong(
                    format!("code/{path} is not in the image"),
                    format!("nothing at {place}/{path}"),
                ));
            }
            Some(found) if found.content != *digest => {
                return Err(wrong(
                    format!("code/{path} differs from the image's {place}/{path}"),
                    "other bytes",
                ));
            }
            Some(_) => {}
        }
    }
    match inside.keys().find(|path| !outside.contains_key(*path)) {
        Some(extra) => Err(wrong(
            format!("the image's {place}/{extra} is not in code/"),
            "the package shows less than the image holds",
        )),
        None => Ok(()),
    }
}

fn evidence(dir: &Path, wire: &Wire) -> Result<()> {
    let json = |file: &str| -> Result<Value> {
        let path = dir.join(file);
        let bytes = fs::read(&path).map_err(|error| wrong(format!("{file} cannot be read"), error))?;
        serde_json::from_slice(&bytes).map_err(|error| wrong(format!("{file} is not JSON"), error))
    };
    let lock =
        Lock::read(dir)?.ok_or_else(|| wrong("manifest.lock is missing", "a package carries its pins"))?;
    let sbom = json(spdx::FILE)?;
    let stated = sbom["packages"][0]["checksums"][0]["checksumValue"].as_str().unwrap_or_default();
    if format!("sha256:{stated}") != wire.built("image_digest") {
        return Err(wrong(format!("{} is about another image", spdx::FILE), stated));
    }
    let statement = json(slsa::FILE)?;
    let parameters = &statement["predicate"]["buildDefinition"]["externalParameters"];
    if statement != slsa::statement(wire, &lock, parameters) {
        return Err(wrong(
            format!("{} disagrees with the manifest or the lock", slsa::FILE),
            "its subjects or inputs are others",
        ));
    }
    Ok(())
}

/// The labels by which consumers find an image and its containers.
pub fn labels(wire: &Wire) -> BTreeMap<String, String> {
    let profiles: Vec<&str> =
        wire.container.serve_profiles.iter().map(|profile| profile.name.as_str()).collect();
    let revision = ["tt_metal/sha", "tt_metal/wheel"]
        .into_iter()
        .map(|key| wire.built(key))
        .find(|text| !text.is_empty());
    let mut labels = BTreeMap::from([
        ("org.tenstorrent.tt-model".to_owned(), wire.name.clone()),
        ("org.tenstorrent.tt-model.repo".to_owned(), wire.repo().to_owned()),
        ("org.tenstorrent.tt-model.weights".to_owned(), wire.weights.repo_id.clone()),
        ("org.tenstorrent.tt-model.arch".to_owned(), wire.arch.clone()),
        ("org.tenstorrent.tt-model.kind".to_owned(), wire.container.kind.clone()),
        ("org.tenstorrent.tt-model.profiles".to_owned(), profiles.join(",")),
    ]);
    if let Some(revision) = revision {
        labels.insert("org.tenstorrent.tt-model.tt-metal".into(), revision.into());
        labels.insert("org.opencontainers.image.revision".into(), revision.into());
    }
    labels
}

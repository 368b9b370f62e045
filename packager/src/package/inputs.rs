// SPDX-License-Identifier: Apache-2.0
//! Everything that decides what a build gives, and one digest over it: if it is the digest of the
//! package that is there already, nothing needs to be built.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::{Options, Report};
use crate::{
    digest::{self, Digests},
    error::{At, Class, Failure, Result},
    evidence::spdx::{self, Component},
    files, git,
    image::{
        build::{Builder, Request, preflight},
        context::{Context, epoch},
        engine::Engine,
    },
    manifest::{
        Loaded,
        model::{Build, TtMetal, WeightsEntry},
        profile,
    },
    pins::{self, ImagePin, Lock},
    stage, verify,
    wire::{Facts, Wire},
};

/// The inputs of a build.
#[derive(Debug)]
pub struct Inputs {
    /// The manifest's `build` section.
    pub build: Build,
    /// The pins, with base images as they are used.
    pub lock: Lock,
    /// What floats, in words.
    pub unpinned: Vec<String>,
    /// What goes to the engine.
    pub context: Context,
    /// Digests of the staged code.
    pub code: Digests,
    /// Digest of the server's sources in the context, if it has any.
    pub server: Option<String>,
    /// Crates of the context's Cargo.lock.
    pub crates: Vec<Component>,
    /// Entries of the allowlist.
    pub shipped: Vec<String>,
    /// What staging left out.
    pub dropped: Vec<String>,
    /// Layers of the final base image.
    pub base_layers: Vec<String>,
    /// Build arguments.
    pub args: BTreeMap<String, String>,
    /// Labels of the image.
    pub labels: BTreeMap<String, String>,
    /// What the provenance states as chosen by the author.
    pub parameters: Value,
    /// The fixed time of everything in the image.
    pub epoch: u64,
    /// Builder that the Dockerfile and the engine allow.
    pub builder: Builder,
    /// When the code was staged.
    pub staged_at: DateTime<Utc>,
    /// Digest over all of it.
    pub digest: String,
}

/// The code as it will ship.
#[derive(Debug)]
pub struct Staged {
    /// Both digests.
    pub digests: Digests,
    /// Entries of the allowlist; those of directories end in "/".
    pub shipped: Vec<String>,
    /// What staging left out.
    pub dropped: Vec<String>,
}

impl Staged {
    /// Copies the code to `code` (which it creates).
    pub fn new(loaded: &Loaded, lock: Option<&Lock>, code: &Path) -> Result<Self> {
        let source = &loaded.manifest.source;
        let dropped = stage::stage(&loaded.manifest, lock, &loaded.dir, code)?;
        let shipped = source.code.iter().chain(source.extra_code.iter().flat_map(|extra| &extra.paths));
        let shipped = shipped.map(|path| {
            if code.join(&path.0).is_dir() {
                format!("{}/", path.0.trim_end_matches('/'))
            } else {
                path.0.clone()
            }
        });
        Ok(Self {
            digests: digest::digest(code)?,
            shipped: shipped.collect(),
            dropped: dropped.iter().map(line).collect(),
        })
    }
}

fn line(dropped: &stage::Dropped) -> String {
    format!("{} ({})", dropped.path, dropped.pattern)
}

impl Inputs {
    /// Stages the code to `code` and gathers the rest. Without an engine the base images are those of the
    /// lock, which is enough to tell that nothing changed.
    pub async fn gather(
        loaded: &Loaded,
        options: &Options,
        engine: Option<&Engine>,
        code: &Path,
    ) -> Result<Self> {
        let manifest = &loaded.manifest;
        let build = manifest.build.clone().ok_or_else(|| {
            let failure =
                Failure::new(Class::Manifest, format!("{} has no build section", loaded.path.display()));
            failure.next("name the Dockerfile and its context under `build`; see `packager help manifest`")
        })?;
        let root = loaded.dir.join(&build.root);
        let (mut lock, mut unpinned) = lock(loaded, options)?;
        let staged_at = Utc::now();
        let Staged { digests, shipped, dropped } = Staged::new(loaded, Some(&lock), code)?;
        let epoch = epoch(&loaded.dir)?;
        let (context, more) = Context::new(&build, &root, code, options.ca.as_deref(), epoch)?;
        let dropped = dropped.into_iter().chain(more.iter().map(line)).collect();

        let (mut base_layers, mut args) = (Vec::new(), build.args.clone());
        for (argument, name) in &build.base_images {
            let wanted = options.base_images.get(argument).cloned();
            let pin = lock
                .base_images
                .get(argument)
                .cloned()
                .filter(|pin| wanted.as_ref().is_none_or(|wanted| *wanted == pin.name));
            let pin = base_image(engine, wanted.as_ref().unwrap_or(name), pin, &mut unpinned).await?;
            if let Some(engine) = engine
                && argument == "BASE_IMAGE"
            {
                let image = engine.docker.inspect_image(&reference(&pin)).await.ok();
                base_layers = image.and_then(|image| image.root_fs?.layers).unwrap_or_default();
            }
            args.insert(argument.clone(), reference(&pin));
            lock.base_images.insert(argument.clone(), pin);
        }
        args.extend(options.args.clone());
        for (name, value) in &args {
            if let Some(what) = crate::secret::find(value.as_bytes())
                .map(|found| found.what)
                .or_else(|| crate::secret::named(name, value))
            {
                let failure = Failure::new(Class::Usage, format!("build argument {name} is {what}"))
                    .why("build arguments stay in the image's history");
                return Err(failure.next("pass secrets as BuildKit secret mounts"));
            }
        }
        let cargo_lock =
            build.context.iter().any(|path| path.0 == "Cargo.lock").then(|| root.join("Cargo.lock"));
        let crates = cargo_lock.map(|path| fs::read_to_string(&path).at("read", &path)).transpose()?;
        let dockerfile = root.join(&build.dockerfile.0);
        let builder =
            engine.map_or(Ok(options.builder), |engine| preflight(engine, &dockerfile, options.builder))?;

        // Labels come from the wire manifest, which does not know the image yet; no label names it.
        let facts = Facts {
            tag: String::new(),
            digest: None,
            tt_metal_version: String::new(),
            revisions: Vec::new(),
            created_at: String::new(),
            built: json!({"repo": manifest.repo, "tt_metal": tt_metal(loaded, &lock)})
                .as_object()
                .cloned()
                .unwrap_or_default(),
        };
        let mut labels = verify::labels(&Wire::new(manifest, facts));
        if let Some(base) = lock.base_images.get("BASE_IMAGE") {
            labels.insert("org.opencontainers.image.base.name".into(), base.name.clone());
            if let Some(digest) = &base.digest {
                labels.insert("org.opencontainers.image.base.digest".into(), digest.clone());
            }
        }
        let parameters =
            json!({"dockerfile": build.dockerfile.0, "target": build.target, "args": args, "epoch": epoch});
        let all = json!({
            "packager": env!("CARGO_PKG_VERSION"), "manifest": files::sha256(&loaded.text), "lock": files::sha256(lock.render()),
            "code": digests.code_tree_sha256, "context": context.digest()?, "parameters": parameters, "labels": labels,
        });
        Ok(Self {
            server: context.part("server")?,
            crates: crates.map(|text| spdx::crates(&text)).unwrap_or_default(),
            shipped,
            digest: files::sha256(all.to_string()),
            code: digests,
            build,
            lock,
            unpinned,
            context,
            dropped,
            base_layers,
            args,
            labels,
            parameters,
            epoch,
            builder,
            staged_at,
        })
    }

    /// The request for the engine.
    pub fn request(&self, options: &Options, tag: &str, from_scratch: bool) -> Request {
        let map = |map: &BTreeMap<String, String>| {
            map.iter().map(|(key, value)| (key.clone(), value.clone())).collect::<HashMap<_, _>>()
        };
        Request {
            dockerfile: self.build.dockerfile.0.clone(),
            target: self.build.target.clone(),
            args: map(&self.args),
            labels: map(&self.labels),
            tag: tag.into(),
            from_scratch,
            builder: self.builder,
            idle: options.idle,
            host_network: options.host_network,
        }
    }
}

/// The lock, or a refusal: a package is pinned unless the author says otherwise.
fn lock(loaded: &Loaded, options: &Options) -> Result<(Lock, Vec<String>)> {
    let refuse = |what: String| {
        let failure = Failure::new(Class::Manifest, what);
        failure.next("run `packager pin`; or build with --allow-unpinned, which the card will show")
    };
    let Some(lock) = Lock::read(&loaded.dir)? else {
        if options.allow_unpinned {
            let weights = std::iter::once(&loaded.manifest.weights)
                .chain(&loaded.manifest.auxiliary_weights)
                .map(WeightsEntry::full);
            let weights = weights.map(|weights| pins::WeightsPin {
                revision: weights.revision.filter(|revision| git::is_commit(revision)),
                repo: weights.repo,
                files: Vec::new(),
            });
            let lock = Lock {
                version: 1,
                weights: weights.collect(),
                wheel: None,
                git: Vec::new(),
                base_images: BTreeMap::new(),
                cargo_lock: None,
                toolchain: None,
                unpinned: Vec::new(),
                unlisted: Vec::new(),
            };
            return Ok((lock, vec!["anything: there was no manifest.lock".into()]));
        }
        return Err(refuse(format!("there is no {} beside {}", pins::FILE, loaded.path.display())));
    };
    let replaced =
        |what: &str| options.base_images.keys().any(|argument| what.starts_with(&format!("{argument} ")));
    let floating: Vec<String> = lock
        .unpinned
        .iter()
        .filter(|miss| !replaced(&miss.what))
        .map(|miss| format!("{}: {}", miss.what, miss.why))
        .collect();
    if !floating.is_empty() && !options.allow_unpinned {
        return Err(refuse(format!("{} does not pin everything", pins::FILE)).why(floating.join("; ")));
    }
    let root = loaded
        .manifest
        .build
        .as_ref()
        .map_or_else(|| loaded.dir.clone(), |build| loaded.dir.join(&build.root));
    if let Some(pinned) = &lock.cargo_lock {
        let (now, _) = files::sha256_file(&root.join("Cargo.lock"))?;
        if now != *pinned {
            return Err(refuse("Cargo.lock is not the one that was pinned".into())
                .why(format!("locked {pinned}, now {now}")));
        }
    }
    Ok((lock, floating))
}

/// A base image as it will be used: by digest where it has one; an image that only this engine has must be
/// the one that was pinned.
async fn base_image(
    engine: Option<&Engine>,
    name: &str,
    pin: Option<ImagePin>,
    unpinned: &mut Vec<String>,
) -> Result<ImagePin> {
    if let Some(pin) = pin.filter(|pin| pin.digest.is_some() || pin.id.is_some()) {
        if let (Some(engine), None, Some(id)) = (engine, &pin.digest, &pin.id) {
            let now = engine.image_pin(&pin.name).await?;
            if now.id.as_ref() != Some(id) {
                let failure = Failure::new(
                    Class::Verify,
                    format!("base image {} is not the one that was pinned", pin.name),
                );
                return Err(failure
                    .why(format!("locked {id}, now {}", now.id.unwrap_or_default()))
                    .next("run `packager pin` and review the difference"));
            }
        }
        return Ok(pin);
    }
    if let Some(engine) = engine
        && let Ok(pin) = engine.image_pin(name).await
    {
        return Ok(pin);
    }
    let why = format!("base image {name}: its digest is not known before it is pulled");
    if !unpinned.contains(&why) {
        unpinned.push(why);
    }
    Ok(ImagePin { name: name.into(), digest: None, id: None })
}

fn reference(pin: &ImagePin) -> String {
    match &pin.digest {
        Some(digest) if !pin.name.contains('@') => format!("{}@{digest}", pin.name),
        _ => pin.name.clone(),
    }
}

/// `built.tt_metal` for each form of the source.
pub fn tt_metal(loaded: &Loaded, lock: &Lock) -> Value {
    let mut value = json!({"sha": null, "describe": null, "dirty": false, "scm_version": "unknown", "mode": "local", "remote": null, "branch": null, "pushed": null});
    match &loaded.manifest.source.tt_metal {
        TtMetal::Path(path) => {
            if let Some((sha, dirty)) = git::describe(&loaded.dir.join(path)) {
                value["sha"] = json!(sha);
                value["dirty"] = json!(dirty);
            }
        }
        TtMetal::Git(source) => {
            value["sha"] = json!(
                lock.commit(source)
                    .or_else(|| git::is_commit(&source.reference).then(|| source.reference.clone()))
            );
            value["scm_version"] = json!("0.0.0.dev0");
            value["mode"] = json!("git");
            value["remote"] = json!(source.repo);
        }
        TtMetal::Wheel(source) => {
            value["scm_version"] =
                json!(source.wheel.split_once("==").map_or("unknown", |(_, version)| version));
            value["mode"] = json!("wheel");
            value["wheel"] = json!(source.wheel);
            value["wheel_sha256"] = json!(lock.wheel.as_ref().map(|wheel| wheel.sha256.clone()));
        }
    }
    value
}

/// The package that is there, if it was made from the same inputs and its blobs are there.
pub fn unchanged(target: &Path, inputs: &Inputs) -> Option<Report> {
    let wire = verify::read_wire(target).ok()?;
    if wire.built("inputs_sha256") != inputs.digest || !target.join(verify::SUMS).is_file() {
        return None;
    }
    let index: Value = serde_json::from_slice(&fs::read(target.join("image/manifest.json")).ok()?).ok()?;
    let layers = index[0]["Layers"].as_array()?.iter().filter_map(Value::as_str);
    let complete =
        layers.chain(index[0]["Config"].as_str()).all(|path| target.join("image").join(path).is_file());
    complete.then(|| Report {
        package: target.to_path_buf(),
        built: false,
        image: wire.container.image.tag.clone(),
        digest: wire.built("image_digest").to_owned(),
        image_bytes: 0,
        own_bytes: 0,
        dropped: inputs.dropped.clone(),
        reproduced: None,
    })
}

/// What `packager plan` shows: what would be built, what is missing, why the identity would change. A
/// manifest without a `build` section gives no inputs, and still has code.
pub fn plan(loaded: &Loaded, inputs: Option<&Inputs>, staged: Option<&Staged>, target: &Path) -> Value {
    let manifest = &loaded.manifest;
    let profiles: Vec<Value> = profile::merged(manifest)
        .iter()
        .map(|p| json!({"name": p.name, "hardware": p.serve.hardware, "mesh": p.serve.mesh_device}))
        .collect();
    let earlier = verify::read_wire(target).ok();
    let mut changes = Vec::new();
    if let (Some(wire), Some(inputs)) = (&earlier, inputs) {
        for (what, old, new) in [
            ("code/", wire.built("code_tree_sha256"), inputs.code.code_tree_sha256.as_str()),
            ("server sources", wire.built("server_sha256"), inputs.server.as_deref().unwrap_or_default()),
            (
                "Cargo.lock",
                wire.built("cargo_lock_sha256"),
                inputs.lock.cargo_lock.as_deref().unwrap_or_default(),
            ),
        ] {
            if old != new {
                changes.push(what.to_owned());
            }
        }
        if changes.is_empty() && wire.built("inputs_sha256") != inputs.digest {
            changes.push(
                "the manifest, the lock, the Dockerfile, another file of the context, or the fixed time"
                    .into(),
            );
        }
    }
    json!({
        "name": manifest.name, "repo": manifest.repo, "kind": manifest.kind.name(), "arch": manifest.arch.name(), "profiles": profiles,
        "tt_metal": manifest.source.tt_metal, "weights": manifest.weights.full().repo,
        "code": inputs.map(|inputs| &inputs.code).or(staged.map(|staged| &staged.digests)),
        "shipped": inputs.map(|inputs| &inputs.shipped).or(staged.map(|staged| &staged.shipped)),
        "dropped": inputs.map(|inputs| &inputs.dropped).or(staged.map(|staged| &staged.dropped)),
        "context_bytes": inputs.map(|inputs| inputs.context.size()), "unpinned": inputs.map(|inputs| &inputs.unpinned),
        "inputs_sha256": inputs.map(|inputs| &inputs.digest), "package_exists": earlier.is_some(), "changed": changes,
    })
}

// SPDX-License-Identifier: Apache-2.0
//! `packager build`: from a checked manifest to `build/<name>/`. Everything is made beside the target
//! and moved there in one step at the end, so that a failed or interrupted build destroys nothing.

mod compare;
pub mod inputs;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use self::inputs::Inputs;
use crate::{
    card,
    error::{At, Class, Failure, Result},
    evidence::{slsa, spdx},
    files,
    image::{
        build::{self as image_build, Builder},
        check,
        engine::{self, Engine},
        stream,
    },
    layout::{self, Identity, archive::Archive, read::Layout},
    manifest::Loaded,
    pins, verify,
    wire::{self, Facts, Wire},
};

/// How to build.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct Options {
    /// Directory that gets `<name>/`.
    pub out: PathBuf,
    /// Build although something floats; the card then says what.
    pub allow_unpinned: bool,
    /// Build a second time from scratch and compare.
    pub twice: bool,
    /// Build although nothing changed.
    pub again: bool,
    /// Which builder of the engine.
    pub builder: Builder,
    /// Build arguments that replace base images.
    pub base_images: BTreeMap<String, String>,
    /// Further build arguments, over those of the manifest.
    pub args: BTreeMap<String, String>,
    /// Certificates for the network of RUN steps.
    pub ca: Option<PathBuf>,
    /// RUN steps use the host's network.
    pub host_network: bool,
    /// Longest silence of the engine.
    pub idle: Duration,
    /// No progress display.
    pub quiet: bool,
}

/// What a build did.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Directory of the package.
    pub package: PathBuf,
    /// False if the inputs were those of the package that was there already.
    pub built: bool,
    /// Name of the image in the engine.
    pub image: String,
    /// Its identity.
    pub digest: String,
    /// Bytes of all uncompressed layers.
    pub image_bytes: u64,
    /// Bytes of those that are not the base image's.
    pub own_bytes: u64,
    /// Names dropped from allowlisted directories.
    pub dropped: Vec<String>,
    /// With `twice`: the second build had the same identity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reproduced: Option<bool>,
}

/// Builds. Ctrl-C ends the engine's work and removes what is left of it.
pub async fn build(loaded: &Loaded, options: &Options, note: &dyn Fn(&str)) -> Result<Report> {
    let run = image_build::unique();
    let tag = format!("packager-build/{}:{run}", loaded.manifest.name);
    let engine = engine::find().await;
    tokio::select! {
        result = steps(loaded, options, engine.as_ref(), &tag, &run, note) => {
            if let Ok(engine) = &engine {
                check::clean(engine, &run, &tag).await;
            }
            result
        }
        _ = tokio::signal::ctrl_c() => {
            if let Ok(engine) = &engine {
                check::clean(engine, &run, &tag).await;
            }
            let failure = Failure::new(Class::Interrupted, "the build was interrupted");
            Err(failure.next("an earlier package is as it was; run the same command to build on from the engine's cache"))
        }
    }
}

async fn steps(
    loaded: &Loaded,
    options: &Options,
    engine: Result<&Engine, &Failure>,
    tag: &str,
    run: &str,
    note: &dyn Fn(&str),
) -> Result<Report> {
    let name = &loaded.manifest.name;
    let target = options.out.join(name);
    fs::create_dir_all(&options.out).at("create", &options.out)?;
    let work = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .tempdir_in(&options.out)
        .at("create a directory in", &options.out)?;
    let package = work.path().join("package");
    let inputs = Inputs::gather(loaded, options, engine.ok(), &package.join("code")).await?;
    if !options.again
        && !options.twice
        && let Some(report) = inputs::unchanged(&target, &inputs)
    {
        return Ok(report);
    }
    for dropped in &inputs.dropped {
        note(&format!("left out: {dropped}"));
    }
    let engine = engine.map_err(Clone::clone)?;
    preflight(engine, &options.out, &inputs, note)?;

    let log = options.out.join(format!("{name}.log"));
    note(&format!("building the image; log: {}", log.display()));
    let request = inputs.request(options, tag, false);
    image_build::build(engine, &inputs.context, &request, &log, options.quiet).await?;
    note("writing the layout");
    let identity = export(engine, tag, &inputs, name, work.path(), &package.join("image")).await?;
    let reproduced = if options.twice {
        note("building again from scratch");
        let request = inputs.request(options, tag, true);
        image_build::build(engine, &inputs.context, &request, &log, options.quiet).await?;
        let second = work.path().join("second");
        let again = export(engine, tag, &inputs, name, work.path(), &second).await?;
        compare::explain(&identity, &package.join("image"), &again, &second)?;
        Some(true)
    } else {
        None
    };

    let image = identity.tag(name);
    let layout = layout::read::read(&package.join("image"))?;
    if let Some(place) = &inputs.build.code_in_image {
        verify::code_in_image(&package, &layout, place)?;
    }
    let is_new = engine.docker.inspect_image(&image).await.is_err();
    check::load(engine, &package.join("image")).await?;
    let checks = run_checks(engine, &inputs, &image, run, note).await;
    if let (Err(_), true) = (&checks, is_new) {
        check::untag(engine, &image).await;
    }
    let checks = checks?;

    let wire = Wire::new(&loaded.manifest, inputs.facts(loaded, &identity, &layout, &checks)?);
    record(&wire, &inputs, &layout, &package)?;
    verify::verify(&package)?;
    replace(&package, &target, &work)?;
    let own: u64 = identity.sizes[identity.base_layers..].iter().sum();
    Ok(Report {
        package: target,
        built: true,
        image,
        digest: identity.config.clone(),
        image_bytes: identity.sizes.iter().sum(),
        own_bytes: own,
        dropped: inputs.dropped,
        reproduced,
    })
}

/// What can be known to fail before anything is sent, in well under a second.
fn preflight(engine: &Engine, out: &Path, inputs: &Inputs, note: &dyn Fn(&str)) -> Result<()> {
    let (oldest, newest) = engine::TESTED_API;
    if image_build::version(&engine.api) < image_build::version(oldest) {
        let failure = Failure::new(Class::Engine, format!("the engine's API {} is too old", engine.api));
        return Err(failure.next(format!("use an engine with API {oldest} or newer")));
    }
    if image_build::version(&engine.api) > image_build::version(newest) {
        note(&format!(
            "note: engine API {} is newer than {newest}, the newest this was tested with",
            engine.api
        ));
    }
    let free = rustix::fs::statvfs(out).map_or(u64::MAX, |stat| stat.f_bavail * stat.f_frsize);
    let needed = inputs.context.size() * 2 + (512 << 20);
    if free < needed {
        let failure =
            Failure::new(Class::Disk, format!("{} has {} MB free", out.display(), free / 1_000_000));
        return Err(failure
            .why(format!("the build needs about {} MB there", needed / 1_000_000))
            .next("free some space, or build elsewhere with --out"));
    }
    Ok(())
}

/// Exports the engine's image, normalises it, writes the layout.
async fn export(
    engine: &Engine,
    tag: &str,
    inputs: &Inputs,
    name: &str,
    work: &Path,
    out: &Path,
) -> Result<Identity> {
    let (base, name, out, epoch) =
        (inputs.base_layers.clone(), name.to_owned(), out.to_path_buf(), inputs.epoch);
    let spool = tempfile::tempdir_in(work).at("create a directory in", work)?;
    stream::consume(engine.docker.export_image(tag), move |source| {
        let image = Archive::unpack(source, spool.path())?.image()?;
        let identity = layout::write::write(&image, &base, &name, epoch, &out)?;
        drop(spool);
        Ok(identity)
    })
    .await
}

async fn run_checks(
    engine: &Engine,
    inputs: &Inputs,
    image: &str,
    run: &str,
    note: &dyn Fn(&str),
) -> Result<Vec<String>> {
    let mut done = Vec::new();
    for command in &inputs.build.check {
        let shown = command.join(" ");
        note(&format!("in the image, as a user it does not know: {shown}"));
        check::run(engine, image, command, run).await?;
        done.push(shown);
    }
    // A layer and the history can both be read by whoever gets the image.
    let history = engine
        .docker
        .image_history(image)
        .await
        .map_err(|error| engine.failed("reading the image's history", &error))?;
    for step in history {
        if let Some(found) = crate::secret::find(step.created_by.as_bytes()) {
            let failure = Failure::new(
                Class::Failure,
                format!("the image's history holds what looks like {}", found.what),
            );
            return Err(failure.next(
                "pass secrets as BuildKit secret mounts, never as build arguments, and revoke this one",
            ));
        }
    }
    Ok(done)
}

/// Writes everything beside code/ and image/.
fn record(wire: &Wire, inputs: &Inputs, layout: &Layout, package: &Path) -> Result<()> {
    let put = |file: &str, text: String| {
        let path = package.join(file);
        fs::write(&path, text).at("write", &path)
    };
    let pretty = |value: &Value| format!("{}\n", serde_json::to_string_pretty(value).expect("plain data"));
    put(wire::FILE, wire.render())?;
    put(card::FILE, card::render(wire)?)?;
    put(pins::FILE, inputs.lock.render())?;
    let (_, status) = layout::read::files_below(layout, "var/lib/dpkg/status.d", "var/lib/dpkg/status")?;
    let mut components = inputs.crates.clone();
    components
        .extend(status.map(|status| spdx::debian(&String::from_utf8_lossy(&status))).unwrap_or_default());
    components.extend(spdx::wheel(&inputs.lock).filter(|_| wire.has_wheel()));
    let created = wire.built("created_at").replace("+00:00", "Z");
    put(spdx::FILE, pretty(&spdx::document(wire, &components, &created)))?;
    put(slsa::FILE, pretty(&slsa::statement(wire, &inputs.lock, &inputs.parameters)))?;
    verify::write_sums(package)
}

/// Puts the finished package in place of an earlier one in a single step.
pub(crate) fn replace(package: &Path, target: &Path, work: &TempDir) -> Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    files::set_mode(package, 0o755)?;
    if !target.exists() {
        return fs::rename(package, target).at("move the package to", target);
    }
    // The earlier package ends up in the working directory, which goes away.
    let exchanged = renameat_with(CWD, package, CWD, target, RenameFlags::EXCHANGE);
    if exchanged.is_ok() {
        return Ok(());
    }
    let old = work.path().join("old");
    fs::rename(target, &old).at("move the earlier package from", target)?;
    fs::rename(package, target)
        .inspect_err(|_| {
            let _ = fs::rename(&old, target);
        })
        .at("move the package to", target)
}

impl Inputs {
    fn facts(
        &self,
        loaded: &Loaded,
        identity: &Identity,
        layout: &Layout,
        checks: &[String],
    ) -> Result<Facts> {
        let tag = identity.tag(&loaded.manifest.name);
        let mut metal = inputs::tt_metal(loaded, &self.lock);
        if let Some(wheel) = metal["wheel"].as_str().map(|wheel| wheel.replace("==", "-")) {
            // A target for hosts without a card does without it, and the card must not claim it.
            metal["in_image"] = json!(layout::read::has_directory(layout, &format!("{wheel}.dist-info"))?);
        }
        let version = metal["scm_version"].as_str().unwrap_or("unknown").to_owned();
        let bases: Map<String, Value> = self
            .lock
            .base_images
            .iter()
            .map(|(argument, pin)| {
                let digest = pin.digest.as_deref().or(pin.id.as_deref()).unwrap_or("not pinned");
                (
                    argument.clone(),
                    json!(if pin.name.contains('@') {
                        pin.name.clone()
                    } else {
                        format!("{}@{digest}", pin.name)
                    }),
                )
            })
            .collect();
        let mut built = Map::new();
        let mut put = |key: &str, value: Value| {
            if !value.is_null() {
                built.insert(key.to_owned(), value);
            }
        };
        put("image", json!(tag));
        put("repo", json!(loaded.manifest.repo));
        put("tt_model_version", json!(env!("CARGO_PKG_VERSION")));
        put("created_at", json!(self.staged_at.format("%Y-%m-%dT%H:%M:%S+00:00").to_string()));
        put("tt_metal", metal);
        put("code_sha256", json!(self.code.code_sha256));
        put("image_digest", json!(identity.config));
        put("manifest_digest", json!(identity.manifest));
        put("diff_ids", json!(identity.diff_ids));
        put("base_layers", json!(identity.base_layers));
        put("code_tree_sha256", json!(self.code.code_tree_sha256));
        put("code_in_image", json!(self.build.code_in_image));
        put("server_sha256", json!(self.server));
        put("cargo_lock_sha256", json!(self.lock.cargo_lock));
        put("toolchain", json!(self.lock.toolchain.as_ref().map(|version| format!("Rust {version}"))));
        put("base_images", Value::Object(bases));
        put("checks", json!(checks));
        put("dropped", json!(self.dropped));
        put("unpinned", json!(self.unpinned));
        put("shipped", json!(self.shipped));
        put("inputs_sha256", json!(self.digest));
        Ok(Facts {
            tag,
            digest: Some(identity.pulled_by(&loaded.manifest.image.registry).to_owned()),
            tt_metal_version: version,
            revisions: self.lock.weights.iter().map(|pin| pin.revision.clone()).collect(),
            created_at: chrono::Utc::now().format("%Y-%m-%dT%H:%M:%S%.6f+00:00").to_string(),
            built,
        })
    }
}

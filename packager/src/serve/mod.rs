// SPDX-License-Identifier: Apache-2.0
//! Running a package as its consumers do: the same container, the same mounts, the same signs of
//! readiness, so that an author sees before publishing what a consumer will see.

mod run;

use std::{
    collections::BTreeMap,
    net::TcpListener,
    path::{Path, PathBuf},
};

use clap::ValueEnum;

pub use self::run::{create, stop, wait};
use crate::{
    error::{At, Class, Failure, Result},
    manifest::{hardware, model::Argument, profile::Merged},
    pins::resolve::hub_cache,
    wire::Wire,
};

/// Where the model computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Device {
    /// A Tenstorrent card, as consumers run it.
    #[default]
    Card,
    /// The host's processor.
    Cpu,
}

/// One composed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Name of the container: `tt-model-<name>-<profile>`.
    pub container: String,
    /// `uid:gid`.
    pub user: String,
    /// Labels, in the order in which they are given.
    pub labels: Vec<(String, String)>,
    /// Numbers of the device nodes.
    pub devices: Vec<u32>,
    /// Host directory → directory in the container.
    pub mounts: Vec<(PathBuf, String)>,
    /// Port, the same on both sides.
    pub port: u16,
    /// Variables, sorted.
    pub env: BTreeMap<String, String>,
    /// Variables passed on from this process by name only.
    pub pass: Vec<String>,
    /// Image.
    pub image: String,
    /// Arguments of the entrypoint.
    pub argv: Vec<String>,
    /// The line that says the server is ready.
    pub ready_line: String,
}

/// What decides a run besides the package.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Profile; the default one if absent.
    pub profile: Option<String>,
    /// Port.
    pub port: u16,
    /// Device.
    pub device: Device,
    /// Device nodes of this host that no container holds, ascending.
    pub free: Vec<u32>,
    /// `uid:gid` for the container.
    pub user: String,
    /// Home of the caches: `~/.cache`.
    pub cache: PathBuf,
    /// Further arguments for the server.
    pub args: Vec<String>,
}

/// The profile of that name, or the default one.
pub fn profile(wire: &Wire, name: Option<&str>) -> Result<Merged> {
    let wanted = name.unwrap_or_else(|| wire.default_profile());
    let all = wire.profiles();
    let names = all.iter().map(|profile| profile.name.clone()).collect::<Vec<_>>().join(", ");
    all.into_iter().find(|profile| profile.name == wanted).ok_or_else(|| {
        Failure::new(Class::Usage, format!("{} has no profile {wanted}", wire.name))
            .next(format!("choose one of {names}"))
    })
}

/// Composes the run, exactly as `tt-model serve` would (format section E.2).
pub fn compose(wire: &Wire, choice: &Choice) -> Result<Run> {
    let profile = profile(wire, choice.profile.as_deref())?;
    let chips = profile.serve.hardware.as_deref().and_then(hardware::chips).unwrap_or(1) as usize;
    let devices = match choice.device {
        Device::Cpu => Vec::new(),
        Device::Card if choice.free.len() >= chips => choice.free[..chips].to_vec(),
        Device::Card => {
            let what = format!(
                "only {} of {chips} Tenstorrent devices are free, and this profile needs {chips}",
                choice.free.len()
            );
            return Err(Failure::new(Class::Failure, what)
                .next("stop what uses them, or serve on the processor with --device cpu"));
        }
    };
    let ids = devices.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let label = |name: &str, value: &str| (format!("org.tenstorrent.tt-model{name}"), value.to_owned());
    let mut env = serve_env(wire, &profile);
    let own = choice.cache.join("tt-model").join(&wire.name);
    let hub = hub_cache();
    let home = std::env::var_os("HF_HOME")
        .filter(|value| !value.is_empty())
        .map_or_else(|| choice.cache.join("huggingface"), PathBuf::from);
    let mut mounts = vec![
        (home.clone(), "/hf".to_owned()),
        (own.join("cache"), "/cache".into()),
        (own.join("weights"), "/weight-cache".into()),
        (own.join("tensors"), "/tensor-cache".into()),
    ];
    let mut set = |name: &str, value: &str| {
        env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
    };
    set("HF_HOME", "/hf");
    set("TT_METAL_CACHE", "/cache");
    set("TT_DIT_CACHE_DIR", "/weight-cache");
    set("TT_CACHE_PATH", "/tensor-cache");
    if !hub.starts_with(&home) {
        mounts.push((hub, "/hf-hub".into()));
        set("HF_HUB_CACHE", "/hf-hub");
    }
    let mut argv = command(wire, choice.port)?;
    for argument in &profile.serve.args {
        match argument {
            Argument::One(word) => argv.push(word.clone()),
            Argument::Many(words) => argv.extend(words.clone()),
        }
    }
    argv.extend(choice.args.clone());
    Ok(Run {
        container: format!("tt-model-{}-{}", wire.name, profile.name),
        user: choice.user.clone(),
        labels: vec![label("", &wire.name), label(".profile", &profile.name), label(".devices", &ids)],
        devices,
        mounts,
        port: choice.port,
        env,
        pass: if std::env::var_os("HF_TOKEN").is_some_and(|token| !token.is_empty()) {
            vec!["HF_TOKEN".into()]
        } else {
            Vec::new()
        },
        image: wire.container.image.tag.clone(),
        argv,
        ready_line: wire.ready_line().to_owned(),
    })
}

/// The launcher's variables: of an http-server only what the author wrote; of a tt-dit-server also the
/// model and the mesh. One chip gets the descriptor of a single chip.
fn serve_env(wire: &Wire, profile: &Merged) -> BTreeMap<String, String> {
    let mut env = profile.serve.env.clone();
    let mesh = profile.serve.mesh_device.clone().unwrap_or_default();
    let mut set = |name: &str, value: String| {
        env.entry(name.to_owned()).or_insert(value);
    };
    if wire.container.kind == "tt-dit-server" {
        set("HF_MODEL", wire.weights.repo_id.clone());
        let name = wire
            .container
            .runtime
            .get("mesh_shape_env")
            .and_then(serde_json::Value::as_str)
            .unwrap_or("FLUX2_MESH_SHAPE");
        if let Some((rows, columns)) = hardware::mesh(&mesh) {
            set(name, format!("{rows}x{columns}"));
        }
        set("MESH_DEVICE", mesh);
    }
    if profile.serve.hardware.as_deref().and_then(hardware::chips) == Some(1) {
        let path =
            "/opt/tt-metal/tt_metal/fabric/mesh_graph_descriptors/p150_mesh_graph_descriptor.textproto";
        set("TT_MESH_GRAPH_DESC_PATH", path.into());
    }
    env
}

fn command(wire: &Wire, port: u16) -> Result<Vec<String>> {
    let port = port.to_string();
    let runtime = &wire.container.runtime;
    match wire.container.kind.as_str() {
        "http-server" => {
            let words = runtime
                .get("command")
                .and_then(serde_json::Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(serde_json::Value::as_str);
            Ok(words
                .map(|word| match word {
                    "{host}" => "0.0.0.0".to_owned(),
                    "{port}" => port.clone(),
                    other => other.to_owned(),
                })
                .collect())
        }
        "tt-dit-server" => {
            let app = runtime.get("app").and_then(serde_json::Value::as_str).unwrap_or_default();
            Ok(["python", "-m", "uvicorn", "--host", "0.0.0.0", "--port", &port, "--lifespan", "on", app]
                .map(str::to_owned)
                .to_vec())
        }
        other => Err(Failure::new(Class::Usage, format!("packages of kind {other} are served by tt-model"))
            .next("tt-model serve <package>")),
    }
}

impl Run {
    /// The `docker run` of it, one word each.
    pub fn docker(&self) -> Vec<String> {
        let mut words: Vec<String> =
            ["docker", "run", "--detach", "--name", &self.container, "--user", &self.user]
                .map(str::to_owned)
                .to_vec();
        let mut push = |flag: &str, value: String| words.extend([flag.to_owned(), value]);
        for (name, value) in &self.labels {
            push("--label", format!("{name}={value}"));
        }
        for id in &self.devices {
            push("--device", format!("/dev/tenstorrent/{id}:/dev/tenstorrent/{id}"));
        }
        if !self.devices.is_empty() {
            push("--ipc", "host".into());
            push("--mount", "type=bind,src=/dev/hugepages-1G,dst=/dev/hugepages-1G".into());
        }
        for (host, inside) in &self.mounts {
            push("--volume", format!("{}:{inside}", host.display()));
        }
        push("--publish", format!("{0}:{0}", self.port));
        for name in &self.pass {
            push("--env", name.clone());
        }
        for (name, value) in &self.env {
            push("--env", format!("{name}={value}"));
        }
        words.push(self.image.clone());
        words.extend(self.argv.clone());
        words
    }

    /// The same as one line for a shell.
    pub fn shell(&self) -> String {
        self.docker().iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
    }
}

fn quote(word: &str) -> String {
    let plain = !word.is_empty()
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&byte));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// The first free port from `from` (20000, as consumers look for it); or the one that was asked for.
pub fn free_port(wanted: Option<u16>, from: u16) -> Result<u16> {
    if let Some(port) = wanted {
        return TcpListener::bind(("0.0.0.0", port)).map(|_| port).map_err(|error| {
            Failure::new(Class::Failure, format!("port {port} cannot be used"))
                .why(error)
                .next("choose another, or leave --port out")
        });
    }
    (from..20_100).find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).ok_or_else(|| {
        Failure::new(Class::Failure, "no port from 20000 to 20099 is free")
            .next("stop a server, or choose another port with --port")
    })
}

/// Numbers of the device nodes of this host.
pub fn nodes() -> Vec<u32> {
    let entries = std::fs::read_dir("/dev/tenstorrent").into_iter().flatten().flatten();
    let mut ids: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    ids
}

/// Makes the host side of the mounts: the engine would make them as root, and the server could not write.
pub fn make_mounts(run: &Run) -> Result<()> {
    for (host, _) in &run.mounts {
        std::fs::create_dir_all(host).at("create", host)?;
    }
    Ok(())
}

/// The directory of caches of this user.
pub fn cache_home() -> PathBuf {
    let home = std::env::var_os("HOME").filter(|value| !value.is_empty()).unwrap_or_else(|| "/".into());
    Path::new(&home).join(".cache")
}

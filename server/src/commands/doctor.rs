// SPDX-License-Identifier: Apache-2.0
//! `doctor`: what a report about this machine needs, as one block to paste. Reads only; no secret is in it.

use std::{
    fmt::Write,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use clap::Args;
use server::{listener, preflight};

use crate::{failure::Failure, stdout::print_line};

/// Where the driver puts its nodes.
const NODES: &str = "/dev/tenstorrent";
/// Bit of the capability that binds huge pages to a NUMA node, in `/proc/self/status`.
const CAP_SYS_NICE: u64 = 1 << 23;
/// Variables that matter here and hold no secret.
const VARIABLES: [&str; 16] = [
    "KLEIN_SNAPSHOT",
    "KLEIN_TEXT_ENCODER",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HOME",
    "USER",
    "TT_METAL_HOME",
    "TT_METAL_RUNTIME_ROOT",
    "TT_METAL_CACHE",
    "TT_METAL_LOGS_PATH",
    "TT_DIT_CACHE_DIR",
    "TT_VISIBLE_DEVICES",
    "TT_MESH_GRAPH_DESC_PATH",
    "ARCH_NAME",
    "MESH_DEVICE",
];

/// Say what this machine has and what `serve` would miss, as one block to paste into a report
#[derive(Args)]
pub struct Doctor {
    #[command(flatten)]
    config: server::config::Config,
}

impl Doctor {
    /// Runs the command. A checkpoint, directory or port that `serve` could not use is a failure.
    pub fn run(&self) -> Result<(), Failure> {
        let mut report = String::from("flux2-server doctor\n");
        let mut line = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(report, "  {name:<14} {value}");
        };
        line("version", env!("CARGO_PKG_VERSION").to_owned());
        line("system", first_line("/proc/version"));
        line("container", container());
        line("user", user());
        line("processor", processor());
        line("memory", memory());
        line("devices", devices());
        line("holders", holders());
        line("hugepages", hugepages());
        line("iommu", iommu());
        line("capabilities", capabilities());
        line("shared memory", locks());
        for name in VARIABLES {
            if let Some(value) = std::env::var_os(name) {
                line("variable", format!("{name}={}", value.display()));
            }
        }
        let checks = [
            ("settings", preflight::settings(&self.config).map(|()| "in range".to_owned())),
            ("directories", preflight::directories().map(|()| "writable".to_owned())),
            (
                "checkpoint",
                preflight::checkpoint(&self.config).map(|path| format!("complete: {}", path.display())),
            ),
            ("port", listener::bind(&self.config).map(|_| format!("{} is free", self.config.port))),
        ];
        let mut first = None;
        for (name, result) in checks {
            match result {
                Ok(good) => line(name, format!("ok, {good}")),
                Err(error) => {
                    line(name, format!("FAULT, {error}"));
                    first.get_or_insert(error);
                }
            }
        }
        print_line!("{}", report.trim_end());
        first.map_or(Ok(()), |error| Err(error.into()))
    }
}

fn first_line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|error| format!("unknown ({error})"));
    text.lines().next().unwrap_or_default().to_owned()
}

fn container() -> String {
    let marks = [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")];
    let kind = marks.iter().find(|(path, _)| Path::new(path).exists()).map(|(_, kind)| *kind);
    let kubernetes = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    format!("{}{}", kind.unwrap_or("none seen"), if kubernetes { ", kubernetes" } else { "" })
}

fn status_field(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))?;
    Some(line.split_whitespace().next().unwrap_or_default().to_owned())
}

fn user() -> String {
    let id = |name| status_field(name).unwrap_or_else(|| "unknown".into());
    format!("uid {}, gid {}", id("Uid"), id("Gid"))
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == name))
            .map(|(_, v)| v.trim())
    };
    let flags: Vec<&str> = field("flags").unwrap_or_default().split_whitespace().collect();
    let seen: Vec<&str> = ["avx2", "fma", "f16c", "avx512f", "avx512_fp16", "avx512_bf16", "amx_bf16"]
        .into_iter()
        .filter(|f| flags.contains(f))
        .collect();
    let usable = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{}, {usable} usable, {}", field("model name").unwrap_or("unknown"), seen.join(" "))
}

fn memory() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let gib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        kib.map_or_else(|| "unknown".into(), |kib| format!("{:.1} GiB", kib / f64::from(1 << 20)))
    };
    format!("{} total, {} available", gib("MemTotal"), gib("MemAvailable"))
}

fn nodes() -> Vec<PathBuf> {
    let entries = fs::read_dir(NODES).into_iter().flatten().flatten();
    let mut nodes: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
        .map(|entry| entry.path())
        .collect();
    nodes.sort();
    nodes
}

fn devices() -> String {
    let nodes = nodes();
    if nodes.is_empty() {
        return format!("none under {NODES}: no card, no driver, or no --device {NODES}");
    }
    let describe = |node: &PathBuf| {
        let access = match fs::OpenOptions::new().read(true).write(true).open(node) {
            Ok(_) => "opens".to_owned(),
            Err(error) => format!("does not open: {error}"),
        };
        let owner = fs::metadata(node).map_or_else(
            |_| String::new(),
            |meta| format!(", owner {}:{}, mode {:o}", meta.uid(), meta.gid(), meta.mode() & 0o7777),
        );
        format!("{} {access}{owner}", node.display())
    };
    nodes.iter().map(describe).collect::<Vec<_>>().join("; ")
}

/// Processes that have a card open, as far as this user may see.
fn holders() -> String {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = process.file_name().to_string_lossy().into_owned();
        if name == std::process::id().to_string() || !name.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        for descriptor in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            if let Ok(target) = fs::read_link(descriptor.path())
                && target.starts_with(NODES)
            {
                let command = first_line(&format!("/proc/{name}/comm"));
                found.push(format!("{} held by pid {name} ({command})", target.display()));
            }
        }
    }
    if found.is_empty() { "none seen".to_owned() } else { found.join("; ") }
}

fn hugepages() -> String {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mounted: Vec<&str> = mounts
        .lines()
        .filter(|line| line.split_whitespace().nth(2) == Some("hugetlbfs"))
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    let count = |size: &str, file: &str| {
        let text = fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-{size}kB/{file}"));
        text.map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned())
    };
    let advice = if mounted.contains(&"/dev/hugepages-1G") {
        ""
    } else {
        "; a card without IOMMU needs --mount type=bind,src=/dev/hugepages-1G,dst=/dev/hugepages-1G"
    };
    format!(
        "1 GiB: {} ({} free), 2 MiB: {} ({} free), mounted at {}{advice}",
        count("1048576", "nr_hugepages"),
        count("1048576", "free_hugepages"),
        count("2048", "nr_hugepages"),
        count("2048", "free_hugepages"),
        if mounted.is_empty() { "none".to_owned() } else { mounted.join(", ") },
    )
}

fn iommu() -> String {
    let groups = fs::read_dir("/sys/kernel/iommu_groups").map_or(0, Iterator::count);
    if groups == 0 { "off".to_owned() } else { format!("on, {groups} groups: huge pages are not needed") }
}

fn capabilities() -> String {
    let mask = status_field("CapEff").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    match mask {
        None => "unknown".to_owned(),
        Some(mask) if mask & CAP_SYS_NICE != 0 => format!("{mask:016x}, has SYS_NICE"),
        Some(mask) => format!("{mask:016x}, no SYS_NICE: huge pages are not bound to the card's NUMA node"),
    }
}

/// Lock files of the driver's user part that this user could not take.
fn locks() -> String {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let foreign: Vec<String> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("TT_UMD_LOCK"))
        .filter(|entry| fs::OpenOptions::new().write(true).open(entry.path()).is_err())
        .map(|entry| entry.path().display().to_string())
        .collect();
    if foreign.is_empty() {
        "no foreign lock files".to_owned()
    } else {
        format!("not writable: {}", foreign.join(", "))
    }
}

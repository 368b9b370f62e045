// SPDX-License-Identifier: Apache-2.0
//! The rules that a schema cannot hold: what must agree with what, and what must exist on disk.

use std::path::Path;

use super::{
    hardware,
    license::{self, one_line},
    model::{Argument, ExtraCode, Kind, Manifest, RelativePath, Root, TtMetal},
    problem::{Problem, nearest},
    profile,
    runtime::{HttpServer, Plugin, TtDitServer, VllmFork, VllmPlugin},
    yaml::Node,
};
use crate::secret;

/// All broken rules. `dir` is the manifest's directory; local paths are looked up from there.
pub fn check(manifest: &Manifest, root: &Node, dir: &Path) -> Vec<Problem> {
    let mut rules = Rules { manifest, root, dir, problems: Vec::new() };
    rules.weights();
    rules.source();
    rules.runtime();
    rules.profiles();
    rules.environment();
    rules.card();
    rules.build();
    rules.problems.sort_by_key(|problem| problem.place);
    rules.problems
}

struct Rules<'a> {
    manifest: &'a Manifest,
    root: &'a Node,
    dir: &'a Path,
    problems: Vec<Problem>,
}

impl Rules<'_> {
    fn report(&mut self, key: &str, expected: &str, found: &str, hint: &str) {
        self.problems.push(Problem::new(self.root.locate(key), key, expected, found).hint(hint));
    }

    fn weights(&mut self) {
        let mut seen = vec![self.manifest.weights.full().repo];
        for (index, entry) in self.manifest.auxiliary_weights.iter().enumerate() {
            let repo = entry.full().repo;
            if seen.contains(&repo) {
                let key = format!("auxiliary_weights[{index}]");
                self.report(
                    &key,
                    "each weights repository once",
                    &format!("{repo} again"),
                    "remove one of the two",
                );
            }
            seen.push(repo);
        }
    }

    fn source(&mut self) {
        let source = &self.manifest.source;
        if source.code.is_empty() && source.extra_code.is_empty() {
            self.report(
                "source.code",
                "at least one path here or in source.extra_code",
                "neither",
                "list the model's files and directories",
            );
        }
        if let TtMetal::Path(path) = &source.tt_metal {
            let tree = self.dir.join(path);
            if !tree.is_dir() {
                self.report(
                    "source.tt_metal",
                    "a directory",
                    &format!("\"{path}\", which does not exist"),
                    "give a tt-metal tree, {repo, ref}, or {wheel}",
                );
            } else if !tree.join("tt_metal/third_party/umd/CMakeLists.txt").is_file() {
                let hint = "run: git submodule update --init --recursive";
                self.report(
                    "source.tt_metal",
                    "a tt-metal tree with its submodules",
                    "no tt_metal/third_party/umd/CMakeLists.txt in it",
                    hint,
                );
            } else {
                self.exist("source.code", &tree, &source.code);
            }
        }
        if let (TtMetal::Wheel(_), false) = (&source.tt_metal, source.code.is_empty()) {
            self.report(
                "source.code",
                "no paths: a wheel has no source tree",
                "paths",
                "move them to source.extra_code with a root",
            );
        }
        for (index, ExtraCode { root, paths }) in source.extra_code.iter().enumerate() {
            let Root::Path(path) = root else { continue };
            let key = format!("source.extra_code[{index}]");
            if self.dir.join(path).is_dir() {
                self.exist(&format!("{key}.paths"), &self.dir.join(path), paths);
            } else {
                self.report(
                    &format!("{key}.root"),
                    "a directory",
                    &format!("\"{path}\", which does not exist"),
                    "paths are relative to the manifest",
                );
            }
        }
    }

    fn exist(&mut self, key: &str, tree: &Path, paths: &[RelativePath]) {
        for (index, RelativePath(path)) in paths.iter().enumerate() {
            if !tree.join(path).exists() {
                let near = nearest_file(&tree.join(path))
                    .map_or(String::new(), |near| format!("did you mean `{near}`?"));
                self.report(
                    &format!("{key}[{index}]"),
                    &format!("a path that exists under {}", tree.display()),
                    &format!("\"{path}\""),
                    &near,
                );
            }
        }
    }

    /// True if a shipped path starts with this path, or holds it.
    fn ships(&self, path: &str) -> bool {
        let source = &self.manifest.source;
        let mut entries = source.code.iter().chain(source.extra_code.iter().flat_map(|extra| &extra.paths));
        entries.any(|RelativePath(entry)| entry == "." || Path::new(path).starts_with(entry))
    }

    /// True if some shipped path begins with this segment.
    fn ships_segment(&self, segment: &str) -> bool {
        let source = &self.manifest.source;
        let mut entries = source.code.iter().chain(source.extra_code.iter().flat_map(|extra| &extra.paths));
        entries.any(|RelativePath(entry)| entry == "." || entry.split('/').next() == Some(segment))
    }

    fn runtime(&mut self) {
        let runtime = serde_json::Value::Object(self.manifest.runtime.clone());
        let lock = match self.manifest.kind {
            Kind::HttpServer => {
                serde_json::from_value(runtime).ok().and_then(|runtime| self.http_server(runtime))
            }
            Kind::TtDitServer => {
                serde_json::from_value(runtime).ok().and_then(|runtime| self.tt_dit_server(runtime))
            }
            Kind::VllmPlugin => {
                serde_json::from_value(runtime).ok().and_then(|runtime| self.vllm_plugin(runtime))
            }
            Kind::VllmFork => {
                serde_json::from_value(runtime).ok().and_then(|runtime| self.vllm_fork(runtime))
            }
        };
        if let Some(RelativePath(lock)) = lock
            && !self.dir.join(&lock).is_file()
        {
            self.report(
                "runtime.lock",
                "a file beside the manifest",
                &format!("\"{lock}\", which does not exist"),
                "",
            );
        }
    }

    fn http_server(&mut self, runtime: HttpServer) -> Option<RelativePath> {
        let words: Vec<&str> = runtime.command.iter().map(|word| word.0.as_str()).collect();
        for (index, word) in words.iter().enumerate() {
            let key = format!("runtime.command[{index}]");
            for name in placeholders(word) {
                if name != "host" && name != "port" {
                    self.report(
                        &key,
                        "no placeholder besides {host} and {port}",
                        &format!("{{{name}}}"),
                        "remove it, or write the value",
                    );
                } else if *word != format!("{{{name}}}") {
                    let hint = format!(
                        "consumers replace whole entries only: write the flag and \"{{{name}}}\" as two entries"
                    );
                    self.report(
                        &key,
                        &format!("{{{name}}} as an entry of its own"),
                        &format!("\"{word}\""),
                        &hint,
                    );
                }
            }
        }
        if !words.iter().any(|word| placeholders(word).any(|name| name == "port")) {
            self.report(
                "runtime.command",
                "the entry \"{port}\"",
                "none",
                "the consumer chooses the port; pass it on to the server",
            );
        }
        let script = words
            .iter()
            .enumerate()
            .find(|(_, word)| Path::new(word).extension().is_some_and(|e| e == "py") && word.contains('/'));
        if let Some((index, script)) = script
            && !self.ships_segment(script.split('/').next().unwrap_or_default())
        {
            self.report(
                &format!("runtime.command[{index}]"),
                "a script inside the shipped code",
                &format!("\"{script}\""),
                "add its directory to source.code or source.extra_code",
            );
        }
        runtime.lock
    }

    fn tt_dit_server(&mut self, runtime: TtDitServer) -> Option<RelativePath> {
        let first = runtime.app.split(['.', ':']).next().unwrap_or_default();
        if !self.ships_segment(first) {
            self.report(
                "runtime.app",
                "a module inside the shipped code",
                &format!("\"{first}\", which no entry of source.code or source.extra_code ships"),
                "add its directory",
            );
        }
        runtime.lock
    }

    fn vllm_plugin(&mut self, runtime: VllmPlugin) -> Option<RelativePath> {
        let vllm = &runtime.vllm;
        let given = [&vllm.version, &vllm.wheel, &vllm.path].into_iter().flatten().count();
        if given != 1 {
            self.report(
                "runtime.vllm",
                "exactly one of version, wheel, path",
                &format!("{given} of them"),
                "",
            );
        }
        let Plugin { path, repo, reference, version } = &runtime.plugin;
        let given = [path, repo, version].into_iter().flatten().count();
        if given != 1 {
            self.report(
                "runtime.plugin",
                "exactly one of path, repo with ref, version",
                &format!("{given} of them"),
                "",
            );
        }
        if repo.is_some() != reference.is_some() {
            self.report("runtime.plugin", "repo and ref together", "one without the other", "");
        }
        if let Some(RelativePath(dir)) = &runtime.extra_models_dir
            && !self.ships(dir)
        {
            self.report(
                "runtime.extra_models_dir",
                "a directory under a shipped path",
                &format!("\"{dir}\""),
                "add it to source.code or source.extra_code",
            );
        }
        runtime.lock
    }

    fn vllm_fork(&mut self, runtime: VllmFork) -> Option<RelativePath> {
        if let Some(RelativePath(dir)) = &runtime.model_dir
            && !self.ships(dir)
        {
            self.report(
                "runtime.model_dir",
                "a directory under a shipped path",
                &format!("\"{dir}\""),
                "add it to source.code or source.extra_code",
            );
        }
        runtime.lock
    }

    fn profiles(&mut self) {
        let profiles = &self.manifest.serve_profiles;
        let names: Vec<&str> = profiles.iter().map(|profile| profile.name.as_str()).collect();
        for (index, name) in names.iter().enumerate() {
            if names[..index].contains(name) {
                self.report(
                    &format!("serve_profiles[{index}].name"),
                    "each profile name once",
                    &format!("`{name}` again"),
                    "",
                );
            }
        }
        match &self.manifest.default_profile {
            None if names.len() > 1 => {
                self.report(
                    "default_profile",
                    &format!("one of {}", names.join(", ")),
                    "nothing, with several profiles",
                    "name the one that runs by default",
                );
            }
            Some(name) if !names.is_empty() && !names.contains(&name.as_str()) => {
                let hint = nearest(name, names.iter().copied())
                    .map_or(String::new(), |near| format!("did you mean `{near}`?"));
                self.report(
                    "default_profile",
                    &format!("one of {}", names.join(", ")),
                    &format!("\"{name}\""),
                    &hint,
                );
            }
            Some(name) if names.is_empty() && name != "default" => {
                self.report(
                    "default_profile",
                    "a declared profile",
                    &format!("\"{name}\", and none is declared"),
                    "remove the key or add serve_profiles",
                );
            }
            _ => {}
        }
        for (index, merged) in profile::merged(self.manifest).iter().enumerate() {
            let own = |field: &str| {
                let declared = profiles.get(index).is_some_and(|profile| {
                    serde_json::to_value(&profile.serve).is_ok_and(|serve| !serve[field].is_null())
                });
                if declared { format!("serve_profiles[{index}].{field}") } else { format!("serve.{field}") }
            };
            let serve = &merged.serve;
            let vllm = self.manifest.kind.is_vllm();
            let required = [
                ("hardware", serve.hardware.is_some(), true),
                ("mesh_device", serve.mesh_device.is_some(), true),
                ("max_num_seqs", serve.max_num_seqs.is_some(), vllm),
                ("block_size", serve.block_size.is_some(), vllm),
            ];
            for (field, given, needed) in required {
                if needed && !given {
                    let found = format!("nothing, and profile `{}` needs it", merged.name);
                    self.report(
                        &own(field),
                        "a value",
                        &found,
                        &format!("set {field} on the profile or under serve"),
                    );
                }
            }
            let chips = serve.hardware.as_deref().and_then(hardware::chips);
            if let (Some(label), None) = (&serve.hardware, chips) {
                let known = hardware::boards().collect::<Vec<_>>().join(", ");
                let hint = match hardware::mesh(label).or_else(|| hardware::mesh(&label.to_uppercase())) {
                    Some(_) => {
                        "this is the name of a mesh or machine: name the boards, such as p300x2, and put this under mesh_device"
                    }
                    None => "write the board's label and a count, such as p150x4",
                };
                self.report(
                    &own("hardware"),
                    &format!("a board ({known}), with a count from 1"),
                    &format!("\"{label}\""),
                    hint,
                );
            }
            let mesh = serve.mesh_device.as_deref().and_then(hardware::mesh);
            if let (Some(name), None) = (&serve.mesh_device, mesh) {
                let known = hardware::meshes().collect::<Vec<_>>();
                let hint = nearest(name, known.iter().copied())
                    .map_or(String::new(), |near| format!("did you mean `{near}`?"));
                self.report(
                    &own("mesh_device"),
                    &format!("one of {}, or \"(rows, columns)\"", known.join(", ")),
                    &format!("\"{name}\""),
                    &hint,
                );
            }
            if let (Some(chips), Some((rows, columns))) = (chips, mesh)
                && rows.checked_mul(columns) != Some(chips)
            {
                let found = format!("a {rows}x{columns} mesh with hardware of {chips}");
                self.report(
                    &own("mesh_device"),
                    &format!("a mesh of {chips} chips"),
                    &found,
                    "make mesh_device and hardware agree",
                );
            }
        }
    }

    fn environment(&mut self) {
        let mut all = vec![("serve".to_owned(), &self.manifest.serve)];
        all.extend(
            self.manifest
                .serve_profiles
                .iter()
                .enumerate()
                .map(|(i, profile)| (format!("serve_profiles[{i}]"), &profile.serve)),
        );
        for (path, serve) in all {
            for (name, value) in &serve.env {
                let key = format!("{path}.env.{name}");
                if name.is_empty() || name.contains(['=', '\0', ' ']) {
                    self.report(&key, "the name of a variable", &format!("\"{name}\""), "");
                }
                self.secret(&key, name, value);
            }
            for (index, argument) in serve.args.iter().enumerate() {
                let words = match argument {
                    Argument::One(word) => std::slice::from_ref(word),
                    Argument::Many(words) => words,
                };
                for word in words {
                    self.secret(&format!("{path}.args[{index}]"), "", word);
                }
            }
        }
    }

    fn secret(&mut self, key: &str, name: &str, value: &str) {
        let what =
            secret::find(value.as_bytes()).map(|found| found.what).or_else(|| secret::named(name, value));
        if let Some(what) = what {
            self.report(
                key,
                "no secrets: everyone can read a manifest",
                what,
                "remove it, and revoke it if it was ever published",
            );
        }
    }

    fn card(&mut self) {
        let Some(license) = self.manifest.card.as_ref().and_then(|card| card.license.as_ref()) else {
            return;
        };
        let id = one_line(&license.id);
        if !license::ids().any(|known| known == id) {
            let near = nearest(&license::slug(&id), license::ids());
            let hint = near.map_or_else(
                || "or write `other` and give license.name".into(),
                |near| {
                    format!("did you mean `{near}`? A licence the Hub does not list is `other` with a name")
                },
            );
            self.report(
                "card.license.id",
                "a licence identifier of the Hub (apache-2.0, mit, …) or other",
                &format!("\"{id}\""),
                &hint,
            );
        }
        if id == "other" && license.name.as_deref().is_none_or(|name| license::slug(name).is_empty()) {
            self.report("card.license.name", "the licence's name, as the id is `other`", "none", "");
        }
    }

    fn build(&mut self) {
        let Some(build) = &self.manifest.build else { return };
        let root = self.dir.join(&build.root);
        if !root.is_dir() {
            self.report(
                "build.root",
                "a directory",
                &format!("\"{}\"", build.root),
                "paths are relative to the manifest",
            );
            return;
        }
        if !root.join(&build.dockerfile.0).is_file() {
            self.report(
                "build.dockerfile",
                "a file",
                &format!("\"{}\", which does not exist", build.dockerfile.0),
                "",
            );
        }
        self.exist("build.context", &root, &build.context);
        for (name, value) in build.args.iter().chain(&build.base_images) {
            let section = if build.args.contains_key(name) { "args" } else { "base_images" };
            self.secret(&format!("build.{section}.{name}"), name, value);
        }
    }
}

/// The `{lower_case}` tokens inside a word.
fn placeholders(word: &str) -> impl Iterator<Item = &str> {
    word.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| name).filter(|name| {
        name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    })
}

/// The entry of a directory whose name is closest to that of a missing path.
fn nearest_file(missing: &Path) -> Option<String> {
    let wanted = missing.file_name()?.to_str()?;
    let names: Vec<String> = missing
        .parent()?
        .read_dir()
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    nearest(wanted, names.iter().map(String::as_str)).map(str::to_owned)
}

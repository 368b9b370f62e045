// SPDX-License-Identifier: Apache-2.0
//! Staging: the allowlisted code, copied to where it is hashed, shipped and sent to the engine.
//!
//! The rules are those of the published format (section C.3): entries keep their relative path, later
//! roots overwrite earlier ones, links are replaced by what they point to, and inside directories some
//! names are dropped. Beyond it, nothing is dropped silently, and what would leak is refused: `.git`,
//! files of secrets, contents that look like tokens, links that leave their tree.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    error::{At, Class, Failure, Result},
    files::{self, FileType},
    git,
    manifest::{
        Manifest,
        model::{RelativePath, Root, TtMetal},
    },
    pins::Lock,
    secret,
};

/// Names dropped inside directory entries at every level; case matters. A leading `*` is a wildcard.
pub const IGNORED: [&str; 14] = [
    "__pycache__",
    "*.pyc",
    ".pytest_cache",
    "*.egg-info",
    ".venv",
    "venv",
    "logs",
    "*.log",
    "*.safetensors",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.bin",
    "*.refpt",
];

/// What staging left out of an allowlisted directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Dropped {
    /// Path below the staged root.
    pub path: String,
    /// The pattern that matched.
    pub pattern: &'static str,
}

/// One file or directory that ships, and where its bytes are.
#[derive(Debug, Clone)]
pub struct Item {
    /// The real file or directory.
    pub source: PathBuf,
    /// Bytes; 0 for a directory.
    pub size: u64,
    /// What it will be: a file (executable or not) or a directory, never a link.
    pub class: FileType,
}

/// Everything that ships, by its path ("/" between components), sorted.
pub type Items = BTreeMap<String, Item>;

/// Copies the manifest's code into `out` (which it creates) and says what it dropped.
pub fn stage(manifest: &Manifest, lock: Option<&Lock>, dir: &Path, out: &Path) -> Result<Vec<Dropped>> {
    fs::create_dir_all(out).at("create", out)?;
    let (mut items, mut dropped) = (Items::new(), Vec::new());
    let source = &manifest.source;
    // Clones live until everything is copied.
    let mut clones = Vec::new();
    let mut git_tree = |git, paths: &[RelativePath]| {
        let clone = git::checkout(git, lock.and_then(|lock| lock.commit(git)), paths)?;
        clones.push(clone);
        Ok::<_, Failure>(clones[clones.len() - 1].path().to_path_buf())
    };
    let mut trees = Vec::new();
    if !source.code.is_empty() {
        match &source.tt_metal {
            TtMetal::Path(path) => trees.push((dir.join(path), &source.code)),
            TtMetal::Git(git) => trees.push((git_tree(git, &source.code)?, &source.code)),
            TtMetal::Wheel(_) => {}
        }
    }
    for extra in &source.extra_code {
        match &extra.root {
            Root::Path(path) => trees.push((dir.join(path), &extra.paths)),
            Root::Git(git) => trees.push((git_tree(git, &extra.paths)?, &extra.paths)),
        }
    }
    for (tree, paths) in trees {
        collect(&tree, paths, &mut items, &mut dropped)?;
    }
    for (path, item) in &items {
        copy(item, &out.join(path))?;
    }
    Ok(dropped)
}

/// Copies one item to its place, with a mode that says no more than executable or not.
fn copy(item: &Item, to: &Path) -> Result<()> {
    let executable = match item.class {
        FileType::Directory => {
            fs::create_dir_all(to).at("create", to)?;
            return files::set_mode(to, 0o755);
        }
        FileType::File(executable) => executable,
        FileType::Link => unreachable!("links were replaced by what they point to"),
    };
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).at("create", parent)?;
    }
    fs::copy(&item.source, to).at("write", to)?;
    files::set_mode(to, if executable { 0o755 } else { 0o644 })
}

/// Adds what entries of one tree ship to `items`, by the rules above; nothing is copied yet.
pub fn collect(
    root: &Path,
    entries: &[RelativePath],
    items: &mut Items,
    dropped: &mut Vec<Dropped>,
) -> Result<()> {
    let root = root.canonicalize().at("resolve", root)?;
    let mut collector = Collector { root: &root, items, dropped, open: Vec::new() };
    for RelativePath(entry) in entries {
        let entry =
            entry.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/");
        if !root.join(&entry).exists() {
            let failure =
                Failure::new(Class::Manifest, format!("{entry} does not exist under {}", root.display()));
            return Err(failure.next("correct the path in source.code or source.extra_code"));
        }
        collector.entry(&entry)?;
    }
    let is_file = |path: &str| items.get(path).is_some_and(|item| item.class != FileType::Directory);
    let parents = items.keys().flat_map(|path| path.match_indices('/').map(|(at, _)| &path[..at]));
    if let Some(path) = parents.into_iter().find(|parent| is_file(parent)) {
        return Err(Failure::new(
            Class::Manifest,
            format!("{path} is a file in one source and a directory in another"),
        ));
    }
    dropped.sort_by(|a, b| a.path.cmp(&b.path));
    dropped.dedup();
    Ok(())
}

struct Collector<'a> {
    root: &'a Path,
    items: &'a mut Items,
    dropped: &'a mut Vec<Dropped>,
    /// Real paths of the directories being read: a link back to one of them is a loop.
    open: Vec<PathBuf>,
}

fn refuse(path: &str, why: &str) -> Failure {
    Failure::new(Class::Failure, format!("{path} must not be published")).why(why)
}

impl Collector<'_> {
    /// `path` is "" for the root itself.
    fn entry(&mut self, path: &str) -> Result<()> {
        let from = self.root.join(path);
        let name = path.rsplit('/').next().unwrap_or_default();
        if path.split('/').any(|part| part == ".git") {
            let next = "name the directories that ship instead of their parent, or remove it";
            return Err(refuse(path, "a .git directory or file can hold credentials").next(next));
        }
        if secret::file_name(name) {
            return Err(
                refuse(path, "files of this name hold secrets").next("move it out of the shipped code")
            );
        }
        let real = from.canonicalize().map_err(|error| {
            Failure::io("follow the link", &from, &error).next("remove the link, or create what it points to")
        })?;
        let Ok(below) = real.strip_prefix(self.root) else {
            let why = format!("it is a link to {}, outside of {}", real.display(), self.root.display());
            return Err(refuse(path, &why).next("copy the file into the tree"));
        };
        if below.components().any(|part| part.as_os_str() == ".git") {
            return Err(refuse(path, "it is a link into a .git directory").next("remove the link"));
        }
        let meta = real.metadata().at("inspect", &real)?;
        if meta.is_dir() {
            return self.directory(path, real);
        }
        if !meta.is_file() {
            return Err(refuse(path, "it is neither a file nor a directory").next("remove it"));
        }
        if let Some(found) = secret::find_in(&real).at("read", &real)? {
            let why = format!("line {} looks like {}", found.line, found.what);
            return Err(
                refuse(path, &why).next("remove it from the file, and revoke it if it was ever published")
            );
        }
        let class = FileType::File(files::executable(&meta));
        self.items.insert(path.into(), Item { source: real, size: meta.len(), class });
        Ok(())
    }

    fn directory(&mut self, path: &str, real: PathBuf) -> Result<()> {
        if self.open.contains(&real) {
            return Err(refuse(path, "it is a link to a directory that holds it").next("remove the link"));
        }
        if !path.is_empty() {
            self.items
                .insert(path.into(), Item { source: real.clone(), size: 0, class: FileType::Directory });
        }
        let mut names = Vec::new();
        for item in fs::read_dir(&real).at("list", &real)? {
            let item = item.at("list", &real)?.path();
            names.push(files::relative(&real, &item)?);
        }
        self.open.push(real);
        for name in names {
            let child = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
            match IGNORED.into_iter().find(|pattern| matches(pattern, &name)) {
                Some(pattern) => self.dropped.push(Dropped { path: child, pattern }),
                None => self.entry(&child)?,
            }
        }
        self.open.pop();
        Ok(())
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_prefix('*').map_or(name == pattern, |end| name.ends_with(end))
}

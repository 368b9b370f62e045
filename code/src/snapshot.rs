// SPDX-License-Identifier: Apache-2.0
//! Where the checkpoint is: named by the caller, by `KLEIN_SNAPSHOT`, or the pinned revision in the Hugging Face cache.
//!
//! Nothing is downloaded here, and nothing in the cache is written or locked.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    spec::ModelSpec,
};

/// Names the directory of a checkpoint.
pub const SNAPSHOT_VARIABLE: &str = "KLEIN_SNAPSHOT";
/// Names another directory for the text encoder.
pub const TEXT_ENCODER_VARIABLE: &str = "KLEIN_TEXT_ENCODER";

/// Variables that name a cache and where it lies below, in huggingface_hub's order of precedence.
const CACHES: [(&str, &str); 5] = [
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
    ("HOME", ".cache/huggingface/hub"),
];
/// The file that makes a directory a diffusers checkpoint.
const MARKER: &str = "model_index.json";

/// The checkpoint's directory: `explicit`, else `KLEIN_SNAPSHOT`, else the pinned revision of the published model `spec` in
/// the first Hugging Face cache that has it.
///
/// # Errors
/// [`Error::Checkpoint`] with every place looked at and what to do.
pub fn find(spec: &ModelSpec, explicit: Option<&Path>) -> Result<PathBuf> {
    find_with(spec, explicit, |name| std::env::var_os(name))
}

/// The name of the model in `checkpoint`, whose transformer has the width `width`: the published model's name if the width
/// is its own; else the repository's, if the directory is a snapshot in a Hugging Face cache; else the directory's.
pub fn model_name(checkpoint: &Path, spec: &ModelSpec, width: usize) -> String {
    if width == spec.published_width {
        return spec.name.to_owned();
    }
    let directory = checkpoint.canonicalize().unwrap_or_else(|_| checkpoint.to_path_buf());
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let snapshots = directory.parent().filter(|parent| parent.ends_with("snapshots"));
    let repository = snapshots
        .and_then(Path::parent)
        .and_then(name)
        .and_then(|folder| Some(folder.strip_prefix("models--")?.rsplit("--").next()?.to_owned()));
    repository.or_else(|| name(&directory)).unwrap_or_else(|| spec.name.to_owned())
}

/// The text encoder's directory that `KLEIN_TEXT_ENCODER` names: a full Qwen3-4B checkpoint, or the `text_encoder` of a
/// diffusers checkpoint, whose root may be named too.
pub fn text_encoder_override() -> Option<PathBuf> {
    text_encoder_override_with(|name| std::env::var_os(name))
}

/// [`find`] with an environment of the caller's.
pub fn find_with(
    spec: &ModelSpec,
    explicit: Option<&Path>,
    environment: impl Fn(&str) -> Option<OsString>,
) -> Result<PathBuf> {
    let variable = |name: &str| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let named = explicit
        .map(|path| (path.to_path_buf(), "the checkpoint asked for"))
        .or_else(|| variable(SNAPSHOT_VARIABLE).map(|path| (path, SNAPSHOT_VARIABLE)));
    if let Some((path, who)) = named {
        if path.join(MARKER).is_file() {
            return Ok(path);
        }
        let fault = if path.is_dir() { "has no model_index.json" } else { "is not a directory" };
        let what = format!("{fault}, but is {who}; name the root of a checkpoint in diffusers layout");
        return Err(Error::checkpoint(path, what));
    }

    let ModelSpec { repository, revision, .. } = spec;
    let snapshot = snapshot_in_cache(spec);
    let mut looked = Vec::new();
    for (name, below) in CACHES {
        let Some(base) = variable(name) else { continue };
        let path = base.join(below).join(&snapshot);
        if path.join(MARKER).is_file() {
            return Ok(path);
        }
        let incomplete = if path.is_dir() { ", incomplete" } else { "" };
        looked.push(format!("{} ({name}{incomplete})", path.display()));
    }
    let looked = if looked.is_empty() {
        format!("no cache is named by {}", CACHES.map(|(name, _)| name).join(", "))
    } else {
        format!("looked at {}", looked.join(", "))
    };
    Err(Error::checkpoint(
        *repository,
        format!(
            "revision {revision} is not on this computer; {looked}; download it with `hf download {repository} \
             --revision {revision}`, or name a checkpoint with {SNAPSHOT_VARIABLE}"
        ),
    ))
}

/// [`text_encoder_override`] with an environment of the caller's.
pub fn text_encoder_override_with(environment: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = PathBuf::from(environment(TEXT_ENCODER_VARIABLE).filter(|value| !value.is_empty())?);
    Some(inside(path))
}

/// `text_encoder/` of the checkpoint, or what is given in its place: a text-encoder directory or a checkpoint that holds one.
pub fn text_encoder_directory(checkpoint: &Path, given: Option<&Path>) -> PathBuf {
    given.map_or_else(|| checkpoint.join("text_encoder"), |given| inside(given.to_path_buf()))
}

fn inside(given: PathBuf) -> PathBuf {
    let inside = given.join("text_encoder");
    if inside.is_dir() { inside } else { given }
}

/// `models--owner--name/snapshots/revision`, as huggingface_hub lays out its cache.
fn snapshot_in_cache(spec: &ModelSpec) -> PathBuf {
    [&format!("models--{}", spec.repository.replace('/', "--")), "snapshots", spec.revision].iter().collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::spec::{DEV, KLEIN};

    fn environment(values: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> + use<> {
        let values: Vec<(String, OsString)> =
            values.iter().map(|(name, path)| ((*name).to_string(), path.as_os_str().to_owned())).collect();
        move |name| values.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }

    fn checkpoint_at(path: &Path) -> PathBuf {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join(MARKER), "{}").unwrap();
        path.to_path_buf()
    }

    #[test]
    fn the_callers_path_wins_over_the_variable_and_the_variable_over_the_caches() {
        let root = TempDir::new().unwrap();
        let [explicit, named, home] = ["explicit", "named", "home"].map(|name| root.path().join(name));
        let cached = checkpoint_at(&home.join(".cache/huggingface/hub").join(snapshot_in_cache(&KLEIN)));
        let (explicit, named) = (checkpoint_at(&explicit), checkpoint_at(&named));
        let both = environment(&[(SNAPSHOT_VARIABLE, &named), ("HOME", &home)]);
        assert_eq!(find_with(&KLEIN, Some(&explicit), &both).unwrap(), explicit);
        assert_eq!(find_with(&KLEIN, None, &both).unwrap(), named);
        assert_eq!(find_with(&KLEIN, None, environment(&[("HOME", &home)])).unwrap(), cached);
        // A variable set to nothing is not set.
        let empty = environment(&[(SNAPSHOT_VARIABLE, Path::new("")), ("HOME", &home)]);
        assert_eq!(find_with(&KLEIN, None, empty).unwrap(), cached);
    }

    #[test]
    fn caches_are_searched_in_the_hubs_order() {
        let root = TempDir::new().unwrap();
        let roots = CACHES.map(|(name, _)| root.path().join(name));
        let all: Vec<(&str, &Path)> =
            CACHES.iter().map(|(name, _)| *name).zip(roots.iter().map(PathBuf::as_path)).collect();
        for (i, (name, below)) in CACHES.into_iter().enumerate().rev() {
            let cached = checkpoint_at(&roots[i].join(below).join(snapshot_in_cache(&KLEIN)));
            assert_eq!(find_with(&KLEIN, None, environment(&all)).unwrap(), cached, "{name}");
        }
    }

    #[test]
    fn what_was_looked_at_and_what_to_do_is_said() {
        let root = TempDir::new().unwrap();
        let unfinished = root.path().join("hub").join(snapshot_in_cache(&KLEIN));
        fs::create_dir_all(&unfinished).unwrap();
        let paths = environment(&[("HF_HOME", root.path()), ("HOME", Path::new("/nonexistent"))]);
        let message = find_with(&KLEIN, None, paths).unwrap_err().to_string();
        for wanted in [
            &format!("{} (HF_HOME, incomplete)", unfinished.display()),
            "/nonexistent/.cache/huggingface/hub/models--black-forest-labs--FLUX.2-klein-4B/snapshots/",
            "(HOME)",
            "hf download black-forest-labs/FLUX.2-klein-4B",
            SNAPSHOT_VARIABLE,
        ] {
            assert!(message.contains(wanted), "{wanted} in {message}");
        }
        let message = find_with(&KLEIN, None, |_| None).unwrap_err().to_string();
        assert!(message.contains("no cache is named by HF_HUB_CACHE, "), "{message}");
    }

    #[test]
    fn a_named_place_without_a_checkpoint_is_an_error_and_not_a_reason_to_search_on() {
        let root = TempDir::new().unwrap();
        let message = find_with(&KLEIN, Some(root.path()), |_| None).unwrap_err().to_string();
        assert!(message.contains("has no model_index.json, but is the checkpoint asked for"), "{message}");
        let absent = root.path().join("absent");
        let message =
            find_with(&KLEIN, None, environment(&[(SNAPSHOT_VARIABLE, &absent)])).unwrap_err().to_string();
        assert!(message.contains("is not a directory, but is KLEIN_SNAPSHOT"), "{message}");
    }

    #[test]
    fn each_published_model_has_its_own_place_in_the_cache() {
        let root = TempDir::new().unwrap();
        let cached = checkpoint_at(&root.path().join("hub").join(snapshot_in_cache(&DEV)));
        let paths = environment(&[("HF_HOME", root.path())]);
        assert_eq!(super::find_with(&DEV, None, &paths).unwrap(), cached);
        let message = super::find_with(&KLEIN, None, &paths).unwrap_err().to_string();
        assert!(message.contains("FLUX.2-klein-4B"), "{message}");
    }

    #[test]
    fn a_model_is_named_by_its_shape_its_repository_or_its_directory() {
        let snapshot =
            Path::new("/hf/hub/models--org--small-model/snapshots/536649d019c820df341c4108125d96a5c8fa06e9");
        assert_eq!(model_name(snapshot, &KLEIN, 3072), "FLUX.2-klein-4B");
        assert_eq!(model_name(snapshot, &DEV, 6144), "FLUX.2-dev");
        assert_eq!(model_name(snapshot, &KLEIN, 96), "small-model");
        assert_eq!(model_name(Path::new("/weights/tiny"), &DEV, 64), "tiny");
        assert_eq!(model_name(Path::new("/"), &DEV, 64), "FLUX.2-dev");
    }

    #[test]
    fn the_text_encoder_may_be_named_by_its_directory_or_by_a_checkpoint_root() {
        let root = TempDir::new().unwrap();
        let named = || text_encoder_override_with(environment(&[(TEXT_ENCODER_VARIABLE, root.path())]));
        assert_eq!(named(), Some(root.path().to_path_buf()));
        fs::create_dir(root.path().join("text_encoder")).unwrap();
        assert_eq!(named(), Some(root.path().join("text_encoder")));
        assert_eq!(text_encoder_override_with(|_| None), None);
    }
}

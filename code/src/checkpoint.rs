// SPDX-License-Identifier: Apache-2.0
//! One component of a checkpoint in diffusers layout: `config.json` and safetensors files, one or sharded.
//!
//! Tensors are views of the mapped files. Every one must be asked for or knowingly ignored, so that a checkpoint of
//! another model is noticed at load and not in the picture.

mod file;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU8, Ordering},
};

use file::Mapped;
use rayon::prelude::*;
use safetensors::Dtype;
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    error::{Error, Result},
    weight::{DType, Storage, Weight},
};

/// Names listed in a message before the rest is counted.
const NAMES_SHOWN: usize = 5;
/// Longest JSON file that is read. The index of klein's text encoder has 33 KB.
const MAX_JSON_BYTES: u64 = 16 << 20;

const UNSEEN: u8 = 0;
const IGNORED: u8 = 1;
const USED: u8 = 2;

/// One directory of a checkpoint: `transformer`, `text_encoder` or `vae`.
pub struct Component {
    directory: PathBuf,
    files: Vec<(PathBuf, Mapped)>,
    tensors: BTreeMap<String, Entry>,
}

struct Entry {
    /// Index into `Component::files`.
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// From the start of the file.
    offset: usize,
    state: AtomicU8,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Component {
    /// Opens `<stem>.safetensors`, or the shards of `<stem>.safetensors.index.json`; `stem` is `model` for a transformers
    /// model and `diffusion_pytorch_model` for a diffusers one.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the file and what is wrong: missing, half-downloaded, cut short, inconsistent.
    pub fn open(directory: &Path, stem: &str) -> Result<Self> {
        Self::open_needed(directory, stem, |_| true)
    }

    /// As [`Component::open`]; shards in which no tensor is `needed` are not opened and may be absent.
    ///
    /// # Errors
    /// As [`Component::open`].
    pub fn open_needed(directory: &Path, stem: &str, needed: impl Fn(&str) -> bool) -> Result<Self> {
        if !directory.is_dir() {
            return Err(Error::checkpoint(
                directory,
                "no such directory; a checkpoint has one for each component",
            ));
        }
        let single = directory.join(format!("{stem}.safetensors"));
        let index = directory.join(format!("{stem}.safetensors.index.json"));
        let (paths, listed) = match (index.exists(), single.exists()) {
            (true, true) => {
                return Err(Error::checkpoint(
                    directory,
                    format!(
                        "holds both {stem}.safetensors and {stem}.safetensors.index.json; remove the one not meant"
                    ),
                ));
            }
            (true, false) => read_index(&index, needed)?,
            (false, true) => (vec![single], BTreeMap::new()),
            (false, false) => {
                return Err(missing(directory, &[format!("{stem}.safetensors (or its index.json)")]));
            }
        };

        let mut files: Vec<(PathBuf, Mapped)> = Vec::with_capacity(paths.len());
        let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
        for path in paths {
            let mapped = Mapped::open(&path)?;
            for (name, info) in mapped.metadata.tensors() {
                let entry = Entry {
                    file: files.len(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    offset: mapped.data_start + info.data_offsets.0,
                    state: AtomicU8::new(UNSEEN),
                };
                if let Some(other) = tensors.get(&name) {
                    let other = files[other.file].0.display();
                    return Err(Error::checkpoint(path, format!("tensor {name} is also in {other}")));
                }
                tensors.insert(name, entry);
            }
            files.push((path, mapped));
        }

        for (name, shard) in &listed {
            let found = tensors.get(name).map(|entry| files[entry.file].0.as_path());
            if found.and_then(Path::file_name) != Some(shard.as_ref()) {
                let found = found.map_or("in no shard".into(), |path| format!("in {}", path.display()));
                return Err(Error::checkpoint(
                    index,
                    format!("lists tensor {name} in {shard}, but it is {found}"),
                ));
            }
        }
        Ok(Self { directory: directory.to_path_buf(), files, tensors })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// `config.json` as `T`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the field that is missing or of another type.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T> {
        read_json(&self.directory.join("config.json"))
    }

    /// Bytes of the tensors that are `needed`.
    pub fn bytes(&self, needed: impl Fn(&str) -> bool) -> u64 {
        let size = |entry: &Entry| {
            let float = float_type(entry.dtype).map_or(0, DType::size);
            (entry.shape.iter().product::<usize>() * float) as u64
        };
        self.tensors.iter().filter(|(name, _)| needed(name)).map(|(_, entry)| size(entry)).sum()
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor `name`, which must have exactly `shape`, and marks it as used.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it is missing (with the nearest name there is), of another shape, or neither F32 nor BF16.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let Some(entry) = self.tensors.get(name) else {
            let nearest = self.tensors.keys().min_by_key(|key| strsim::levenshtein(key, name));
            let hint =
                nearest.map_or("it holds none".into(), |nearest| format!("the nearest name is {nearest}"));
            return Err(Error::checkpoint(&self.directory, format!("tensor {name} is missing; {hint}")));
        };
        let (path, mapped) = &self.files[entry.file];
        if entry.shape != shape {
            return Err(Error::checkpoint(
                path,
                format!("tensor {name} has shape {:?}, wanted {shape:?} by config.json", entry.shape),
            ));
        }
        let dtype = float_type(entry.dtype).ok_or_else(|| {
            Error::checkpoint(path, format!("tensor {name} is {:?}, wanted BF16 or F32", entry.dtype))
        })?;
        entry.state.store(USED, Ordering::Relaxed);
        Ok(Weight::new(name, Storage::Mapped(mapped.map.clone()), entry.offset, dtype, shape))
    }

    /// Marks tensors as knowingly unused: layers past the last one needed, counters.
    pub fn ignore(&self, unneeded: impl Fn(&str) -> bool) {
        for entry in self.tensors.iter().filter(|(name, _)| unneeded(name)).map(|(_, entry)| entry) {
            entry.state.fetch_max(IGNORED, Ordering::Relaxed);
        }
    }

    /// Checks that every tensor was used or ignored.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the first few names and how many there are.
    pub fn finish(&self) -> Result<()> {
        let state = |entry: &Entry| entry.state.load(Ordering::Relaxed);
        let unseen: Vec<&str> =
            self.tensors.iter().filter(|(_, e)| state(e) == UNSEEN).map(|(name, _)| name.as_str()).collect();
        if unseen.is_empty() {
            return Ok(());
        }
        Err(Error::checkpoint(
            &self.directory,
            format!(
                "{} that this model has no use for: {}; is it a checkpoint of another model?",
                count(unseen.len(), "tensor"),
                some_of(&unseen)
            ),
        ))
    }

    /// The first used tensor (by name) that holds NaN or infinity, with its file. Reads every used weight: for after a
    /// run went wrong.
    pub fn first_non_finite(&self) -> Option<(String, PathBuf)> {
        let used: Vec<_> =
            self.tensors.iter().filter(|(_, entry)| entry.state.load(Ordering::Relaxed) == USED).collect();
        used.into_par_iter()
            .find_first(|(_, entry)| !self.all_finite(entry))
            .map(|(name, entry)| (name.clone(), self.files[entry.file].0.clone()))
    }

    fn all_finite(&self, entry: &Entry) -> bool {
        let Some(dtype) = float_type(entry.dtype) else { return true };
        let length = entry.shape.iter().product::<usize>() * dtype.size();
        let bytes = &self.files[entry.file].1.map[entry.offset..entry.offset + length];
        match dtype {
            DType::F32 => bytes.as_chunks().0.par_iter().all(|b| f32::from_le_bytes(*b).is_finite()),
            DType::Bf16 => bytes.as_chunks().0.par_iter().all(|b| half::bf16::from_le_bytes(*b).is_finite()),
        }
    }
}

fn float_type(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::Bf16),
        _ => None,
    }
}

/// Paths of the needed shards of an index, each once and in order, and where it lists each tensor of theirs.
fn read_index(
    path: &Path,
    needed: impl Fn(&str) -> bool,
) -> Result<(Vec<PathBuf>, BTreeMap<String, String>)> {
    let Index { mut weight_map } = read_json(path)?;
    let directory = path.parent().unwrap_or(Path::new(""));
    let shards: BTreeSet<String> =
        weight_map.iter().filter(|(name, _)| needed(name)).map(|(_, shard)| shard.clone()).collect();
    weight_map.retain(|_, shard| shards.contains(shard));
    if let Some(shard) = shards.iter().find(|shard| Path::new(shard).file_name() != Some(shard.as_ref())) {
        return Err(Error::checkpoint(
            path,
            format!("names shard {shard:?}, wanted a file name without a directory"),
        ));
    }
    let absent: Vec<String> =
        shards.iter().filter(|s| !directory.join(s.as_str()).exists()).map(ToString::to_string).collect();
    if !absent.is_empty() {
        return Err(missing(directory, &absent));
    }
    Ok((shards.into_iter().map(|shard| directory.join(shard)).collect(), weight_map))
}

/// A JSON file as `T`.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    if !path.exists() {
        let directory = path.parent().unwrap_or(Path::new(""));
        return Err(missing(
            directory,
            &[path.file_name().unwrap_or_default().to_string_lossy().into_owned()],
        ));
    }
    let length = fs::metadata(path).map_err(io)?.len();
    if length > MAX_JSON_BYTES {
        return Err(Error::checkpoint(
            path,
            format!("has {length} bytes, at most {MAX_JSON_BYTES} are read"),
        ));
    }
    let bytes = fs::read(path).map_err(io)?;
    let mut deserializer = serde_json::Deserializer::from_slice(&bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let field = error.path().to_string();
        let place = if field == "." { String::new() } else { format!("{field}: ") };
        Error::checkpoint(path, format!("{place}{}", error.inner()))
    })?;
    deserializer.end().map_err(|error| Error::checkpoint(path, error.to_string()))?;
    Ok(value)
}

/// The error for absent files, which says so if a download was left half done.
pub(crate) fn missing(directory: &Path, files: &[String]) -> Error {
    let half = unfinished_downloads(directory);
    let advice = match half.first() {
        Some(first) => format!(
            "the download is not finished ({} like {}); run it again",
            count(half.len(), "partial file"),
            first.display()
        ),
        None => "download the checkpoint again".into(),
    };
    Error::checkpoint(directory, format!("{} missing; {advice}", some_of(files)))
}

/// `.incomplete` files that huggingface_hub leaves: beside the file, in `blobs/` of the cache, or in `.cache/` of a local
/// directory.
fn unfinished_downloads(directory: &Path) -> Vec<PathBuf> {
    let mut places = vec![directory.to_path_buf()];
    for (ancestor, component) in directory.ancestors().skip(1).zip(directory.ancestors()).take(3) {
        places.push(ancestor.join("blobs"));
        places.extend(
            component.file_name().map(|name| ancestor.join(".cache/huggingface/download").join(name)),
        );
    }
    let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "incomplete"))
        .collect();
    found.sort();
    found
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn some_of<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_SHOWN).map(AsRef::as_ref).collect();
    let rest = names.len() - shown.len();
    if rest == 0 { shown.join(", ") } else { format!("{} and {rest} more", shown.join(", ")) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use safetensors::tensor::{TensorView, serialize};
    use tempfile::TempDir;

    use super::*;

    fn write(directory: &Path, file: &str, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap())
        });
        fs::write(directory.join(file), serialize(views, None).unwrap()).unwrap();
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// `a` [2, 2] in one shard, `b` [1] and an integer in the other.
    fn sharded() -> TempDir {
        let directory = TempDir::new().unwrap();
        write(
            directory.path(),
            "m-1.safetensors",
            &[("a", Dtype::F32, &[2, 2], &floats(&[1.0, 2.0, 3.0, 4.0]))],
        );
        write(
            directory.path(),
            "m-2.safetensors",
            &[("b", Dtype::BF16, &[1], &[0x80, 0x3F]), ("count", Dtype::I64, &[], &[0; 8])],
        );
        let index = r#"{"metadata":{},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors","count":"m-2.safetensors"}}"#;
        fs::write(directory.path().join("model.safetensors.index.json"), index).unwrap();
        directory
    }

    fn open(directory: &TempDir) -> Result<Component> {
        Component::open(directory.path(), "model")
    }

    fn refusal<T>(result: Result<T>) -> String {
        result.err().expect("a refusal").to_string()
    }

    #[test]
    fn shards_are_read_as_one() {
        let directory = sharded();
        let component = open(&directory).unwrap();
        assert_eq!(component.weight("a", &[2, 2]).unwrap().to_f32(), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(component.weight("b", &[1]).unwrap().to_f32(), [1.0]);
        assert!(component.contains("count") && !component.contains("c"));
        component.ignore(|name| name == "count");
        component.finish().unwrap();
        assert_eq!(component.path(), directory.path());
    }

    #[test]
    fn a_weight_keeps_its_file_mapped() {
        let directory = sharded();
        let weight = open(&directory).unwrap().weight("a", &[2, 2]).unwrap();
        drop(directory);
        assert_eq!(weight.row_f32(1), [3.0, 4.0]);
    }

    #[test]
    fn tensors_nobody_asked_for_are_named() {
        let directory = sharded();
        let component = open(&directory).unwrap();
        component.weight("b", &[1]).unwrap();
        let message = refusal(component.finish());
        assert!(message.contains("2 tensors that this model has no use for: a, count;"), "{message}");
    }

    #[test]
    fn wrong_tensors_are_refused_by_name() {
        let directory = sharded();
        let component = open(&directory).unwrap();
        let message = refusal(component.weight("counts", &[]));
        assert!(message.ends_with("tensor counts is missing; the nearest name is count"), "{message}");
        let message = refusal(component.weight("a", &[4]));
        assert!(message.contains("m-1.safetensors: tensor a has shape [2, 2], wanted [4]"), "{message}");
        let message = refusal(component.weight("count", &[]));
        assert!(message.ends_with("tensor count is I64, wanted BF16 or F32"), "{message}");
    }

    #[test]
    fn an_absent_shard_and_a_half_download_are_named() {
        let directory = sharded();
        fs::rename(
            directory.path().join("m-2.safetensors"),
            directory.path().join("m-2.safetensors.1a2b.incomplete"),
        )
        .unwrap();
        let message = refusal(open(&directory));
        assert!(
            message.contains("m-2.safetensors missing; the download is not finished (1 partial file"),
            "{message}"
        );
        fs::remove_file(directory.path().join("m-2.safetensors.1a2b.incomplete")).unwrap();
        let message = refusal(open(&directory));
        assert!(message.ends_with("m-2.safetensors missing; download the checkpoint again"), "{message}");
    }

    #[test]
    fn a_partial_blob_of_the_hub_cache_is_found() {
        let cache = TempDir::new().unwrap();
        let component = cache.path().join("snapshots/0123/vae");
        fs::create_dir_all(&component).unwrap();
        fs::create_dir(cache.path().join("blobs")).unwrap();
        fs::write(cache.path().join("blobs/abc.incomplete"), "").unwrap();
        let message = refusal(Component::open(&component, "model"));
        assert!(message.contains("the download is not finished"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn links_into_blobs_work_and_dangling_ones_are_missing_files() {
        let directory = TempDir::new().unwrap();
        fs::create_dir_all(directory.path().join("snapshots/0123/vae")).unwrap();
        write(directory.path(), "blob", &[("b", Dtype::BF16, &[1], &[0x80, 0x3F])]);
        let component = directory.path().join("snapshots/0123/vae");
        std::os::unix::fs::symlink("../../../blob", component.join("model.safetensors")).unwrap();
        assert!(Component::open(&component, "model").unwrap().contains("b"));
        fs::remove_file(directory.path().join("blob")).unwrap();
        assert!(refusal(Component::open(&component, "model")).contains("model.safetensors"));
    }

    #[test]
    fn an_index_that_lies_is_refused() {
        let directory = sharded();
        let index = directory.path().join("model.safetensors.index.json");
        let lists = |map: &str| fs::write(&index, format!(r#"{{"weight_map":{map}}}"#)).unwrap();
        lists(r#"{"a":"m-1.safetensors","b":"m-1.safetensors"}"#);
        assert!(
            refusal(open(&directory)).ends_with("lists tensor b in m-1.safetensors, but it is in no shard")
        );
        lists(r#"{"a":"m-2.safetensors","b":"m-1.safetensors"}"#);
        assert!(refusal(open(&directory)).contains("lists tensor a in m-2.safetensors, but it is in "));
        lists(r#"{"a":"../m-1.safetensors"}"#);
        assert!(refusal(open(&directory)).contains("wanted a file name without a directory"));
        lists(r#"["a"]"#);
        assert!(refusal(open(&directory)).contains("weight_map: invalid type: sequence"));
        fs::write(&index, "{}").unwrap();
        assert!(refusal(open(&directory)).contains("missing field `weight_map`"));
    }

    #[test]
    fn a_tensor_in_two_shards_is_refused() {
        let directory = sharded();
        write(directory.path(), "m-2.safetensors", &[("a", Dtype::BF16, &[1], &[0; 2])]);
        assert!(refusal(open(&directory)).contains("tensor a is also in"));
    }

    #[test]
    fn one_file_beside_an_index_is_ambiguous() {
        let directory = sharded();
        write(directory.path(), "model.safetensors", &[("a", Dtype::BF16, &[1], &[0; 2])]);
        assert!(refusal(open(&directory)).contains("holds both"));
    }

    #[test]
    fn a_file_cut_short_is_refused_with_both_lengths() {
        let directory = sharded();
        let shard = directory.path().join("m-1.safetensors");
        let whole = fs::metadata(&shard).unwrap().len();
        fs::File::options().write(true).open(&shard).unwrap().set_len(whole - 4).unwrap();
        let message = refusal(open(&directory));
        assert!(
            message.contains(&format!("the header describes {whole} bytes, the file has {}", whole - 4)),
            "{message}"
        );
        fs::write(&shard, "").unwrap();
        assert!(refusal(open(&directory)).contains("has 0 bytes"));
    }

    #[test]
    fn a_config_names_the_field_at_fault() {
        #[derive(Deserialize, Debug)]
        #[allow(dead_code)]
        struct Config {
            layers: usize,
        }
        let directory = sharded();
        let component = open(&directory).unwrap();
        assert!(refusal(component.config::<Config>()).contains("config.json missing"));
        for (json, wanted) in [
            (r#"{"layers":"two"}"#, "config.json: layers: invalid type: string \"two\", expected usize"),
            (r#"{"layer":2}"#, "config.json: missing field `layers`"),
            (r#"{"layers":"#, "config.json: layers: EOF while parsing"),
            (r#"{"layers":2}]"#, "config.json: trailing characters"),
        ] {
            fs::write(directory.path().join("config.json"), json).unwrap();
            let message = refusal(component.config::<Config>());
            assert!(message.contains(wanted), "{message}");
        }
        fs::write(directory.path().join("config.json"), r#"{"layers":2,"more":0}"#).unwrap();
        assert_eq!(component.config::<Config>().unwrap().layers, 2);
    }

    #[test]
    fn the_weight_that_is_not_finite_is_found_among_those_used() {
        let directory = TempDir::new().unwrap();
        write(
            directory.path(),
            "model.safetensors",
            &[
                ("a", Dtype::F32, &[2], &floats(&[1.0, 2.0])),
                ("b", Dtype::F32, &[2], &floats(&[1.0, f32::NAN])),
                ("c", Dtype::BF16, &[1], &[0x80, 0x7F]),
            ],
        );
        let component = open(&directory).unwrap();
        component.weight("a", &[2]).unwrap();
        assert_eq!(component.first_non_finite(), None);
        component.weight("c", &[1]).unwrap();
        assert_eq!(component.first_non_finite().unwrap().0, "c");
        component.weight("b", &[2]).unwrap();
        let path = directory.path().join("model.safetensors");
        assert_eq!(component.first_non_finite(), Some(("b".into(), path)));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Runs the binary in a directory of its own.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use image::RgbImage;
use serde_json::Value;
use tempfile::TempDir;

/// Weights that are random and small: a picture takes half a second.
pub fn tiny() -> PathBuf {
    root().join("code/tests/fixtures/tiny")
}

/// Weights that are trained and small: a picture takes seconds.
pub fn mini() -> PathBuf {
    root().join("examples/klein-mini/checkpoint")
}

/// The repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// How a command ended.
#[derive(Debug)]
pub struct End {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl End {
    pub fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// The command failed with `code` and one sentence that holds all `words`.
    #[track_caller]
    pub fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        assert_eq!(self.stderr.lines().filter(|line| line.starts_with("error")).count(), 1, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
    }

    #[track_caller]
    pub fn succeeded(&self) -> &Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        self.succeeded();
        assert_eq!(self.stderr, "", "--json is quiet");
        assert_eq!(self.stdout.lines().count(), 1, "{self:?}");
        serde_json::from_str(&self.stdout).expect("one JSON object")
    }
}

/// A directory to work in.
pub struct Place {
    directory: TempDir,
}

impl Place {
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a directory") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), bytes).expect("a file");
        name.to_owned()
    }

    pub fn save(&self, name: &str, image: &RgbImage) -> String {
        image.save(self.path(name)).expect("an image file");
        name.to_owned()
    }

    /// Names of what is here, sorted.
    pub fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.path()).expect("the directory");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    /// The binary, in this directory, without the settings of whoever runs the tests.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("flux2-server"));
        command.args(arguments).current_dir(self.directory.path()).stdin(Stdio::null());
        for name in ["KLEIN_SNAPSHOT", "KLEIN_TEXT_ENCODER", "HF_HUB_CACHE", "HF_HOME"] {
            command.env_remove(name);
        }
        command.env("HOME", self.directory.path());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> End {
        End::of(&self.command(arguments).output().expect("the binary runs"))
    }

    /// `generate` with a checkpoint; small sizes allowed.
    pub fn generate_with(&self, checkpoint: &Path, arguments: &[&str]) -> End {
        let checkpoint = checkpoint.to_str().expect("UTF-8");
        self.run(&[&["generate", "--allow-small", "--checkpoint", checkpoint], arguments].concat())
    }

    /// `generate` with the tiny checkpoint at 64×64, or whatever `arguments` ask for.
    pub fn generate(&self, arguments: &[&str]) -> End {
        let sized = arguments.iter().any(|argument| argument.starts_with("--width"));
        let size: &[&str] = if sized { &[] } else { &["--width=64", "--height=64"] };
        self.generate_with(&tiny(), &[size, arguments].concat())
    }

    pub fn pixels(&self, name: &str) -> RgbImage {
        image::open(self.path(name)).expect("an image").into_rgb8()
    }

    /// Text chunks of a PNG file.
    pub fn metadata(&self, name: &str) -> BTreeMap<String, String> {
        let file = std::io::BufReader::new(fs::File::open(self.path(name)).expect("the picture"));
        let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
        reader.finish().expect("a whole PNG");
        let info = reader.info();
        let utf8 =
            info.utf8_text.iter().map(|chunk| (chunk.keyword.clone(), chunk.get_text().expect("text")));
        let latin1 =
            info.uncompressed_latin1_text.iter().map(|chunk| (chunk.keyword.clone(), chunk.text.clone()));
        utf8.chain(latin1).collect()
    }
}

/// The integer formula of code/tests/scripts/dump_goldens.py: a picture that any language can make.
pub fn test_image(width: u32, height: u32, k: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        let r = (x * 7 * k + y * 3) % 256;
        let g = ((x * x + y * y * k) / 5) % 256;
        let b = ((x / 8 + y / 8) % 2) * 200 + (x * y * k) % 56;
        image::Rgb([r, g, b].map(|value| u8::try_from(value).expect("a byte")))
    })
}

/// A copy of the tiny checkpoint that a test may break.
pub fn tiny_copy(place: &Place) -> PathBuf {
    let to = place.path("checkpoint");
    copy_tree(&tiny(), &to);
    to
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

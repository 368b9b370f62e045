// SPDX-License-Identifier: Apache-2.0
//! A real engine with a real base image for the tests: `scripts/engine.sh` uses the one that answers and
//! starts a private one otherwise; `scripts/base-image.sh` makes the base from Debian's packages.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::LazyLock,
};

use crate::support::{fixtures, repository};

/// `DOCKER_HOST` of the engine.
pub static ENGINE: LazyLock<String> = LazyLock::new(|| {
    let host = script("engine.sh", &["start"], None);
    script("base-image.sh", &["runtime"], Some(&host));
    host
});

/// Makes the base of builder stages: Debian with a C compiler and this host's Rust.
pub fn builder() {
    script("base-image.sh", &["builder"], Some(&ENGINE));
}

fn script(name: &str, arguments: &[&str], host: Option<&str>) -> String {
    let mut command = Command::new(repository().join("scripts").join(name));
    command.args(arguments).stderr(Stdio::inherit());
    if let Some(host) = host {
        command.env("DOCKER_HOST", host);
    }
    let output = command.output().expect("the script starts");
    assert!(
        output.status.success(),
        "scripts/{name} failed: these tests need root on Debian or Ubuntu, or a running Docker engine"
    );
    String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
}

/// The Docker CLI on the tests' engine.
pub fn docker(arguments: &[&str]) -> Output {
    Command::new("docker")
        .env("DOCKER_HOST", &*ENGINE)
        .args(arguments)
        .output()
        .expect("the docker client is installed with the engine")
}

/// What it prints.
pub fn docker_text(arguments: &[&str]) -> String {
    let output = docker(arguments);
    assert!(output.status.success(), "docker {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
}

/// A copy of the small package in a directory of its own, under a name that no other test uses.
pub struct Small {
    dir: tempfile::TempDir,
    /// Name of the package.
    pub name: String,
}

impl Small {
    pub fn new(name: &str) -> Self {
        let dir = tempfile::tempdir().expect("dir");
        copy(&fixtures().join("small-package"), dir.path());
        let small = Self { dir, name: format!("test-{name}") };
        small.edit("manifest.yaml", "name: small\n", &format!("name: {}\n", small.name));
        small
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// The package's directory.
    pub fn package(&self) -> PathBuf {
        self.path("build").join(&self.name)
    }

    pub fn edit(&self, file: &str, from: &str, to: &str) {
        let path = self.path(file);
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(text.contains(from), "{file} has no {from}");
        std::fs::write(path, text.replace(from, to)).expect("written");
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_packager"));
        command
            .current_dir(self.dir.path())
            .env("DOCKER_HOST", &*ENGINE)
            .env("SOURCE_DATE_EPOCH", "1700000000")
            .env("HOME", self.path("home"));
        command.env_remove("HF_HOME").env_remove("HF_HUB_CACHE").env_remove("HF_TOKEN");
        command
    }

    /// Runs the program.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().expect("the program starts")
    }

    /// Runs it and expects success; what it printed on stdout.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "packager {arguments:?}: {}{}",
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout)
        );
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Runs it and expects this exit code; what it said.
    pub fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            output.status.code(),
            Some(code),
            "packager {arguments:?}: {said}{}",
            String::from_utf8_lossy(&output.stdout)
        );
        said
    }

    /// Pinned and built.
    pub fn built(name: &str) -> Self {
        let small = Self::new(name);
        small.ok(&["pin", "--offline"]);
        small.ok(&["build"]);
        small
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let images = docker(&["images", "-q", &format!("tt-model/{}", self.name)]);
        for id in String::from_utf8_lossy(&images.stdout).lines() {
            docker(&["rmi", "-f", id]);
        }
    }
}

fn copy(from: &Path, to: &Path) {
    let status =
        Command::new("cp").arg("-a").arg(format!("{}/.", from.display())).arg(to).status().expect("cp");
    assert!(status.success());
}

// SPDX-License-Identifier: Apache-2.0
//! A real registry for the tests: Debian's docker-registry on loopback, with or without htpasswd.

use std::{
    fs::{self, File},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    consumer::{free_port, succeed},
    support::repository,
};

/// Installs it once.
static INSTALLED: LazyLock<()> = LazyLock::new(|| {
    let status = Command::new(repository().join("scripts/registry.sh")).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "scripts/registry.sh failed: these tests need docker-registry and htpasswd, or root on Debian or Ubuntu"
    );
});

/// A registry that ends with the test.
pub struct Registry {
    dir: TempDir,
    child: Child,
    /// Its port.
    pub port: String,
}

impl Registry {
    /// Anyone may push.
    pub fn open() -> Self {
        Self::start("127.0.0.1", None)
    }

    /// On every address of this host.
    pub fn on_all_addresses() -> Self {
        Self::start("0.0.0.0", None)
    }

    /// One user may.
    pub fn with_password(user: &str, password: &str) -> Self {
        Self::start("127.0.0.1", Some((user, password)))
    }

    fn start(host: &str, user: Option<(&str, &str)>) -> Self {
        LazyLock::force(&INSTALLED);
        let dir = tempfile::tempdir().expect("dir");
        let at = |name: &str| dir.path().join(name).display().to_string();
        let port = free_port();
        let mut config = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: \"{host}:{port}\"}}\n",
            at("data")
        );
        if let Some((user, password)) = user {
            let line = succeed(Command::new("htpasswd").args(["-nbB", user, password]));
            fs::write(at("users"), format!("{line}\n")).expect("written");
            config.push_str(&["auth: {htpasswd: {realm: test, path: ", &at("users"), "}}\n"].concat());
        }
        fs::write(at("config.yml"), config).expect("written");
        let log = File::create(at("log")).expect("a log");
        let child = Command::new("docker-registry")
            .args(["serve", &at("config.yml")])
            .stdout(log.try_clone().expect("the log"))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .expect("docker-registry starts");
        let registry = Self { dir, child, port };
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", registry.port.parse().expect("a port"))).is_err() {
            assert!(started.elapsed() < Duration::from_mins(1), "no registry: {}", registry.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        registry
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// What it logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Lines of the access log with a request that begins so.
    pub fn asked(&self, request: &str) -> usize {
        self.log().lines().filter(|line| line.contains(&format!("\"{request}"))).count()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

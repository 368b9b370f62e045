// SPDX-License-Identifier: Apache-2.0
//! `packager push --registry` against a real registry: Debian's docker-registry. What it cannot be made to do wrong is
//! in `registry_faults.rs`.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use packager::{files, verify};
use serde_json::{Value, json};

use crate::{
    consumer::{curl, succeed},
    engine::{ENGINE, Small, docker, docker_text},
    registry_server::Registry,
};

const OCI: &str = "Accept: application/vnd.oci.image.manifest.v1+json";
const PASSWORD: &str = "a-passw0rd-that-is-shown-nowhere";

/// Path → digest of all that a package holds.
fn content(dir: &Path) -> BTreeMap<String, String> {
    let entries = files::walk(dir).expect("walk").into_iter().filter(|entry| entry.full.is_file());
    entries.map(|entry| (entry.path, files::sha256_file(&entry.full).expect("read").0)).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn push(small: &Small, target: &str, more: &[&str]) -> Value {
    let package = small.package();
    let arguments = [&["push", text(&package), "--registry", target, "--json"], more].concat();
    serde_json::from_str(&small.ok(&arguments)).expect("JSON")
}

#[test]
fn case_19_an_image_is_pushed_by_digest_read_back_and_pulled_by_what_the_package_says() {
    let (small, registry) = (Small::built("push"), Registry::open());
    let (package, place) = (small.package(), format!("{}/org/small", registry.address()));
    let before = content(&package);
    let wire = verify::read_wire(&package).expect("wire");
    let (id, manifest) = (wire.built("image_digest").to_owned(), wire.built("manifest_digest").to_owned());

    // A dry run lists all of it with sizes, sends nothing and changes nothing.
    let dry = push(&small, &place, &["--dry-run"]);
    assert_eq!((&dry["pushed"], &dry["package_updated"]), (&json!(false), &json!(false)));
    let sizes: u64 =
        dry["blobs"].as_array().expect("blobs").iter().map(|blob| blob["size"].as_u64().expect("size")).sum();
    assert!(sizes > 1_000_000 && dry["bytes_sent"] == sizes, "{dry}");
    assert_eq!((registry.asked("POST"), registry.asked("PUT"), registry.asked("PATCH")), (0, 0, 0));
    assert_eq!(content(&package), before);

    let pushed = push(&small, &place, &[]);
    for key in ["pushed", "read_back", "package_updated"] {
        assert_eq!(pushed[key], true, "{pushed}");
    }
    assert_eq!(pushed["bytes_sent"], sizes);
    assert_eq!(pushed["image"], format!("{place}:{}", &id["sha256:".len()..][..12]).as_str());
    assert_eq!(pushed["pinned"], format!("{place}@{manifest}").as_str());
    assert_eq!(pushed["replaces"], Value::Null);
    // Read back: the manifest by its digest, and every blob, after they were sent.
    assert!(registry.asked(&format!("GET /v2/org/small/manifests/{manifest}")) >= 1, "{}", registry.log());
    for blob in pushed["blobs"].as_array().expect("blobs") {
        let digest = blob["digest"].as_str().expect("digest");
        assert_eq!(registry.asked(&format!("GET /v2/org/small/blobs/{digest}")), 1, "{digest}");
    }

    // The registry serves the layout's own bytes.
    let served =
        curl(&["-H", OCI, &format!("http://{place}/manifests/{manifest}").replace("/org", "/v2/org")]);
    let blob = package.join("image/blobs/sha256").join(manifest.trim_start_matches("sha256:"));
    assert_eq!(served, fs::read_to_string(blob).expect("the manifest"));

    // The package points at it, agrees with itself, and is as it was otherwise.
    let image = verify::read_wire(&package).expect("wire").container.image;
    assert_eq!(image.registry, format!("{}/org", registry.address()));
    assert_eq!((image.repository.as_str(), image.digest.as_deref()), ("small", Some(manifest.as_str())));
    assert_eq!(image.tag, wire.container.image.tag);
    small.ok(&["verify", text(&package)]);
    let card = fs::read_to_string(package.join("README.md")).expect("the card");
    assert!(card.contains(&format!("{place}@{manifest}")) && card.contains(&id), "{card}");
    let changed: Vec<String> = content(&package)
        .into_iter()
        .filter(|(path, digest)| before.get(path) != Some(digest))
        .map(|(path, _)| path)
        .collect();
    assert_eq!(changed, ["README.md", "SHA256SUMS", "tt_kernel_manifest.json"]);
    crate::wire::read_strictly(&package.join("tt_kernel_manifest.json"));

    // A second push sends nothing and changes nothing.
    let (asked, now) = (registry.asked("POST"), content(&package));
    let second = push(&small, &place, &[]);
    assert_eq!((&second["bytes_sent"], &second["package_updated"]), (&json!(0), &json!(false)));
    assert_eq!((registry.asked("POST"), content(&package)), (asked, now));

    // An engine and skopeo get the image that was built.
    docker(&["rmi", "-f", &image.tag]);
    docker_text(&["pull", &format!("{place}@{manifest}")]);
    assert_eq!(docker_text(&["inspect", "-f", "{{.Id}}", &format!("{place}@{manifest}")]), id);
    docker(&["rmi", "-f", &id]);
    succeed(Command::new(crate::support::repository().join("scripts/check-evidence.sh")).arg("--install"));
    let tagged = format!("docker://{}", pushed["image"].as_str().expect("a name"));
    let digest = succeed(Command::new("skopeo").args([
        "inspect",
        "--tls-verify=false",
        "--format",
        "{{.Digest}}",
        &tagged,
    ]));
    assert_eq!(digest, manifest);

    // Without its image/ the package says where to get it.
    let dropped = push(&small, &place, &["--drop-image"]);
    assert_eq!((&dropped["bytes_sent"], &dropped["package_updated"]), (&json!(0), &json!(true)));
    assert!(!package.join("image").exists());
    assert!(small.ok(&["verify", text(&package)]).contains(&format!("{place}@{manifest}")));
    let said = small.fails(4, &["serve", text(&package), "--device", "cpu"]);
    let next = said.lines().find_map(|line| line.split_once("next: ")).expect("what to do").1;
    succeed(Command::new("sh").args(["-ec", next]).env("DOCKER_HOST", &*ENGINE));
    small.ok(&["serve", text(&package), "--device", "cpu"]);
    small.ok(&["stop", text(&package)]);
    assert!(small.fails(2, &["push", text(&package), "--registry", &place]).contains("no image/ to push"));
    docker(&["rmi", "-f", &id]);
}

#[test]
fn case_13_who_may_not_push_is_told_before_a_byte_is_sent() {
    let (small, registry) = (Small::built("login"), Registry::with_password("ann", PASSWORD));
    let (package, place) = (small.package(), format!("{}/org/small:stable", registry.address()));
    let before = content(&package);
    let run = |config: &Path, arguments: &[&str]| {
        let path = format!("{}:{}", small.path("bin").display(), std::env::var("PATH").expect("PATH"));
        let output = small
            .command()
            .env("DOCKER_CONFIG", config)
            .env("PATH", path)
            .args([&["push", text(&package), "--registry", &place], arguments].concat())
            .output()
            .expect("the program starts");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!said.contains(PASSWORD), "the password is shown: {said}");
        (output.status.code().expect("a code"), said)
    };
    let config = |name: &str, value: Value| {
        let dir = small.path(name);
        fs::create_dir_all(&dir).expect("dir");
        fs::write(dir.join("config.json"), value.to_string()).expect("written");
        dir
    };
    let auth = |user: &str, password: &str| {
        let line = format!("printf %s '{user}:{password}' | base64 -w 0");
        json!({"auths": {registry.address(): {"auth": succeed(Command::new("sh").args(["-c", &line]))}}})
    };
    let helpers = |helper: &str| json!({"credHelpers": {registry.address(): helper}});

    // Helpers are programs: one that has the credentials, one that has none, one that fails.
    fs::create_dir_all(small.path("bin")).expect("dir");
    let answer = format!(
        "read server; [ \"$server\" = {} ] || exit 3; echo '{{\"Username\":\"ann\",\"Secret\":\"{PASSWORD}\"}}'",
        registry.address()
    );
    for (name, script) in [
        ("good", answer.as_str()),
        ("empty", "read server; echo 'credentials not found in native keychain'; exit 1"),
        ("bad", "read server; echo boom; exit 1"),
        ("odd", "read server; echo hello"),
    ] {
        let file = small.path("bin").join(format!("docker-credential-{name}"));
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("executable");
    }
    for (name, value, shown) in [
        ("nothing", json!({}), "asked with no credentials"),
        ("wrong", auth("ann", "wrong"), "docker login 127.0.0.1"),
        ("stranger", auth("bob", PASSWORD), "docker login 127.0.0.1"),
        ("empty", helpers("empty"), "asked with no credentials"),
        ("bad", helpers("bad"), "docker-credential-bad failed"),
        ("odd", helpers("odd"), "gives no credentials"),
        ("absent", helpers("absent"), "cannot be run"),
        ("token", json!({"auths": {registry.address(): {"identitytoken": PASSWORD}}}), "access token"),
        ("garbled", json!({"auths": {registry.address(): {"auth": "%%%"}}}), "no usable entry"),
        ("list", json!([]), "cannot be read"),
    ] {
        let (code, said) = run(&config(name, value), &["--json"]);
        let error: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{name}: {said}"));
        assert_eq!((code, &error["error"]["exit_code"]), (6, &json!(6)), "{name}: {said}");
        assert!(said.contains(shown), "{name}: {said}");
    }
    assert_eq!((registry.asked("PUT"), registry.asked("PATCH")), (0, 0), "{}", registry.log());
    assert_eq!(content(&package), before);

    // Those who may: by the file, and then with nothing to send by a helper, and by a store for all hosts.
    let (code, said) = run(&config("file", auth("ann", PASSWORD)), &[]);
    assert!(code == 0 && said.contains("points at it now"), "{said}");
    for (name, value) in [("helper", helpers("good")), ("store", json!({"credsStore": "good"}))] {
        let (code, said) = run(&config(name, value), &[]);
        assert!(code == 0 && said.contains("sent 0 B"), "{said}");
    }
    for (path, digest) in content(&package) {
        let bytes = fs::read(package.join(&path)).expect("read");
        assert!(!bytes.windows(PASSWORD.len()).any(|part| part == PASSWORD.as_bytes()), "{path} {digest}");
    }
}

#[test]
fn a_second_version_moves_the_tag_sends_only_what_is_new_and_keeps_the_first_under_its_digest() {
    let (small, registry) = (Small::built("versions"), Registry::open());
    let place = format!("{}/small:stable", registry.address());
    let first = push(&small, &place, &[]);
    small.edit("server/serve.pl", "$| = 1;", "$| = 1; # once more\n");
    small.ok(&["build"]);
    let second = push(&small, &place, &[]);
    assert_eq!(
        second["replaces"],
        first["pinned"].as_str().expect("a name").split_once('@').expect("a digest").1
    );
    // The base, the largest of the layers, is there already.
    let there: Vec<bool> =
        second["blobs"].as_array().expect("blobs").iter().map(|blob| blob["there"] == true).collect();
    assert_eq!(there.last(), Some(&true), "{second}");
    assert!(there.contains(&false) && second["bytes_sent"].as_u64() < Some(100_000), "{second}");
    for version in [&first, &second] {
        let digest = version["pinned"].as_str().expect("a name").split_once('@').expect("a digest").1;
        curl(&["-H", OCI, &format!("http://{}/v2/small/manifests/{digest}", registry.address())]);
    }
    // A rebuild with the same inputs keeps what points at the registry.
    let before = content(&small.package());
    small.ok(&["build"]);
    assert_eq!(content(&small.package()), before);
    small.ok(&["verify", text(&small.package())]);
}

#[test]
fn a_manifest_that_names_a_registry_gives_a_package_that_is_pulled_by_its_manifest() {
    let registry = Registry::open();
    let small = Small::new("named");
    small.edit(
        "manifest.yaml",
        "card:\n",
        &format!("image: {{registry: \"{}/org\", repository: named}}\ncard:\n", registry.address()),
    );
    small.ok(&["pin", "--offline"]);
    small.ok(&["build"]);
    let wire = verify::read_wire(&small.package()).expect("wire");
    assert_eq!(wire.container.image.digest.as_deref(), Some(wire.built("manifest_digest")));
    // It says already what the push makes true.
    let pushed = push(&small, &format!("{}/org/named", registry.address()), &[]);
    assert_eq!((&pushed["pushed"], &pushed["package_updated"]), (&json!(true), &json!(false)));
}

#[test]
fn plain_http_goes_to_this_machine_or_where_the_user_says() {
    let (small, registry) = (Small::built("plain"), Registry::on_all_addresses());
    let addresses = succeed(Command::new("hostname").arg("-I"));
    let Some(address) = addresses.split_whitespace().find(|address| address.contains('.')) else {
        panic!("this host has no address but loopback")
    };
    let place = format!("{address}:{}/small", registry.port);
    let package = small.package();
    let said = small.fails(5, &["push", text(&package), "--registry", &place]);
    assert!(said.contains(&format!("logging in to the registry failed ({place})")), "{said}");
    push(&small, &place, &["--plain-http"]);
}

#[test]
fn bad_requests_are_refused_with_what_to_write_instead() {
    let dir = tempfile::tempdir().expect("dir");
    let run = |arguments: &[&str]| {
        let output = crate::support::packager(dir.path(), &[&["push", "."], arguments].concat());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (place, shown) in [
        ("org/small", "docker.io/organisation/model"),
        ("https://ghcr.io/org/small", "it is a URL"),
        ("ghcr.io/Org/small", "ghcr.io/Org/small is no place in a registry"),
        ("localhost:5000/small", "no image/ to push"),
    ] {
        let (code, said) = run(&["--registry", place]);
        assert!(code == Some(2) && said.contains(shown) && said.contains("next:"), "{place}: {said}");
    }
}

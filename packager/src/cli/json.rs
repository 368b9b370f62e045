// SPDX-License-Identifier: Apache-2.0
//! `packager help json`: what each command prints with `--json`. The one list of it; a test runs the commands and
//! compares.

use std::fmt::Write as _;

/// A key of a result and what it holds. A name that ends in `?` may be absent; `list[].key` is a key of the entries.
pub type Field = (&'static str, &'static str);

/// Keys of `{"error": {…}}`, which any command prints when it fails.
pub const ERROR: [Field; 6] = [
    ("what", "what did not work, with the file, field or step"),
    ("why", "the cause; may be empty"),
    ("next_step", "what to do; may be empty"),
    ("exit_code", "the exit code of the process"),
    ("code", "its name: failure, usage, manifest, engine, network, auth, disk, verify or interrupted"),
    (
        "problems?",
        "every mistake of a manifest: line, column, key, expected, found, and hint if there is one",
    ),
];

/// What commands print when they succeed.
pub const COMMANDS: [(&str, &[Field]); 15] = [
    ("init", &[("written", "the file")]),
    (
        "check",
        &[("valid", "true"), ("name", "name of the package"), ("repo", "organisation/name on the Hub")],
    ),
    (
        "pin",
        &[
            ("version", "form of manifest.lock, now 1"),
            ("weights", "per repository: repo, revision, files with path, size and sha256"),
            ("wheel", "requirement, file, sha256, sfpi; null without a wheel"),
            ("git", "per source: repo, ref, commit"),
            ("base_images", "per build argument: name, digest, id"),
            ("cargo_lock", "SHA-256 of Cargo.lock, or null"),
            ("toolchain", "version of Rust, or null"),
            ("unpinned", "what could not be pinned: what, why"),
            ("unlisted", "what has a revision but no list of files: what, why"),
        ],
    ),
    ("pin --check", &[("drift", "empty: a difference is an error"), ("unpinned", "as in manifest.lock")]),
    (
        "plan",
        &[
            ("name", "name of the package"),
            ("repo", "organisation/name on the Hub"),
            ("kind", "kind of server"),
            ("arch", "architecture of the chips"),
            ("profiles", "per profile: name, hardware, mesh"),
            ("tt_metal", "as the manifest has it"),
            ("weights", "repository of the weights"),
            ("code", "code_sha256, code_tree_sha256, files, bytes"),
            ("shipped", "entries of the allowlist"),
            ("dropped", "names left out of allowlisted directories"),
            ("context_bytes", "bytes that are sent to the engine"),
            ("unpinned", "what floats"),
            ("inputs_sha256", "digest of all inputs"),
            ("package_exists", "true if there is an earlier package"),
            ("changed", "why the image would be another one"),
            ("missing", "what a build would fail for"),
        ],
    ),
    (
        "build",
        &[
            ("package", "directory of the package"),
            ("built", "false if the package there was made from the same inputs"),
            ("image", "name of the image in the engine"),
            ("digest", "its id"),
            ("image_bytes", "bytes of all layers, unpacked; 0 if nothing was built"),
            ("own_bytes", "of those that are not the base image's"),
            ("dropped", "names left out of allowlisted directories"),
            ("reproduced?", "true with --twice: the second build gave the same image"),
        ],
    ),
    ("card", &[("card", "the text")]),
    ("verify", &[("proved", "one sentence for each thing that was proved")]),
    (
        "fetch",
        &[
            ("[].repo", "organisation/name"),
            ("[].revision", "the commit"),
            ("[].snapshot", "its directory in the cache"),
            ("[].files", "files that were wanted: all are there"),
            ("[].bytes", "their bytes"),
            ("[].downloaded", "bytes that came over the network now"),
        ],
    ),
    (
        "push",
        &[
            ("repo", "organisation/name on the Hub"),
            ("revision", "the branch"),
            ("commit", "the commit that shows the package; null with --dry-run"),
            ("url", "where people see it"),
            ("created", "true if there was no such repository"),
            ("visibility", "private or public"),
            ("listed", "true if the card is tagged for the catalogue"),
            ("files", "files of the package"),
            ("bytes", "their bytes"),
            ("changed[].path", "files that are new or have other bytes"),
            ("changed[].size", "bytes"),
            ("removed", "stale files in code/ and image/"),
            ("bytes_sent", "bytes sent, or to be sent with --dry-run"),
            ("pushed", "false with --dry-run"),
            ("read_back", "true once the Hub gave all of it back"),
        ],
    ),
    (
        "push --registry",
        &[
            ("image", "HOST/REPO:TAG"),
            ("pinned", "HOST/REPO@sha256:…, which cannot move"),
            ("replaces", "digest that the tag stood for, or null"),
            ("blobs[].digest", "sha256:…"),
            ("blobs[].size", "bytes"),
            ("blobs[].role", "config or layer"),
            ("blobs[].there", "true if the registry had it"),
            ("bytes_sent", "bytes sent, or to be sent with --dry-run"),
            ("pushed", "false with --dry-run"),
            ("read_back", "true once the registry gave all of it back"),
            ("package_updated", "true if the package was pointed at the registry now"),
            ("credentials", "anonymous, or docker_config with the file"),
        ],
    ),
    (
        "serve",
        &[("endpoint", "URL"), ("container", "its name"), ("image", "its image"), ("port", "its port")],
    ),
    ("serve --print", &[("command", "the docker run, word by word")]),
    ("stop", &[("container", "its name"), ("exit_code", "the server's")]),
    (
        "digest",
        &[
            ("code_sha256", "the published digest"),
            ("code_tree_sha256", "the framed digest"),
            ("files", "files that are covered"),
            ("bytes", "their bytes"),
        ],
    ),
];

/// Fields of a command.
pub fn fields(command: &str) -> &'static [Field] {
    COMMANDS.iter().find(|(name, _)| *name == command).map_or(&[], |(_, fields)| fields)
}

/// The help text.
pub fn text() -> String {
    let mut out = String::from(
        "With --json a command prints one JSON value on stdout and nothing else there; progress and notes are left out.\n\
         `schema` prints JSON always. A key that ends in ? may be absent; new keys may be added, so ignore what you do \
         not know.\n",
    );
    let mut section = |name: &str, fields: &[Field]| {
        let _ = writeln!(out, "\n{name}");
        let width = fields.iter().map(|(key, _)| key.chars().count()).max().unwrap_or_default();
        for (key, meaning) in fields {
            let _ = writeln!(out, "  {key:width$}  {meaning}");
        }
    };
    for (name, fields) in COMMANDS {
        section(name, fields);
    }
    section("any command that fails: {\"error\": …}, and the exit code", &ERROR);
    out
}

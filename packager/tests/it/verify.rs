// SPDX-License-Identifier: Apache-2.0
//! `packager verify`: a good package is proved, and any changed byte is found and named.

use std::{fs, process::Command};

use packager::{files::walk, verify};
use serde_json::{Value, json};

use crate::{engine::Small, wire::read_strictly};

#[test]
fn a_built_package_is_proved_and_every_changed_byte_is_named() {
    let small = Small::built("verify");
    let dir = small.package();
    let report = verify::verify(&dir).expect("a good package");
    assert_eq!(report.proved.len(), 6, "{report:?}");
    read_strictly(&dir.join("tt_kernel_manifest.json"));

    // One byte in each file in turn: at the start, in the middle and at the end.
    let entries = walk(&dir).expect("walk");
    for entry in entries.iter().filter(|entry| entry.full.is_file()) {
        let good = fs::read(&entry.full).expect("read");
        let places =
            if good.len() > 1 << 20 { vec![good.len() / 2] } else { vec![0, good.len() / 2, good.len() - 1] };
        for at in places {
            let mut bad = good.clone();
            bad[at] ^= 0x01;
            fs::write(&entry.full, &bad).expect("write");
            let failure = verify::verify(&dir).expect_err(&format!("{} byte {at}", entry.path));
            assert_eq!(failure.class.exit_code(), 8, "{failure}");
            let named = failure.to_string().contains(&entry.path) || entry.path == "SHA256SUMS";
            assert!(named, "{} byte {at}: {failure}", entry.path);
        }
        fs::write(&entry.full, &good).expect("restored");
    }
    // A file too many, a file too few.
    fs::write(dir.join("code/extra.py"), "").expect("write");
    assert!(verify::verify(&dir).expect_err("extra").to_string().contains("code/extra.py is not listed"));
    fs::rename(dir.join("code/extra.py"), dir.join("code/run.sh")).expect("rename");
    assert!(verify::verify(&dir).expect_err("other").to_string().contains("code/run.sh"));
}

/// A forger who also writes the list of digests again is found by what the files say about each other.
#[test]
fn fields_are_checked_against_each_other_even_when_the_digests_are_written_again() {
    let small = Small::built("fields");
    let dir = small.package();
    let manifest = dir.join("tt_kernel_manifest.json");
    let good = fs::read_to_string(&manifest).expect("manifest");
    let mut forged: Vec<(&str, Value)> = vec![
        ("/container/image/digest", json!(format!("sha256:{}", "0".repeat(64)))),
        ("/container/image/tag", json!("tt-model/other:000000000000")),
        ("/container/built/image_digest", json!(format!("sha256:{}", "0".repeat(64)))),
        ("/container/built/manifest_digest", json!(format!("sha256:{}", "0".repeat(64)))),
        ("/container/built/code_sha256", json!("0".repeat(64))),
        ("/container/built/code_tree_sha256", json!("0".repeat(64))),
        ("/container/built/diff_ids", json!([])),
        ("/container/built/repo", json!("other/repo")),
        ("/container/built/created_at", json!("2020-01-01T00:00:00+00:00")),
        ("/container/built/code_in_image", json!("/opt/other")),
        ("/container/kind", json!("tt-dit-server")),
        ("/name", json!("other")),
        ("/arch", json!("wormhole_b0")),
        ("/weights/repo_id", json!("other/weights")),
        ("/weights/revision", json!("0".repeat(40))),
        ("/container/card/performance", json!("Ten times faster.")),
        ("/container/serve/hardware", json!("p150")),
        ("/container/runtime/ready_line", json!("ready")),
    ];
    forged.push(("/container/serve_profiles/0/name", json!("fast")));
    for (pointer, value) in forged {
        let mut wire: Value = serde_json::from_str(&good).expect("JSON");
        *wire.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        fs::write(&manifest, format!("{}\n", serde_json::to_string_pretty(&wire).expect("JSON")))
            .expect("write");
        verify::write_sums(&dir).expect("sums");
        let failure = verify::verify(&dir).err().unwrap_or_else(|| panic!("{pointer} was not noticed"));
        assert_eq!(failure.class.exit_code(), 8, "{pointer}: {failure}");
    }
    fs::write(&manifest, &good).expect("restored");
    for (file, from, to) in [
        ("README.md", "None.", "Many."),
        ("sbom.spdx.json", "\"checksumValue\": \"", "\"checksumValue\": \"0"),
        ("provenance.intoto.json", "org/small-weights", "org/other-weights"),
        ("manifest.lock", "org/small-weights", "org/other-weights"),
        ("image/index.json", "\"latest\"", "\"newest\""),
        ("image/manifest.json", "tt-model/", "tt-modal/"),
    ] {
        let path = dir.join(file);
        let text = fs::read_to_string(&path).expect("text");
        assert!(text.contains(from), "{file}");
        fs::write(&path, text.replacen(from, to, 1)).expect("write");
        verify::write_sums(&dir).expect("sums");
        assert!(verify::verify(&dir).is_err(), "{file} was not noticed");
        fs::write(&path, text).expect("restored");
    }
    verify::write_sums(&dir).expect("sums");
    verify::verify(&dir).expect("good again");
}

/// The tools that others use: an SPDX validator, an in-toto reader, a reader of OCI layouts.
#[test]
fn public_tools_accept_the_evidence_and_the_layout() {
    let small = Small::built("evidence");
    let dir = small.package();
    let checked = Command::new(crate::support::repository().join("scripts/check-evidence.sh"))
        .arg(&dir)
        .output()
        .expect("the script starts");
    assert!(
        checked.status.success(),
        "{}{}",
        String::from_utf8_lossy(&checked.stdout),
        String::from_utf8_lossy(&checked.stderr)
    );
    let sbom: Value =
        serde_json::from_slice(&fs::read(dir.join("sbom.spdx.json")).expect("sbom")).expect("JSON");
    let names: Vec<&str> = sbom["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .filter_map(|package| package["name"].as_str())
        .collect();
    assert!(
        names.contains(&"libc6") && names.contains(&"perl-base"),
        "the Debian packages of the image are listed"
    );
    let text = fs::read_to_string(dir.join("provenance.intoto.json")).expect("text");
    let host = fs::read_to_string("/etc/hostname").unwrap_or_default();
    assert!(
        !text.contains(dir.parent().and_then(|p| p.to_str()).expect("path"))
            && (host.trim().len() < 4 || !text.contains(host.trim()))
    );
}

#[test]
fn what_is_no_package_is_said_to_be_none() {
    let dir = tempfile::tempdir().expect("dir");
    let failure = verify::verify(dir.path()).expect_err("nothing there");
    assert_eq!(failure.class.exit_code(), 2);
}

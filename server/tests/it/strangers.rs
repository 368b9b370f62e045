// SPDX-License-Identifier: Apache-2.0
//! A short smoke of the fuzz targets: arbitrary bytes, and valid inputs with bytes changed, cut or doubled.

use proptest::prelude::*;
use server::strangers;

use crate::support::{base64, png};

fn json() -> Vec<u8> {
    let image = base64(&png(64, 64, [1, 2, 3]));
    let body = serde_json::json!({
        "prompt": "a \u{1F600} \"cat\"", "images": [image], "width": 512, "height": 1024, "seed": 9_007_199_254_740_991_u64,
        "num_steps": 4, "guidance_scale": 1.0, "size": "512x512", "stream": false, "image": ["data:image/png;base64,AAAA"],
    });
    body.to_string().into_bytes()
}

fn form() -> Vec<u8> {
    let part = |name: &str, value: &[u8]| {
        let head =
            format!("--x\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"a.png\"\r\n\r\n");
        [head.as_bytes(), value, b"\r\n"].concat()
    };
    [part("image[]", &png(64, 64, [1, 2, 3])), part("prompt", b"a cat"), b"--x--\r\n".to_vec()].concat()
}

fn files() -> Vec<Vec<u8>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../code/tests/fixtures/references");
    std::fs::read_dir(directory).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
}

/// `valid` with some bytes changed, then perhaps cut, then perhaps with a piece doubled.
fn mangle(
    mut valid: Vec<u8>,
    changes: &[(prop::sample::Index, u8)],
    cut: prop::sample::Index,
    doubled: prop::sample::Index,
) -> Vec<u8> {
    for (index, byte) in changes {
        let place = index.index(valid.len());
        valid[place] = *byte;
    }
    if cut.index(3) == 0 {
        valid.truncate(cut.index(valid.len()));
    }
    if doubled.index(3) == 0 && !valid.is_empty() {
        let piece = valid[doubled.index(valid.len())..].to_vec();
        valid.extend(piece);
    }
    valid
}

/// What the fuzz targets start from, and what they have found.
#[test]
fn seeds_of_the_fuzz_targets_are_read() {
    for target in ["json", "form", "base64"] {
        let parse = match target {
            "json" => strangers::json,
            "form" => strangers::form,
            _ => strangers::base64,
        };
        let directory = format!("{}/fuzz/seeds/{target}", env!("CARGO_MANIFEST_DIR"));
        let seeds: Vec<_> =
            std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!seeds.is_empty());
        for seed in seeds {
            parse(&std::fs::read(seed).unwrap());
        }
    }
    for file in files() {
        strangers::image(&file);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_are_refused_politely(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for parse in [strangers::json, strangers::base64, strangers::image, strangers::form] {
            parse(&bytes);
        }
    }

    #[test]
    fn mangled_inputs_are_read_or_refused_politely(
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..8),
        cut in any::<prop::sample::Index>(),
        doubled in any::<prop::sample::Index>(),
        file in any::<prop::sample::Index>(),
    ) {
        strangers::json(&mangle(json(), &changes, cut, doubled));
        strangers::form(&mangle(form(), &changes, cut, doubled));
        strangers::base64(&mangle(base64(&form()).into_bytes(), &changes, cut, doubled));
        let files = files();
        strangers::image(&mangle(files[file.index(files.len())].clone(), &changes, cut, doubled));
    }
}

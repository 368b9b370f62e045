// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 [dev] in its full size, as far as that can be seen without 112 GB of numbers, and weights larger than memory.

mod files;
mod memory;

use std::{fs, path::Path, time::Instant};

use flux2::{
    device::{
        Precision,
        cpu::{CpuDevice, CpuOptions},
    },
    model::Configs,
    pipeline::{self, Pipeline},
};
use tempfile::TempDir;

/// A directory on a disk, where files may have holes.
fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// Resident bytes of this process's map of a file, and whether there is one.
fn resident(file: &str) -> Option<u64> {
    let maps = fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(file));
    lines.next()?;
    let kib = lines.find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB"))?;
    Some(1024 * kib.trim().parse::<u64>().expect("a number"))
}

#[test]
fn the_published_dev_loads_in_full_size_and_reads_only_what_it_needs() {
    let directory = directory();
    assert_eq!(files::dev(directory.path()), files::PUBLISHED, "bytes of every file");
    assert_eq!(files::transformer(48, 8, 48, 15_360).len(), 331);
    assert_eq!(files::text_encoder().len(), 585);
    assert_eq!(files::vae().len(), 251);
    let configs =
        Configs::read(directory.path(), &directory.path().join("text_encoder")).expect("configurations");
    assert_eq!(format!("{configs:?}"), format!("{:?}", Configs::dev()));

    let start = Instant::now();
    assert!(pipeline::check(directory.path(), None).is_empty());
    println!("checked in {:?}", start.elapsed());

    let device =
        || CpuDevice::new(CpuOptions { precision: Precision::Bf16, threads: Some(1) }).expect("a cpu");
    let before = memory::anonymous_bytes();
    let start = Instant::now();
    let model = pipeline::load(directory.path(), None, device(), None).expect("it loads");
    let anonymous = memory::anonymous_bytes() - before;
    let held = model.info().memory;
    println!(
        "loaded in {:?}: {:.2} GB mapped, {:.2} GB of its own, {:.2} GB anonymous",
        start.elapsed(),
        held.mapped as f64 / 1e9,
        held.weights as f64 / 1e9,
        anonymous as f64 / 1e9
    );
    assert_eq!(model.info().model, "FLUX.2-dev");
    // The VAE is rounded from F32 (0.17 GB) and packed; nothing else is copied.
    assert!(anonymous < 800_000_000, "{anonymous} bytes");
    // Matrices of the transformer (64.45 GB) and of 30 layers of the text encoder (34.69 GB with the embedding's 1.34).
    assert!((97.7e9..97.9e9).contains(&(held.mapped as f64)), "{}", held.mapped);

    // Layers 32 to 39 and the head: not even mapped. The vision tower shares a file with the embedding: mapped, not read.
    for shard in ["model-00009-of-00010.safetensors", "model-00010-of-00010.safetensors"] {
        assert_eq!(resident(shard), None, "{shard}");
    }
    for shard in ["model-00001-of-00010.safetensors", "diffusion_pytorch_model-00003-of-00007.safetensors"] {
        let bytes = resident(shard).expect("a map");
        assert!(bytes < 16_000_000, "{shard}: {bytes} bytes were read");
    }
    drop(model);

    // None of that is required: neither the two shards nor, in a file of its own making, the tower, projector and head.
    let text_encoder = directory.path().join("text_encoder");
    for shard in 9..=10 {
        fs::remove_file(text_encoder.join(format!("model-{shard:05}-of-00010.safetensors")))
            .expect("it was there");
    }
    assert!(pipeline::check(directory.path(), None).is_empty());
    pipeline::load(directory.path(), None, device(), None).expect("it loads without them");
    check_pruned(directory.path());
}

/// A text encoder of the embedding and thirty layers alone.
fn check_pruned(checkpoint: &Path) {
    let pruned = directory();
    fs::copy(checkpoint.join("text_encoder/config.json"), pruned.path().join("config.json")).expect("a copy");
    let needed = |tensor: &files::Tensor| flux2::spec::DEV.text_encoder.needs(&tensor.name);
    let tensors: Vec<_> = files::text_encoder().into_iter().filter(needed).collect();
    assert_eq!(tensors.len(), 1 + 30 * 9);
    files::write_component(pruned.path(), "model", &tensors, u64::MAX);
    assert!(pipeline::check(checkpoint, Some(pruned.path())).is_empty());
}

// SPDX-License-Identifier: Apache-2.0
//! Fetches from a hub that does its part.

use std::fs;

use axum::body::Bytes;
use hub::{Kind, Pin, Want};

use crate::{
    stand_in::{git_id, sha256},
    support::{Place, REPO, everything, names, noise},
};

#[tokio::test]
async fn the_cache_is_laid_out_as_huggingface_hub_does() {
    let place = Place::new().await;
    let fetched = place.fetch_right().await;
    assert_eq!((fetched.revision.as_str(), fetched.files), (place.commit.as_str(), 4));
    assert_eq!((fetched.bytes, fetched.downloaded), (9_800_009, 9_800_009));
    assert_eq!(fetched.snapshot, place.snapshot("").components().collect::<std::path::PathBuf>());
    assert_eq!(fs::read_to_string(place.folder().join("refs/main")).expect("ref"), place.commit);
    let link = |path: &str| fs::read_link(place.snapshot(path)).expect("link").display().to_string();
    assert_eq!(link("config.json"), format!("../../blobs/{}", git_id(&place.files[0].1)));
    assert_eq!(
        link("transformer/model.safetensors"),
        format!("../../../blobs/{}", sha256(&place.files[3].1))
    );
    assert!(!place.settings.cache.join(".locks").exists());
}

#[tokio::test]
async fn a_full_commit_is_never_moved_and_a_branch_is_resolved() {
    let place = Place::new().await;
    let newer = place.hub.commit(REPO, &[("config.json", Bytes::from_static(b"new"))]);
    let fetched = place.fetch(Want { revision: place.commit.clone(), ..everything() }).await.expect("old");
    assert_eq!(fetched.revision, place.commit);
    place.assert_right();
    let asked: Vec<String> =
        place.hub.seen.lock().expect("seen").iter().map(|ask| ask.path.clone()).collect();
    assert!(!asked.iter().any(|path| path.contains("/revision/")), "{asked:?}");
    assert_eq!(place.fetch(everything()).await.expect("main").revision, newer);
}

#[tokio::test]
async fn a_second_fetch_downloads_nothing_and_a_changed_file_only() {
    let place = Place::new().await;
    place.fetch_right().await;
    let before = place.hub.downloads().len();
    assert_eq!(place.fetch_right().await.downloaded, 0);
    assert_eq!(place.hub.downloads().len(), before);
    let mut files = place.files.clone();
    files[0].1 = Bytes::from_static(b"{}");
    place.hub.commit(REPO, &files);
    assert_eq!(place.fetch(everything()).await.expect("new").downloaded, 2);
}

#[tokio::test]
async fn patterns_choose_and_a_wider_fetch_adds() {
    let place = Place::new().await;
    let some = Want {
        allow: vec!["*.json".into(), "text_encoder/".into()],
        ignore: vec!["empty*".into()],
        ..everything()
    };
    assert_eq!(place.fetch(some).await.expect("some").files, 2);
    assert!(place.snapshot("config.json").exists() && !place.snapshot("transformer").exists());
    assert_eq!(place.fetch_right().await.downloaded, 9_500_000);
    let none = place.fetch(Want { allow: vec!["*.bin".into()], ..everything() }).await.expect_err("none");
    assert_eq!(none.kind, Kind::Usage);
}

#[tokio::test]
async fn a_listing_in_pages_is_followed_to_its_end() {
    let place = Place::new().await;
    *place.hub.page.lock().expect("page") = 1;
    assert_eq!(place.fetch_right().await.files, 4);
}

#[tokio::test]
async fn large_files_come_in_parallel_ranges_and_names_with_spaces_arrive() {
    let place = Place::with(vec![("a b.bin", noise(3, 150_000_000))]).await;
    place.fetch_right().await;
    let ranges: Vec<_> = place.hub.downloads().iter().map(|ask| ask.range).collect();
    assert_eq!(ranges.len(), 3, "{ranges:?}");
}

#[tokio::test]
async fn pins_must_agree_and_stand_in_for_the_list_offline() {
    let mut place = Place::new().await;
    let pin = |(path, bytes): &(&str, Bytes)| Pin {
        path: (*path).into(),
        size: bytes.len() as u64,
        sha256: sha256(bytes),
    };
    let pins: Vec<Pin> = place.files.iter().map(pin).collect();
    let want = Want { revision: place.commit.clone(), pins: pins.clone(), ..everything() };
    place.fetch(want.clone()).await.expect("pinned");

    let mut wrong = want.clone();
    wrong.pins[0].sha256 = "0".repeat(64);
    let error = place.fetch(wrong).await.expect_err("another file");
    assert!(error.kind == Kind::Verification && error.to_string().contains("config.json"), "{error}");

    place.settings.offline = true;
    fs::remove_dir_all(place.folder().join(".files")).expect("the record");
    place.fetch(want.clone()).await.expect("complete by the pins");
    fs::write(place.snapshot("config.json"), "{\"a\": 2}\n").expect("damage");
    let error = place.fetch(want).await.expect_err("damaged");
    assert!(error.to_string().contains("config.json (9 B)"), "{error}");
}

#[tokio::test]
async fn verify_finds_damage_that_keeps_the_size_and_mends_it() {
    let place = Place::new().await;
    place.fetch_right().await;
    let blob = place.folder().join("blobs").join(sha256(&place.files[2].1));
    let mut bytes = fs::read(&blob).expect("blob");
    bytes[1000] ^= 1;
    fs::write(&blob, bytes).expect("damage");
    let fetched = place.fetch(Want { verify: true, ..everything() }).await.expect("mended");
    assert_eq!(fetched.downloaded, 300_000);
    place.assert_right();
}

#[tokio::test]
async fn a_snapshot_of_copies_instead_of_links_is_taken_as_it_is() {
    let place = Place::new().await;
    place.fetch_right().await;
    for (path, bytes) in &place.files {
        fs::remove_file(place.snapshot(path)).expect("link");
        fs::write(place.snapshot(path), bytes).expect("copy");
    }
    fs::remove_dir_all(place.folder().join("blobs")).expect("blobs");
    fs::remove_dir_all(place.folder().join(".files")).expect("record");
    assert_eq!(place.fetch_right().await.downloaded, 0);
    assert!(names(&place.folder()).iter().all(|name| name != "blobs"));
}

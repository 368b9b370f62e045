// SPDX-License-Identifier: Apache-2.0
//! Each fault ends in the right file or in a clear error, never in a wrong file that looks right.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    sync::Arc,
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{Response, header},
    response::IntoResponse as _,
};
use hub::{Kind, partial::Partial, settings::Token};

use crate::{
    stand_in::{Ask, Hub, error, file, hex, sha256},
    support::{Place, REPO, cut, everything, large, names, noise, stalled},
};

fn without(mut response: Response<Body>, names: &[&str]) -> Response<Body> {
    // A body of unknown length: the server adds no Content-Length of its own.
    let headers = response.headers_mut();
    for name in names {
        headers.remove(*name);
    }
    let (parts, body) = response.into_parts();
    Response::from_parts(parts, Body::from_stream(body.into_data_stream()))
}

fn whole(ask: &Ask) -> Ask {
    Ask { range: None, ..ask.clone() }
}

#[tokio::test]
async fn cut_bodies_go_on_where_they_stopped() {
    let place = Place::new().await;
    place.hub.break_with(|ask, content| (large(ask) && ask.before < 6).then(|| cut(ask, content, 1_000_000)));
    let fetched = place.fetch_right().await;
    assert_eq!(fetched.downloaded, 9_800_009);
    let starts: Vec<u64> = place
        .hub
        .downloads()
        .iter()
        .filter(|ask| large(ask))
        .map(|ask| ask.range.map_or(0, |r| r.0))
        .collect();
    assert!(starts.windows(2).all(|pair| pair[1] > pair[0]), "{starts:?}");
    assert!(place.noted().contains("trying again"), "{}", place.noted());
}

#[tokio::test]
async fn short_bodies_with_consistent_lengths_are_refused() {
    let place = Place::new().await;
    place
        .hub
        .break_with(|ask, content| large(ask).then(|| file(&whole(ask), "c", &content.slice(..4_000_000))));
    let error = place.fetch_wrong().await;
    assert!(
        error.kind == Kind::Network && error.to_string().contains("Content-Length 4000000 for 9500000"),
        "{error}"
    );
}

#[tokio::test]
async fn short_bodies_without_any_length_are_refused() {
    let place = Place::new().await;
    place.hub.break_with(|ask, content| {
        large(ask).then(|| without(file(&whole(ask), "c", &content.slice(..4_000_000)), &["content-length"]))
    });
    let error = place.fetch_wrong().await;
    assert_eq!(error.kind, Kind::Network, "{error}");
}

#[tokio::test]
async fn a_flipped_byte_once_is_mended_and_twice_is_an_error_that_keeps_nothing() {
    let flip = |times: usize| {
        move |ask: &Ask, content: &Bytes| {
            (large(ask) && ask.before < times).then(|| {
                let mut bytes = content.to_vec();
                bytes[5_000_000] ^= 0x10;
                file(ask, "c", &bytes.into())
            })
        }
    };
    let place = Place::new().await;
    place.hub.break_with(flip(1));
    place.fetch_right().await;
    let place = Place::new().await;
    place.hub.break_with(flip(usize::MAX));
    let error = place.fetch_wrong().await;
    assert!(
        error.kind == Kind::Verification && error.to_string().contains("transformer/model.safetensors"),
        "{error}"
    );
    assert!(
        !names(&place.folder().join("blobs")).iter().any(|name| name.starts_with(&sha256(&place.files[3].1)))
    );
}

#[tokio::test]
async fn a_flipped_byte_in_a_small_file_is_found_by_gits_hash() {
    let place = Place::new().await;
    place.hub.break_with(|ask, _| {
        ask.path.ends_with("config.json").then(|| file(ask, "c", &Bytes::from_static(b"{\"a\": 2}\n")))
    });
    assert_eq!(place.fetch_wrong().await.kind, Kind::Verification);
}

#[tokio::test]
async fn case_27_ranges_ask_for_identity_and_200_instead_of_206_is_handled() {
    let files = vec![("transformer/model.safetensors", noise(4, 70_000_000))];
    let place = Place::with(files).await;
    place.hub.break_with(|ask, content| large(ask).then(|| file(&whole(ask), "c", content)));
    place.fetch_right().await;
    assert!(place.noted().contains("ignores ranges"), "{}", place.noted());
    for ask in place.hub.seen.lock().expect("seen").iter() {
        assert_eq!(ask.headers[header::ACCEPT_ENCODING], "identity");
    }
    let place = Place::new().await;
    place.hub.break_with(|ask, content| {
        large(ask).then(|| {
            let mut response = file(ask, "c", content);
            response.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().expect("a header"));
            response
        })
    });
    let error = place.fetch_wrong().await.to_string();
    assert!(error.contains("Content-Encoding gzip"), "{error}");
}

#[tokio::test]
async fn case_27_a_cut_body_of_a_server_without_ranges_skips_what_is_there() {
    let place = Place::new().await;
    place.hub.break_with(|ask, content| {
        large(ask).then(|| {
            if ask.before == 0 { cut(ask, content, 3_000_000) } else { file(&whole(ask), "c", content) }
        })
    });
    place.fetch_right().await;
}

#[tokio::test]
async fn case_28_a_proxy_that_strips_content_range_or_all_lengths_does_no_harm() {
    for stripped in [
        &["content-range"][..],
        &["content-length"],
        &["content-range", "content-length", "etag", "accept-ranges"],
    ] {
        let place = Place::with(vec![("transformer/model.safetensors", noise(5, 70_000_000))]).await;
        place.hub.break_with(move |ask, content| {
            large(ask).then(|| {
                if ask.before == 1 {
                    cut(ask, content, 9)
                } else {
                    without(file(ask, "c", content), stripped)
                }
            })
        });
        place.fetch_right().await;
    }
    // And a range that is another one is noticed.
    let place = Place::with(vec![("transformer/model.safetensors", noise(5, 70_000_000))]).await;
    place.hub.break_with(|ask, content| {
        let shifted = Ask { range: ask.range.map(|(first, last)| (first + 1, last)), ..ask.clone() };
        (large(ask)).then(|| file(&shifted, "c", content))
    });
    assert!(place.fetch_wrong().await.to_string().contains("Content-Range"));
}

#[tokio::test]
async fn case_29_no_head_request_is_made_so_its_missing_length_cannot_matter() {
    let place = Place::new().await;
    place.hub.break_with(|ask, content| {
        ask.path
            .contains("/resolve/")
            .then(|| without(file(ask, "c", content), &["content-length", "etag", "x-repo-commit"]))
    });
    place.fetch_right().await;
    assert!(place.hub.seen.lock().expect("seen").iter().all(|ask| ask.method == "GET"));
}

#[tokio::test]
async fn case_30_redirects_are_followed_and_the_token_stays_with_the_endpoint() {
    let place = Place::new().await;
    let other = Arc::new(Hub::default());
    other.commit(REPO, &place.files);
    let address = other.start().await;
    // The same machine under another name and port is another origin.
    let elsewhere = format!("http://localhost:{}", address.port());
    place.hub.break_with(move |ask, _| {
        if !ask.path.contains("/resolve/") {
            return None;
        }
        let to = if ask.path.contains("/hop/") {
            format!(
                "{elsewhere}{}?sig=secret",
                ask.path.replace("/hop/", "/resolve/").replacen("/resolve/resolve/", "/resolve/", 1)
            )
        } else {
            ask.path.replacen("/resolve/", "/resolve/hop/", 1)
        };
        Some((axum::http::StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, to)]).into_response())
    });
    place.fetch_right().await;
    assert!(place.hub.downloads().iter().all(|ask| ask.headers.contains_key(header::AUTHORIZATION)));
    let elsewhere = other.downloads();
    assert!(
        elsewhere.len() == 3 && elsewhere.iter().all(|ask| !ask.headers.contains_key(header::AUTHORIZATION))
    );
}

#[tokio::test]
async fn case_30_a_redirect_without_location_is_named_with_its_url() {
    let place = Place::new().await;
    place.hub.break_with(|ask, _| large(ask).then(|| axum::http::StatusCode::FOUND.into_response()));
    let error = place.fetch_wrong().await.to_string();
    assert!(error.contains("/resolve/") && error.contains("302") && error.contains("Location"), "{error}");
    let place = Place::new().await;
    place.hub.break_with(|ask, _| {
        large(ask)
            .then(|| (axum::http::StatusCode::FOUND, [(header::LOCATION, ask.path.clone())]).into_response())
    });
    assert!(place.fetch_wrong().await.to_string().contains("redirects more than 10 times"));
}

#[tokio::test]
async fn case_31_gated_and_absent_are_told_apart_with_the_token_that_was_used() {
    let gate = |status: u16, code: &'static str| {
        move |ask: &Ask, _: &Bytes| {
            ask.path.starts_with("/api/").then(|| error(status, code, "Access to it is restricted."))
        }
    };
    let mut place = Place::new().await;
    for status in [401, 403] {
        place.hub.break_with(gate(status, "GatedRepo"));
        let error = place.fetch_wrong().await;
        let page = format!("{}org/weights", place.settings.endpoint);
        assert!(error.kind == Kind::Auth && error.what.contains("org/weights is gated"), "{error}");
        assert!(error.next.contains(&page) && error.why.contains("HF_TOKEN"), "{error:?}");
        assert!(!format!("{error:?}").contains("hf_test_token_of_nobody"));
    }
    place.hub.break_with(gate(401, ""));
    assert!(place.fetch_wrong().await.what.contains("token was refused"));
    place.hub.break_with(gate(404, "RepoNotFound"));
    assert_eq!(place.fetch_wrong().await.kind, Kind::Network);
    place.settings.token = None;
    place.hub.break_with(gate(401, "RepoNotFound"));
    let error = place.fetch_wrong().await;
    assert!(error.kind == Kind::Auth && error.why.contains("no token was sent"), "{error:?}");
    place.settings.token = Token::new("x", "/some/file");
    place.hub.break_with(gate(403, "GatedRepo"));
    assert!(place.fetch_wrong().await.why.contains("/some/file"));
}

#[tokio::test]
async fn case_32_the_body_of_a_refusal_is_never_stored() {
    for status in [401, 403, 404] {
        let place = Place::new().await;
        place.hub.break_with(move |ask, _| {
            large(ask).then(|| error(status, "GatedRepo", "Access to it is restricted."))
        });
        let error = place.fetch_wrong().await;
        assert_eq!(error.kind == Kind::Auth, status != 404, "{error}");
        assert!(!place.snapshot("transformer/model.safetensors").exists());
    }
    for status in [500, 502, 504] {
        let place = Place::new().await;
        place.hub.break_with(move |ask, _| large(ask).then(|| error(status, "", "oops")));
        assert!(place.fetch_wrong().await.to_string().contains(&status.to_string()));
        place.hub.mend();
        place.fetch_right().await;
    }
}

#[tokio::test]
async fn case_33_too_little_disk_is_said_before_the_first_byte_with_both_numbers() {
    let place = Place::new().await;
    place.hub.break_with(|ask, _| {
        let entry = serde_json::json!([{"type": "file", "path": "a.bin", "size": 4_000_000_000_000_000_u64, "oid": "0".repeat(40),
            "lfs": {"oid": "0".repeat(64), "size": 4_000_000_000_000_000_u64}}]);
        ask.path.contains("/tree/").then(|| axum::Json(entry).into_response())
    });
    let error = place.fetch_wrong().await;
    assert!(error.kind == Kind::Disk && error.why.starts_with("4000000000000000 and "), "{error:?}");
    assert!(place.hub.downloads().is_empty());
}

#[tokio::test]
async fn case_35_a_cut_first_run_and_a_failing_second_give_no_half_snapshot() {
    let mut place = Place::new().await;
    place.hub.break_with(|ask, content| large(ask).then(|| cut(ask, content, 0)));
    place.fetch_wrong().await;
    place.hub.break_with(|_, _| Some(error(503, "", "down")));
    assert_eq!(place.fetch_wrong().await.kind, Kind::Network);
    place.settings.offline = true;
    assert_eq!(place.fetch_wrong().await.kind, Kind::Network);
    place.settings.offline = false;
    place.hub.mend();
    place.fetch_right().await;
    // Complete, then damaged, then offline: what is missing is listed.
    fs::remove_file(place.snapshot("text_encoder/model.safetensors")).expect("link");
    place.settings.offline = true;
    let error = place.fetch_wrong().await;
    assert!(
        error
            .to_string()
            .contains("1 files, 300.0 kB, are missing or damaged: text_encoder/model.safetensors (300.0 kB)"),
        "{error}"
    );
}

#[tokio::test]
async fn case_36_two_at_once_end_in_the_same_right_files() {
    let place = Place::new().await;
    let (one, two) = tokio::join!(place.fetch(everything()), place.fetch(everything()));
    one.expect("one");
    two.expect("two");
    place.assert_right();
}

#[tokio::test]
async fn case_37_locks_and_downloads_of_dead_processes_do_not_stop_anybody() {
    let place = Place::new().await;
    let id = sha256(&place.files[3].1);
    let locks = place.settings.cache.join(".locks/models--org--weights");
    fs::create_dir_all(&locks).expect("locks");
    fs::write(locks.join(format!("{id}.lock")), "").expect("a lock");
    let blobs = place.folder().join("blobs");
    fs::create_dir_all(&blobs).expect("blobs");
    fs::write(blobs.join(format!("{id}.incomplete")), "another program's").expect("partial");
    fs::write(blobs.join(format!("{id}.000000000000.1.2.3.incomplete")), "elsewhere, now").expect("partial");
    place.fetch(everything()).await.expect("a fetch");
    place.assert_nothing_wrong();
    // Both may be somebody's: they are left alone.
    assert_eq!(names(&blobs).iter().filter(|name| name.ends_with(".incomplete")).count(), 2);
}

#[tokio::test]
async fn case_38_a_complete_cache_that_may_not_be_written_is_a_hit_without_network() {
    let mut place = Place::new().await;
    place.fetch_right().await;
    let want = hub::Want { revision: place.commit.clone(), ..everything() };
    // A file system that may not be written holds root off too.
    let target = place.dir.path().join("read-only");
    let mounted = ReadOnly::of(&place.settings.cache, &target);
    place.settings.cache.clone_from(&target);
    let before = place.hub.seen.lock().expect("seen").len();
    place.fetch(want.clone()).await.expect("a hit");
    assert_eq!(place.hub.seen.lock().expect("seen").len(), before, "no network");
    place.settings.offline = true;
    place.fetch(want.clone()).await.expect("a hit offline");
    place.settings.offline = false;
    place.hub.commit(REPO, &[("other.json", Bytes::from_static(b"{}"))]);
    let error = place.fetch(everything()).await.expect_err("incomplete");
    assert!(error.kind == Kind::Disk && error.next.contains("HF_HUB_CACHE"), "{error:?}");
    drop(mounted);
}

#[tokio::test]
async fn case_39_a_stall_at_99_percent_is_cut_announced_and_mended() {
    let mut place = Place::new().await;
    place.settings.stall = Duration::from_millis(500);
    place
        .hub
        .break_with(|ask, content| (large(ask) && ask.before == 0).then(|| stalled(ask, content, 9_405_000)));
    let fetched = place.fetch_right().await;
    assert_eq!(fetched.downloaded, 9_800_009);
    assert!(place.noted().contains("sent nothing for 0.5 s"), "{}", place.noted());
    let mut place = Place::new().await;
    place.settings.stall = Duration::from_millis(500);
    place.hub.break_with(|ask, content| large(ask).then(|| stalled(ask, content, 0)));
    let error = place.fetch_wrong().await;
    assert!(error.kind == Kind::Network && error.to_string().contains("sent nothing"), "{error}");
}

#[tokio::test]
async fn case_40_a_partial_that_is_full_is_finished_and_one_too_long_is_restarted() {
    let bytes = noise(6, 9_500_000);
    for (length, asked) in [(9_500_000, 0), (9_500_001, 1), (4_194_304, 1)] {
        let place = Place::with(vec![("transformer/model.safetensors", bytes.clone())]).await;
        let blobs = place.folder().join("blobs");
        let id = sha256(&bytes);
        abandoned(&blobs, &id, &bytes, length);
        place.fetch_right().await;
        assert_eq!(place.hub.downloads().len(), asked, "{length}");
        if length == 4_194_304 {
            assert_eq!(place.hub.downloads()[0].range.expect("a range").0, 4_194_304);
        }
    }
    // And a server that answers 416 to the end.
    let place = Place::new().await;
    place.hub.break_with(|ask, content| {
        large(ask).then(|| if ask.before == 0 { cut(ask, content, 9) } else { error(416, "", "") })
    });
    assert!(place.fetch_wrong().await.to_string().contains("the file ends before byte 9"));
}

/// What a process of another boot left an hour ago.
fn abandoned(blobs: &std::path::Path, id: &str, bytes: &[u8], length: usize) {
    fs::create_dir_all(blobs).expect("blobs");
    let partial = Partial::open(blobs, id, bytes.len() as u64).expect("partial");
    partial.write(0, &bytes[..length.min(bytes.len())]).expect("bytes");
    let old = blobs.join(format!("{id}.{}.1.2.3.incomplete", hex([0; 6])));
    fs::rename(partial.path().with_extension("done"), old.with_extension("done")).expect("journal");
    fs::rename(partial.path(), &old).expect("partial");
    let opened = fs::File::options().write(true).open(&old).expect("partial");
    opened.set_len(length as u64).expect("length");
    opened.set_modified(std::time::SystemTime::now() - Duration::from_hours(1)).expect("time");
}

#[tokio::test]
async fn retry_after_is_obeyed_and_a_long_one_is_told() {
    for status in [429_u16, 503] {
        let place = Place::new().await;
        place.hub.break_with(move |ask, _| {
            (ask.before == 0).then(|| {
                let mut response = error(status, "", "");
                response.headers_mut().insert(header::RETRY_AFTER, "1".parse().expect("a header"));
                response
            })
        });
        place.fetch_right().await;
        assert!(place.noted().contains("trying again in 1.0 s"), "{}", place.noted());
        place.hub.commit(REPO, &[("new", Bytes::from_static(b"1"))]);
        place.hub.break_with(move |_, _| {
            let mut response = error(status, "", "");
            response.headers_mut().insert(header::RETRY_AFTER, "3600".parse().expect("a header"));
            Some(response)
        });
        let error = place.fetch(everything()).await.expect_err("later");
        assert!(error.next.contains("3600 s"), "{error:?}");
    }
}

#[tokio::test]
async fn a_revision_that_is_gone_is_said() {
    let place = Place::new().await;
    let want = hub::Want { revision: "0".repeat(40), ..everything() };
    let error = place.fetch(want).await.expect_err("gone");
    assert!(error.kind == Kind::Network && error.what.contains("no longer"), "{error}");
}

#[tokio::test]
async fn a_hub_that_lists_paths_outside_the_cache_or_talks_html_is_not_believed() {
    for path in ["../../escape", "/etc/escape", "a/../../b"] {
        let place = Place::new().await;
        let entry = serde_json::json!([{"type": "file", "path": path, "size": 1, "oid": "0".repeat(40)}]);
        place.hub.break_with(move |ask, _| {
            ask.path.contains("/tree/").then(|| axum::Json(entry.clone()).into_response())
        });
        assert_eq!(place.fetch_wrong().await.kind, Kind::Verification);
    }
    let place = Place::new().await;
    place
        .hub
        .break_with(|ask, _| ask.path.starts_with("/api/").then(|| "<html>Sign in</html>".into_response()));
    assert!(place.fetch_wrong().await.to_string().contains("sign-in page"));
}

#[tokio::test]
async fn a_disk_that_fills_up_on_the_way_is_said_and_the_next_run_goes_on() {
    let mut place = Place::new().await;
    let disk = place.dir.path().join("small");
    let mounted = ReadOnly::small(&disk, "8m");
    place.settings.cache = disk.join("hub");
    // The list says less than comes, so that the check before the first byte passes.
    fs::create_dir_all(place.settings.cache.parent().expect("a parent")).expect("dir");
    let ballast = disk.join("ballast");
    place.hub.break_with({
        let ballast = ballast.clone();
        move |ask, _| {
            if large(ask) {
                let _ = fs::write(&ballast, vec![0; 7 << 20]);
            }
            None
        }
    });
    place.files.truncate(3);
    place.files.push(("transformer/model.safetensors", noise(2, 6_000_000)));
    place.commit = place.hub.commit(REPO, &place.files);
    let error = place.fetch_wrong().await;
    assert!(error.kind == Kind::Disk && error.why.contains("No space left"), "{error:?}");
    place.hub.mend();
    fs::remove_file(&ballast).expect("ballast");
    place.fetch_right().await;
    drop(mounted);
}

/// A file system of its own for a test; gone at the end.
struct ReadOnly(std::path::PathBuf);

impl ReadOnly {
    /// `source` again at `target`, read-only. Without the right to mount: the same through a link, by modes.
    fn of(source: &std::path::Path, target: &std::path::Path) -> Self {
        fs::create_dir_all(target).expect("target");
        let run = |arguments: &[&str]| {
            std::process::Command::new("mount").args(arguments).status().is_ok_and(|status| status.success())
        };
        let (from, to) = (source.to_str().expect("UTF-8"), target.to_str().expect("UTF-8"));
        if !(run(&["--bind", from, to]) && run(&["-o", "remount,bind,ro", to])) {
            fs::remove_dir(target).expect("target");
            symlink(source, target).expect("link");
            for dir in [
                "models--org--weights",
                "models--org--weights/blobs",
                "models--org--weights/.files",
                "models--org--weights/refs",
                "models--org--weights/snapshots",
            ] {
                fs::set_permissions(source.join(dir), fs::Permissions::from_mode(0o555)).expect("mode");
            }
        }
        Self(target.into())
    }

    /// An empty file system of `size`.
    fn small(target: &std::path::Path, size: &str) -> Self {
        fs::create_dir_all(target).expect("target");
        let options = format!("size={size}");
        let status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(target)
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "this test mounts a small file system and needs root"
        );
        Self(target.into())
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .stderr(std::process::Stdio::null())
            .status();
    }
}

#[tokio::test]
async fn case_31_an_expired_signed_address_is_replaced_once_and_then_it_is_a_matter_of_access() {
    for (refusals, status) in [(1, 403_u16), (usize::MAX, 403), (usize::MAX, 401)] {
        let place = Place::new().await;
        let storage = Arc::new(Hub::default());
        storage.commit(REPO, &place.files);
        let address = storage.start().await;
        storage
            .break_with(move |ask, _| (large(ask) && ask.before < refusals).then(|| error(status, "", "")));
        place.hub.break_with(move |ask, _| {
            let to = format!("http://localhost:{}{}?signature=secret", address.port(), ask.path);
            large(ask).then(|| (axum::http::StatusCode::FOUND, [(header::LOCATION, to)]).into_response())
        });
        if refusals == 1 {
            place.fetch_right().await;
            assert!(place.noted().contains("asking for a fresh one"), "{}", place.noted());
        } else {
            let error = place.fetch_wrong().await;
            assert!(error.kind == Kind::Auth && error.what.contains("at a fresh address too"), "{error}");
            assert!(error.why.contains(&status.to_string()) && !format!("{error:?}").contains("secret"));
            assert_eq!(place.hub.downloads().iter().filter(|ask| large(ask)).count(), 2);
        }
    }
}

#[tokio::test]
async fn retry_after_may_be_a_date() {
    for (ahead, wait) in [(2, true), (-60, false)] {
        let place = Place::new().await;
        let at = std::time::SystemTime::now();
        let at = if ahead > 0 { at + Duration::from_secs(2) } else { at - Duration::from_mins(1) };
        let date = httpdate::fmt_http_date(at);
        place.hub.break_with(move |ask, _| {
            (large(ask) && ask.before == 0).then(|| {
                let mut response = error(503, "", "");
                response.headers_mut().insert(header::RETRY_AFTER, date.parse().expect("a header"));
                response
            })
        });
        place.fetch_right().await;
        let noted = place.noted();
        // A date has whole seconds, so what is left of two is between one and two.
        let waited = noted.contains("trying again in 1.") || noted.contains("trying again in 2.0");
        assert_eq!(waited, wait, "{noted}");
    }
    let place = Place::new().await;
    place.hub.break_with(|_, _| {
        let mut response = error(429, "", "");
        let date = httpdate::fmt_http_date(std::time::SystemTime::now() + Duration::from_hours(1));
        response.headers_mut().insert(header::RETRY_AFTER, date.parse().expect("a header"));
        Some(response)
    });
    assert!(place.fetch_wrong().await.next.contains("as the server asks"));
}

// SPDX-License-Identifier: Apache-2.0
//! Pushes to a hub that does its part, and to one that does not: afterwards it shows the whole new state or the old.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    body::Bytes,
    http::header,
    response::{IntoResponse as _, Response},
};
use hub::{
    Error, Kind, Progress, Settings,
    http::Client,
    push::{self, Local, Push, Pushed, Visibility},
};
use serde_json::json;

use crate::stand_in::{Ask, CUT, Hub, error, file, noise, sha256, write::account};

const REPO: &str = "org/package";
const TOKEN: &str = "hf_test_token_of_nobody";

/// What the progress was told.
#[derive(Default)]
struct Told {
    notes: Mutex<Vec<String>>,
    totals: Mutex<Vec<(u64, i64)>>,
}

impl Progress for Told {
    fn start(&self, bytes: u64, _: u64, _: usize) {
        self.totals.lock().expect("totals").push((bytes, 0));
    }

    fn add(&self, bytes: i64) {
        if let Some(last) = self.totals.lock().expect("totals").last_mut() {
            last.1 += bytes;
        }
    }

    fn note(&self, text: &str) {
        self.notes.lock().expect("notes").push(text.into());
    }
}

struct Place {
    hub: Arc<Hub>,
    settings: Settings,
    told: Told,
}

type Files = Vec<(&'static str, Bytes)>;

/// A package of a small file in each of two owned directories, a card, and two large files.
fn files() -> Files {
    vec![
        ("README.md", Bytes::from_static(b"---\nlicense: mit\n---\n# One\n")),
        ("code/a.py", Bytes::from_static(b"a = 1\n")),
        ("code/empty", Bytes::new()),
        ("image/blobs/big", noise(1, 3_000_000)),
        ("image/blobs/middle", noise(2, 150_000)),
        ("image/index.json", Bytes::from_static(b"{}")),
    ]
}

/// The same with another card, another large file and one small file less.
fn newer() -> Files {
    let mut files = files();
    files[0].1 = Bytes::from_static(b"---\nlicense: mit\n---\n# Two\n");
    files[4] = ("image/blobs/other", noise(3, 200_000));
    files.remove(1);
    files
}

impl Place {
    async fn new() -> Self {
        let hub = Arc::new(Hub::default());
        let address = hub.start().await;
        let settings = Settings::from(|name| match name {
            "HF_ENDPOINT" => Some(format!("http://{address}").into()),
            "HF_TOKEN" => Some(TOKEN.into()),
            _ => Some("/nonexistent".into()).filter(|_| name == "HF_HUB_CACHE"),
        });
        let mut settings = settings.expect("settings");
        settings.pause = Duration::from_millis(5);
        settings.retries = 3;
        let place = Self { hub, settings, told: Told::default() };
        place.whoami(account("me", "write", &[("org", "write")]));
        place
    }

    fn whoami(&self, value: serde_json::Value) {
        self.hub.write.accounts.lock().expect("hub").insert(TOKEN.into(), value);
    }

    /// With the first package pushed.
    async fn with_package() -> Self {
        let place = Self::new().await;
        place.push(files()).await.expect("a first push");
        place.hub.seen.lock().expect("hub").clear();
        place
    }

    async fn push(&self, files: Files) -> Result<Pushed, Error> {
        self.push_as(files, None, "main").await
    }

    async fn push_as(
        &self,
        files: Files,
        visibility: Option<Visibility>,
        revision: &str,
    ) -> Result<Pushed, Error> {
        let client = Client::new(&self.settings, &self.told)?;
        push::check_permission(&client, REPO).await?;
        let remote = push::look(&client, REPO, revision).await?;
        let push = Push {
            files: files.into_iter().map(|(path, bytes)| Local::bytes(path, bytes)).collect(),
            owned: vec!["code/".into(), "image/".into()],
            summary: "Push".into(),
            visibility,
        };
        push::push(&client, remote, &push).await
    }

    /// What main shows, without the Hub's own file.
    fn shown(&self) -> BTreeMap<String, Bytes> {
        let repos = self.hub.repos.lock().expect("hub");
        let repo = &repos[REPO];
        let mut files = repo.commits[&repo.main].clone();
        files.remove(".gitattributes");
        files
    }

    fn assert_shows(&self, files: Files) {
        let wanted: BTreeMap<String, Bytes> =
            files.into_iter().map(|(path, bytes)| (path.to_owned(), bytes)).collect();
        let shown = self.shown();
        assert_eq!(shown.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
        assert!(shown == wanted, "some bytes differ");
    }

    fn asked(&self, part: &str) -> Vec<Ask> {
        let seen = self.hub.seen.lock().expect("hub");
        seen.iter().filter(|ask| ask.path.contains(part)).cloned().collect()
    }

    fn stored(&self) -> usize {
        self.asked("/storage/").len()
    }

    fn noted(&self) -> String {
        self.told.notes.lock().expect("notes").join("\n")
    }
}

fn put(ask: &Ask) -> bool {
    ask.path.starts_with("/storage/")
}

fn later(status: u16, seconds: &str) -> Response {
    let mut response = error(status, "", "later");
    response.headers_mut().insert(header::RETRY_AFTER, seconds.parse().expect("a header"));
    response
}

#[tokio::test]
async fn a_first_push_creates_a_private_repository_with_one_commit_and_reads_it_back() {
    let place = Place::new().await;
    let pushed = place.push(files()).await.expect("a push");
    place.assert_shows(files());
    assert!(pushed.created && pushed.visibility == Visibility::Private && pushed.files == 6);
    assert!(place.hub.repos.lock().expect("hub")[REPO].private);
    assert_eq!((pushed.sent, pushed.bytes), (3_150_035, 3_150_035));
    assert_eq!(place.hub.write.commits.lock().expect("hub").len(), 1);
    // Each byte was counted on its way out and on its way back, and no more.
    assert_eq!(*place.told.totals.lock().expect("totals"), [(3_150_035, 3_150_035), (3_150_035, 3_150_035)]);
    for path in ["README.md", "image/blobs/big"] {
        assert_eq!(place.asked(&format!("/resolve/{}/{path}", pushed.commit)).len(), 1, "{path}");
    }
    // The token is for the endpoint only.
    let storage = place.asked("/storage/");
    assert!(storage.len() == 2 && storage.iter().all(|ask| !ask.headers.contains_key("authorization")));
    assert!(storage.iter().all(|ask| ask.headers.contains_key("content-length")));
    assert!(place.asked("/api/").iter().all(|ask| ask.headers.contains_key("authorization")));
}

#[tokio::test]
async fn case_13_a_second_push_sends_nothing_and_a_changed_package_only_what_changed() {
    let place = Place::with_package().await;
    let again = place.push(files()).await.expect("the same again");
    assert!(again.sent == 0 && again.changed.is_empty() && place.stored() == 0, "{again:?}");
    assert_eq!(place.hub.write.commits.lock().expect("hub").len(), 1, "no empty commit");
    let pushed = place.push(newer()).await.expect("the newer one");
    assert_eq!(pushed.changed, ["README.md", "image/blobs/other"]);
    assert_eq!(pushed.removed, ["code/a.py", "image/blobs/middle"]);
    assert_eq!((pushed.sent, place.stored()), (200_027, 1));
    place.assert_shows(newer());
}

#[tokio::test]
async fn only_owned_directories_are_swept() {
    let place = Place::new().await;
    place
        .hub
        .commit(REPO, &[("LICENSE", Bytes::from_static(b"mit")), ("code/old.py", Bytes::from_static(b"x"))]);
    let pushed = place.push(files()).await.expect("a push");
    assert_eq!(pushed.removed, ["code/old.py"]);
    assert!(place.shown().contains_key("LICENSE"));
}

#[tokio::test]
async fn large_files_go_in_parts_and_a_part_that_fails_is_sent_again() {
    let place = Place::new().await;
    *place.hub.write.part.lock().expect("hub") = 1_000_000;
    place.hub.break_with(|ask, _| (ask.path.ends_with("/2") && ask.before == 0).then(|| error(500, "", "")));
    place.push(files()).await.expect("a push");
    place.assert_shows(files());
    let parts: Vec<String> = place
        .asked("/storage/")
        .iter()
        .map(|ask| ask.path.trim_start_matches("/storage/")[64..].to_owned())
        .collect();
    assert_eq!(parts.iter().filter(|part| part.as_str() == "/2").count(), 2, "{parts:?}");
    assert_eq!(parts.len(), 5, "three parts, one of them twice, and a file of one: {parts:?}");
    assert_eq!(place.told.totals.lock().expect("totals")[0], (3_150_035, 3_150_035));
}

#[tokio::test]
async fn a_commit_in_between_is_noticed_and_not_overwritten() {
    let place = Place::with_package().await;
    let hub = Arc::downgrade(&place.hub);
    place.hub.break_with(move |ask, _| {
        if ask.path.contains("/commit/") && ask.before == 0 {
            hub.upgrade()?.commit(REPO, &[("theirs", Bytes::from_static(b"1"))]);
        }
        None
    });
    let error = place.push(newer()).await.expect_err("a conflict");
    assert!(error.kind == Kind::Network && error.what.contains("got another commit meanwhile"), "{error}");
    place.assert_shows(vec![("theirs", Bytes::from_static(b"1"))]);
    // The next run builds on it, and the large file is there already.
    let stored = place.stored();
    place.push(newer()).await.expect("a push");
    assert_eq!(place.stored(), stored, "nothing is sent twice");
    assert!(place.shown().contains_key("theirs") && place.shown().contains_key("image/blobs/other"));
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_made_once() {
    let place = Place::with_package().await;
    *place.hub.write.lose.lock().expect("hub") = 1;
    let pushed = place.push(newer()).await.expect("a push");
    place.assert_shows(newer());
    assert_eq!(place.hub.write.commits.lock().expect("hub").len(), 2, "the first push's and one");
    assert_eq!(pushed.commit, place.hub.repos.lock().expect("hub")[REPO].main);
}

#[tokio::test]
async fn permission_is_checked_before_the_first_byte() {
    let place = Place::new().await;
    let mut fine = account("me", "fineGrained", &[("org", "write")]);
    fine["auth"]["accessToken"]["fineGrained"] =
        json!({"scoped": [{"entity": {"type": "org", "name": "org"}, "permissions": ["repo.content.read"]}]});
    for (who, said) in [
        (account("me", "read", &[("org", "write")]), "may only read"),
        (account("me", "write", &[]), "neither that account nor one of its organisations"),
        (account("me", "write", &[("org", "read")]), "may only read in org"),
        (fine.clone(), "has no right to write"),
    ] {
        place.whoami(who);
        let error = place.push(files()).await.expect_err(said);
        assert!(error.kind == Kind::Auth && error.what.contains(said), "{error:?}");
        assert!(error.why.contains("HF_TOKEN") && !format!("{error:?}").contains(TOKEN), "{error:?}");
    }
    fine["auth"]["accessToken"]["fineGrained"]["scoped"][0]["permissions"] = json!(["repo.write"]);
    place.whoami(fine);
    assert_eq!(place.hub.write.commits.lock().expect("hub").len() + place.stored(), 0);
    place.push(files()).await.expect("enough");
    // A token that is refused, and none.
    place.hub.write.accounts.lock().expect("hub").clear();
    let error = place.push(files()).await.expect_err("refused");
    assert!(error.kind == Kind::Auth && error.what.contains("token was refused"), "{error:?}");
    let place = Place { settings: Settings { token: None, ..place.settings.clone() }, ..place };
    let error = place.push(files()).await.expect_err("none");
    assert!(error.kind == Kind::Auth && error.next.contains("HF_TOKEN"), "{error:?}");
}

#[tokio::test]
async fn a_right_that_is_missing_after_all_leaves_the_old_state() {
    for (part, status) in
        [("/preupload/", 403), (".git/info/lfs/", 403), ("/commit/", 403), ("/commit/", 401)]
    {
        let place = Place::with_package().await;
        place.hub.break_with(move |ask, _| ask.path.contains(part).then(|| error(status, "", "No.")));
        let error = place.push(newer()).await.expect_err(part);
        assert!(error.kind == Kind::Auth && error.why.contains("HF_TOKEN"), "{part}: {error:?}");
        place.assert_shows(files());
    }
}

#[tokio::test]
async fn retry_after_is_obeyed_at_every_step() {
    for part in ["/api/whoami-v2", "/preupload/", "/objects/batch", "/storage/", "/verify", "/commit/"] {
        for status in [429, 503] {
            let place = Place::with_package().await;
            place.hub.break_with(move |ask, _| {
                (ask.path.contains(part) && ask.before == 0).then(|| later(status, "0"))
            });
            place.push(newer()).await.unwrap_or_else(|error| panic!("{part}: {error}"));
            place.assert_shows(newer());
            assert!(place.noted().contains(&status.to_string()), "{part}: {}", place.noted());
        }
    }
    let place = Place::with_package().await;
    place.hub.break_with(|ask, _| put(ask).then(|| later(503, "3600")));
    let error = place.push(newer()).await.expect_err("much later");
    assert!(error.kind == Kind::Network && error.next.contains("3600 s"), "{error:?}");
    place.assert_shows(files());
}

#[tokio::test]
async fn a_cut_upload_goes_on_and_one_that_is_always_cut_leaves_the_old_state() {
    let gone = || axum::http::StatusCode::from_u16(CUT).expect("a status").into_response();
    let place = Place::with_package().await;
    place.hub.break_with(move |ask, _| (put(ask) && ask.before == 0).then(gone));
    place.push(newer()).await.expect("a push");
    place.assert_shows(newer());
    assert_eq!(
        place.told.totals.lock().expect("totals")[2],
        (200_027, 200_027),
        "sent in vain does not count"
    );

    let place = Place::new().await;
    place.hub.commit(REPO, &[("old", Bytes::from_static(b"old"))]);
    let big = sha256(&files()[3].1);
    let cut = big.clone();
    place.hub.break_with(move |ask, _| ask.path.ends_with(&cut).then(gone));
    let error = place.push(files()).await.expect_err("cut");
    assert!(error.kind == Kind::Network && error.what.contains("image/blobs/big"), "{error}");
    place.assert_shows(vec![("old", Bytes::from_static(b"old"))]);
    // The file that arrived is not sent again.
    place.hub.mend();
    place.hub.seen.lock().expect("hub").clear();
    place.push(files()).await.expect("a push");
    let sent: Vec<String> = place.asked("/storage/").into_iter().map(|ask| ask.path).collect();
    assert_eq!(sent, [format!("/storage/{big}")]);
}

#[tokio::test]
async fn an_upload_that_nobody_takes_is_given_up() {
    let mut place = Place::with_package().await;
    place.settings.stall = Duration::from_millis(100);
    place.settings.retries = 0;
    *place.hub.write.slow.lock().expect("hub") = Duration::from_mins(1);
    let error = place.push(newer()).await.expect_err("a stall");
    assert!(error.kind == Kind::Network && error.to_string().contains("does not answer"), "{error}");
    place.assert_shows(files());
}

#[tokio::test]
async fn an_expired_address_is_replaced_once() {
    for part in [0, 1_000_000] {
        let place = Place::new().await;
        *place.hub.write.part.lock().expect("hub") = part;
        place.hub.break_with(|ask, _| {
            let first =
                put(ask) && ask.before == 0 && !matches!(ask.path.as_bytes(), [.., b'/', b'2'..=b'9']);
            first.then(|| "<Error>Request has expired</Error>".into_response()).map(|mut response| {
                *response.status_mut() = axum::http::StatusCode::FORBIDDEN;
                response
            })
        });
        place.push(files()).await.expect("a push");
        place.assert_shows(files());
        assert!(place.noted().contains("asking for a fresh one"), "{}", place.noted());
        assert_eq!(place.told.totals.lock().expect("totals")[0], (3_150_035, 3_150_035));
    }
    let place = Place::with_package().await;
    place.hub.break_with(|ask, _| put(ask).then(|| error(403, "", "")));
    let error = place.push(newer()).await.expect_err("refused");
    assert!(error.kind == Kind::Auth && error.what.contains("at a fresh address too"), "{error}");
    assert!(!error.to_string().contains("signature"), "{error}");
    assert_eq!(place.stored(), 2);
    place.assert_shows(files());
}

#[tokio::test]
async fn bytes_that_are_damaged_on_the_way_are_found_before_the_commit() {
    let place = Place::with_package().await;
    *place.hub.write.damage.lock().expect("hub") = 1;
    let error = place.push(newer()).await.expect_err("damaged");
    assert!(error.kind == Kind::Verification && error.what.contains("image/blobs/other"), "{error}");
    place.assert_shows(files());
    place.push(newer()).await.expect("the next run sends it again");
    place.assert_shows(newer());
    // A storage that says nothing about it and lists it as absent.
    let place = Place::with_package().await;
    *place.hub.write.damage.lock().expect("hub") = 1;
    place
        .hub
        .break_with(|ask, _| ask.path.ends_with("/verify").then(|| axum::Json(json!({})).into_response()));
    let error = place.push(newer()).await.expect_err("damaged");
    assert!(error.kind == Kind::Verification && error.why.contains("nothing was committed"), "{error}");
    place.assert_shows(files());
}

#[tokio::test]
async fn case_19_a_wrong_read_back_puts_the_old_files_back() {
    type Lie = fn(&Ask, &Bytes) -> Option<Response>;
    let lies: [(&str, Lie); 3] = [
        ("comes back as 27 bytes", |ask, content| {
            let about = ask.path.ends_with("README.md") && content.ends_with(b"Two\n");
            about.then(|| file(ask, "c", &Bytes::from_static(b"---\nlicense: mit\n---\n# Twu\n")))
        }),
        ("comes back as 100 bytes", |ask, content| {
            ask.path.ends_with("image/blobs/other").then(|| file(ask, "c", &content.slice(..100)))
        }),
        ("is not there", |ask, _| {
            // The second list is that of the new commit.
            (ask.path.contains("/tree/") && ask.before == 0).then(|| axum::Json(json!([])).into_response())
        }),
    ];
    for (said, lie) in lies {
        let place = Place::with_package().await;
        let head = place.hub.repos.lock().expect("hub")[REPO].main.clone();
        place.hub.break_with(move |ask, content| {
            if ask.path.contains(&format!("/tree/{head}")) { None } else { lie(ask, content) }
        });
        let error = place.push(newer()).await.expect_err(said);
        assert!(error.kind == Kind::Verification && error.why.contains(said), "{error}");
        assert!(error.why.contains("again"), "{error}");
        place.assert_shows(files());
    }
    // Nothing to send, and what is served is wrong all the same.
    let place = Place::with_package().await;
    place.hub.break_with(|ask, content| {
        ask.path.ends_with("image/blobs/big").then(|| file(ask, "c", &content.slice(1..)))
    });
    assert_eq!(place.push(files()).await.expect_err("wrong").kind, Kind::Verification);
}

#[tokio::test]
async fn a_read_back_that_cannot_be_made_is_told_and_made_by_the_next_run() {
    let place = Place::with_package().await;
    place.hub.break_with(|ask, _| ask.path.contains("/resolve/").then(|| error(502, "", "")));
    let error = place.push(newer()).await.expect_err("no answer");
    assert!(error.kind == Kind::Network && error.what.contains("could not be read back"), "{error}");
    place.hub.mend();
    let before = place.hub.downloads().len();
    let pushed = place.push(newer()).await.expect("the next run");
    assert_eq!((pushed.sent, place.hub.downloads().len() - before), (0, 5), "every file is read");
}

#[tokio::test]
async fn visibility_is_changed_only_when_asked_hidden_first_and_shown_last() {
    let place = Place::with_package().await;
    let private = || place.hub.repos.lock().expect("hub")[REPO].private;
    place.push_as(newer(), None, "main").await.expect("as it is");
    assert!(private() && place.asked("/settings").is_empty());
    place.push_as(files(), Some(Visibility::Public), "main").await.expect("public");
    let order: Vec<String> = place.hub.seen.lock().expect("hub").iter().map(|ask| ask.path.clone()).collect();
    assert!(!private() && order.last().is_some_and(|path| path.ends_with("/settings")), "{order:?}");
    place.push_as(newer(), None, "main").await.expect("as it is");
    assert!(!private());
    place.hub.break_with(|ask, _| ask.path.contains("/preupload/").then(|| error(403, "", "No.")));
    place.push_as(files(), Some(Visibility::Private), "main").await.expect_err("refused");
    assert!(private(), "hidden before anything is sent");
    assert!(place.noted().contains("making org/package private"), "{}", place.noted());
    // A push that fails shows nothing to more people than before.
    place.push_as(files(), Some(Visibility::Public), "main").await.expect_err("refused");
    assert!(private());
    let place = Place::new().await;
    let pushed = place.push_as(files(), Some(Visibility::Public), "main").await.expect("new and public");
    assert!(pushed.created && !place.hub.repos.lock().expect("hub")[REPO].private);
}

#[tokio::test]
async fn another_branch_is_made_from_main_and_main_stays() {
    let place = Place::with_package().await;
    let pushed = place.push_as(newer(), None, "next/one").await.expect("a branch");
    place.assert_shows(files());
    {
        let repos = place.hub.repos.lock().expect("hub");
        assert_eq!(repos[REPO].branches["next/one"], pushed.commit);
    }
    assert_eq!(place.push_as(newer(), None, "next/one").await.expect("again").commit, pushed.commit);
    let error = place.push_as(newer(), None, &"0".repeat(40)).await.expect_err("a commit");
    assert_eq!(error.kind, Kind::Usage);
}

#[tokio::test]
async fn a_card_that_the_hub_refuses_is_said_before_the_upload() {
    let place = Place::new().await;
    let client = Client::new(&place.settings, &place.told).expect("a client");
    push::check_card(&client, REPO, "---\nlicense: other\nlicense_name: fine\n---\n").await.expect("good");
    let card = "---\nlicense: other\nlicense_name: Some Licence\n---\n";
    let error = push::check_card(&client, REPO, card).await.expect_err("case 24");
    assert!(error.kind == Kind::Verification && error.why.contains("license_name"), "{error}");
}

#[tokio::test]
async fn a_hub_that_only_speaks_xet_or_sends_files_over_plain_http_is_refused() {
    let batch = |value: serde_json::Value| {
        move |ask: &Ask, _: &Bytes| {
            ask.path.ends_with("/objects/batch").then(|| axum::Json(value.clone()).into_response())
        }
    };
    let place = Place::new().await;
    place.hub.break_with(batch(json!({"transfer": "xet", "objects": []})));
    let error = place.push(files()).await.expect_err("xet");
    assert!(error.to_string().contains("xet"), "{error}");
    let oid = sha256(&files()[3].1);
    let object = json!({"oid": oid, "size": 3_000_000, "actions": {"upload": {"href": "ftp://elsewhere/x"}}});
    place.hub.break_with(batch(json!({"objects": [object]})));
    assert!(place.push(files()).await.expect_err("ftp").to_string().contains("not safe"));
    let full =
        json!({"oid": oid, "size": 3_000_000, "error": {"code": 403, "message": "Storage limit reached"}});
    place.hub.break_with(batch(json!({"objects": [full]})));
    let error = place.push(files()).await.expect_err("full").to_string();
    assert!(error.contains("image/blobs/big") && error.contains("Storage limit reached"), "{error}");
    assert_eq!(place.stored(), 0);
}

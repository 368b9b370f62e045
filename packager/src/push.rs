// SPDX-License-Identifier: Apache-2.0
//! A package to the Hub: the whole directory as a repository shows it, in one commit, read back.
//!
//! Everything that can be wrong is looked for before the first byte goes out: the package agrees with itself, its card
//! has front matter that the Hub accepts, the token may write to the target, and a listed package tells what it
//! does and cannot do. Two files differ from the directory's: the card, whose four commands name the target and whose
//! tags list it in the catalogue or not, and the list of digests, which follows the card.

use std::path::{Path, PathBuf};

use hub::{
    Progress, Settings,
    http::{Call, Client},
    push::{self, Local, Push, Remote, Visibility},
    repo::check_id,
};
use serde::Serialize;

use crate::{
    card,
    error::{At, Class, Failure, Result},
    files::{self, FileType},
    verify,
    wire::Wire,
};

/// Directories that hold nothing but what the package holds.
const OWNED: [&str; 2] = ["code/", "image/"];

/// What to push and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The package's directory.
    pub package: PathBuf,
    /// The target; the manifest's without one.
    pub repo: Option<String>,
    /// Who may see it afterwards, if that is to be said.
    pub visibility: Option<Visibility>,
    /// List it in the catalogue.
    pub publish: bool,
    /// The branch.
    pub revision: String,
    /// Send nothing; say what would be sent.
    pub dry_run: bool,
}

/// A file that was or would be sent.
#[derive(Debug, Clone, Serialize)]
pub struct Sent {
    /// Path in the repository.
    pub path: String,
    /// Bytes.
    pub size: u64,
}

/// What a push did, or would do.
#[derive(Debug, Clone, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the result")]
pub struct Report {
    /// organisation/name.
    pub repo: String,
    /// The branch.
    pub revision: String,
    /// The commit that shows the package.
    pub commit: Option<String>,
    /// Where people see it.
    pub url: String,
    /// True if there was no such repository.
    pub created: bool,
    /// Who may see it.
    pub visibility: Visibility,
    /// True if the card is tagged for the catalogue.
    pub listed: bool,
    /// Files of the package.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files that are new or have other bytes.
    pub changed: Vec<Sent>,
    /// Stale files.
    pub removed: Vec<String>,
    /// Bytes sent, or to be sent.
    pub bytes_sent: u64,
    /// False for a dry run.
    pub pushed: bool,
    /// True once the Hub gave all of it back.
    pub read_back: bool,
}

/// Pushes, or says what a push would do.
///
/// # Errors
/// The first thing that is wrong; before the commit the repository shows what it showed.
pub async fn push(options: &Options, settings: &Settings, progress: &dyn Progress) -> Result<Report> {
    let dir = &options.package;
    let wire = verify::read_wire(dir)?;
    let repo = target(options, &wire)?;
    if settings.offline {
        let failure = Failure::new(Class::Network, format!("{repo} cannot be pushed to offline"));
        return Err(failure.why("HF_HUB_OFFLINE is set").next("unset HF_HUB_OFFLINE"));
    }
    if options.publish {
        check_listing(&wire, &repo)?;
    }
    let own = dir.join(card::FILE);
    let own = std::fs::read_to_string(&own).at("read", &own)?;
    card::check_front_matter(&own)?;
    verify::verify(dir)?;

    let client = Client::new(settings, progress)?;
    push::check_permission(&client, &repo).await?;
    let remote = push::look(&client, &repo, &options.revision).await?;
    let was_listed = was_listed(&client, &remote).await?;
    let private = options.visibility == Some(Visibility::Private);
    let listed = options.publish || (was_listed && !private);
    if listed {
        check_listing(&wire, &repo)?;
    }
    // A package that was fetched from elsewhere names that place.
    let named = card::target(&own).is_none_or(|named| named == repo);
    let text = card::set_listed(&if named { own } else { card::repoint(&own, &repo) }, listed);
    if !options.dry_run {
        push::check_card(&client, &repo, &text).await?;
    }
    let push = Push {
        files: contents(dir, &text)?,
        owned: OWNED.map(str::to_owned).into(),
        summary: format!("Push {} ({})", wire.name, wire.container.image.tag),
        visibility: options.visibility,
    };
    let plan = push::plan(&remote, &push);
    let sent = |file: &Local| Sent { path: file.path.clone(), size: file.size };
    let now = remote.visibility.unwrap_or(Visibility::Private);
    let mut report = Report {
        url: format!("{}/{repo}", settings.endpoint.as_str().trim_end_matches('/')),
        repo,
        revision: options.revision.clone(),
        commit: None,
        created: remote.visibility.is_none(),
        visibility: options.visibility.unwrap_or(now),
        listed,
        files: push.files.len(),
        bytes: push.files.iter().map(|file| file.size).sum(),
        changed: plan.changed.iter().map(sent).collect(),
        removed: plan.removed.clone(),
        bytes_sent: plan.changed.iter().map(|file| file.size).sum(),
        pushed: false,
        read_back: false,
    };
    if options.dry_run {
        return Ok(report);
    }
    let pushed = push::push(&client, remote, &push).await?;
    report.commit = Some(pushed.commit);
    report.bytes_sent = pushed.sent;
    (report.pushed, report.read_back) = (true, true);
    Ok(report)
}

fn target(options: &Options, wire: &Wire) -> Result<String> {
    let repo = options.repo.clone().unwrap_or_else(|| wire.repo().to_owned());
    if repo.is_empty() {
        let failure =
            Failure::new(Class::Usage, format!("{} records no target repo", options.package.display()));
        return Err(failure.next("name one with --repo"));
    }
    check_id(&repo)?;
    Ok(repo)
}

/// A listed package tells what it does and what it cannot do.
fn check_listing(wire: &Wire, repo: &str) -> Result<()> {
    let card = wire.container.card.clone().unwrap_or_default();
    let blank = |text: &Option<String>| text.as_deref().is_none_or(|text| text.trim().is_empty());
    let missing: Vec<&str> =
        [("performance", blank(&card.performance)), ("limitations", blank(&card.limitations))]
            .into_iter()
            .filter(|(_, blank)| *blank)
            .map(|(name, _)| name)
            .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let failure = Failure::new(
        Class::Manifest,
        format!("{repo} cannot be listed without card.{}", missing.join(" and card.")),
    );
    Err(failure
        .why("whoever picks a package from the catalogue must find both on its card")
        .next("write them into the manifest and build again, or take the listing away with --private"))
}

/// Whether the repository's card is tagged for the catalogue now. What cannot be read is a failure.
async fn was_listed(client: &Client<'_>, remote: &Remote) -> Result<bool> {
    if !remote.files.iter().any(|file| file.path == card::FILE) {
        return Ok(false);
    }
    let call = Call::get(client.file_url(&remote.repo, &remote.head, card::FILE)?);
    let answer = client.ask("reading the card that is there", &remote.repo, &call, &[]).await?;
    Ok(card::is_listed(&String::from_utf8_lossy(&answer.body)))
}

/// Every file of the package as the repository is to show it.
fn contents(dir: &Path, card: &str) -> Result<Vec<Local>> {
    let sums = verify::sums_with(dir, card::FILE, card.as_bytes())?;
    let mut files = Vec::new();
    for entry in files::walk(dir)? {
        if !matches!(entry.class, FileType::File(_)) || entry.path == ".gitattributes" {
            continue;
        }
        files.push(match entry.path.as_str() {
            card::FILE => Local::bytes(&entry.path, card.to_owned().into()),
            verify::SUMS => Local::bytes(&entry.path, sums.clone().into()),
            _ => Local::file(&entry.path, &entry.full)?,
        });
    }
    Ok(files)
}

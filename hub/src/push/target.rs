// SPDX-License-Identifier: Apache-2.0
//! Where a push goes: who the token is and what it may, whether the repository and the branch are there, what they
//! hold, and the changes that are no commit: creating both, and who may see the repository.
//!
//! Source: what huggingface_hub 2.4 sends and reads (`whoami`, `create_repo`, `create_branch`,
//! `update_repo_settings`, `_validate_yaml`).

use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    error::{Error, Kind, Result},
    http::{Call, Client, hub},
    listing::{self, File},
    repo::{check_id, check_revision, encode, is_commit},
};

/// Who may see a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Visibility {
    /// Its owners.
    Private,
    /// Everybody.
    Public,
}

impl Visibility {
    /// The Hub's word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Public => "public",
        }
    }
}

/// A repository as it is before a push.
#[derive(Debug, Clone)]
pub struct Remote {
    /// organisation/name.
    pub repo: String,
    /// Branch.
    pub revision: String,
    /// Who may see it; none if there is no such repository.
    pub visibility: Option<Visibility>,
    /// True if the branch is there.
    pub branch: bool,
    /// The commit that a push builds on; "" if there is no repository.
    pub head: String,
    /// What it holds.
    pub files: Vec<File>,
}

/// What the token may, as far as the Hub tells: a push that must fail fails before the first byte.
///
/// # Errors
/// No token, one that is refused, may only read, or belongs to somebody else than the repository.
pub async fn check_permission(client: &Client<'_>, repo: &str) -> Result<String> {
    let source = client.settings.token_source();
    let auth = |what: String, next: &str| Err(Error::new(Kind::Auth, what).why(&source).next(next));
    if client.settings.token.is_none() {
        return auth(
            format!("a push to {repo} needs a token"),
            "set HF_TOKEN to a token with the right to write, or run `hf auth login`",
        );
    }
    let url = client.url("api/whoami-v2")?;
    let who = client.ask("asking whose the token is", repo, &Call::get(url), &[]).await?.json();
    let Some(name) = who["name"].as_str() else {
        return Err(hub("the Hub does not say whose the token is".into(), "field name"));
    };
    let namespace = repo.split('/').next().unwrap_or_default();
    let token = &who["auth"]["accessToken"];
    let next = "make a token with the right to write at the Hub's settings/tokens, and set HF_TOKEN to it";
    if token["role"] == "read" {
        return auth(format!("the token of {name} may only read, and {repo} is to be written"), next);
    }
    let organisations = who["orgs"].as_array().cloned().unwrap_or_default();
    let organisation = organisations
        .iter()
        .find(|org| org["name"].as_str().is_some_and(|org| org.eq_ignore_ascii_case(namespace)));
    if !name.eq_ignore_ascii_case(namespace) {
        match organisation {
            None => {
                let what = format!(
                    "{name} may not write to {repo}: {namespace} is neither that account nor one of its organisations"
                );
                return auth(
                    what,
                    "give a repository of your own with --repo, or use a token of that organisation's member",
                );
            }
            Some(organisation) if organisation["roleInOrg"] == "read" => {
                return auth(
                    format!("{name} may only read in {namespace}, and {repo} is to be written"),
                    "ask an administrator of the organisation for the right to write",
                );
            }
            Some(_) => {}
        }
    }
    if let Some(scopes) = token["fineGrained"]["scoped"].as_array() {
        let writes = |scope: &Value| {
            let entity = scope["entity"]["name"].as_str().unwrap_or_default();
            let about = [namespace, repo].iter().any(|name| entity.eq_ignore_ascii_case(name));
            let permissions = scope["permissions"].as_array();
            about && permissions.is_some_and(|list| list.iter().any(|permission| permission == "repo.write"))
        };
        if !scopes.iter().any(writes) {
            return auth(format!("the token of {name} has no right to write to {repo}"), next);
        }
    }
    Ok(name.to_owned())
}

/// What is there now.
pub async fn look(client: &Client<'_>, repo: &str, revision: &str) -> Result<Remote> {
    check_id(repo)?;
    check_revision(revision)?;
    if is_commit(revision) {
        return Err(Error::new(Kind::Usage, format!("{revision} is a commit, and a push makes a new one"))
            .next("name a branch with --revision, or leave it out for main"));
    }
    let absent = Remote {
        repo: repo.into(),
        revision: revision.into(),
        visibility: None,
        branch: false,
        head: String::new(),
        files: Vec::new(),
    };
    let what = format!("asking for {repo}");
    let answer =
        client.ask(&what, repo, &Call::get(client.url(&format!("api/models/{repo}"))?), &[404]).await?;
    if answer.status == 404 {
        return Ok(absent);
    }
    let about = answer.json();
    let visibility = if about["private"] == json!(true) { Visibility::Private } else { Visibility::Public };
    let url = client.url(&format!("api/models/{repo}/revision/{}", encode(revision, false)))?;
    let answer = client.ask(&format!("{what}@{revision}"), repo, &Call::get(url), &[404]).await?;
    let branch = answer.status != 404;
    let head = if branch { answer.json()["sha"].clone() } else { about["sha"].clone() };
    let Some(head) = head.as_str().filter(|head| is_commit(head)) else {
        return Err(hub(format!("the Hub names no commit for {repo}@{revision}"), "field sha"));
    };
    let files = listing::files(client, repo, head).await?;
    Ok(Remote { visibility: Some(visibility), branch, head: head.into(), files, ..absent })
}

/// Lets the Hub check the front matter of a card: what it refuses now it would refuse after the upload.
pub async fn check_card(client: &Client<'_>, repo: &str, card: &str) -> Result<()> {
    let url = client.url("api/validate-yaml")?;
    let call = Call::post(url, &json!({"repoType": "model", "content": card}));
    let answer = client.ask("letting the Hub check the card", repo, &call, &[400, 404, 422]).await?;
    let messages = |key: &str| {
        let list = answer.json()[key].as_array().cloned().unwrap_or_default();
        let list: Vec<String> =
            list.iter().filter_map(|entry| entry["message"].as_str().map(str::to_owned)).collect();
        list.join("; ")
    };
    let warnings = messages("warnings");
    if !warnings.is_empty() {
        client.progress.note(&format!("the Hub about the card: {warnings}"));
    }
    // A mirror without this question decides at the commit.
    if matches!(answer.status, 400 | 422) || !messages("errors").is_empty() {
        let error = Error::new(Kind::Verification, "the Hub does not accept the card's front matter");
        return Err(error
            .why(messages("errors"))
            .next("correct the card section of the manifest and build again"));
    }
    Ok(())
}

/// Creates the repository. One that somebody created a moment ago is as good.
pub async fn create(client: &Client<'_>, repo: &str, visibility: Visibility) -> Result<()> {
    let (organisation, name) = repo.split_once('/').unwrap_or_default();
    let body =
        json!({"name": name, "organization": organisation, "type": "model", "visibility": visibility.name()});
    let call = Call::post(client.url("api/repos/create")?, &body);
    client.ask(&format!("creating {repo}"), repo, &call, &[409]).await.map(|_| ())
}

/// Creates a branch at a commit.
pub async fn create_branch(client: &Client<'_>, remote: &Remote) -> Result<()> {
    let Remote { repo, revision, head, .. } = remote;
    let url = client.url(&format!("api/models/{repo}/branch/{}", encode(revision, false)))?;
    let call = Call::post(url, &json!({"startingPoint": head}));
    client.ask(&format!("creating the branch {revision} of {repo}"), repo, &call, &[409]).await.map(|_| ())
}

/// Changes who may see a repository.
pub async fn set_visibility(client: &Client<'_>, repo: &str, visibility: Visibility) -> Result<()> {
    let mut call = Call::post(
        client.url(&format!("api/models/{repo}/settings"))?,
        &json!({"visibility": visibility.name()}),
    );
    call.method = Method::PUT;
    client.ask(&format!("making {repo} {}", visibility.name()), repo, &call, &[]).await.map(|_| ())
}

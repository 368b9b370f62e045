// SPDX-License-Identifier: Apache-2.0
//! The model card `README.md`, computed from the wire manifest alone: what the card says is what the
//! manifest says, and `verify` can compute it again. The order of sections is that of the format
//! (section G.2); the text is in `card.md.j2`.

use std::collections::BTreeSet;

use minijinja::{Environment, UndefinedBehavior, value::Serde};
use serde_json::{Value, json};

use crate::{
    error::{Class, Failure, Result},
    manifest::license::{one_line, slug},
    wire::Wire,
};

/// File name in the package.
pub const FILE: &str = "README.md";

/// Renders the card.
pub fn render(wire: &Wire) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::SemiStrict);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.add_filter("cell", |text: String| one_line(&text).replace('|', "\\|"));
    let failed = |error: minijinja::Error| {
        Failure::new(Class::Failure, "the model card cannot be rendered").why(error)
    };
    let template = environment.template_from_str(include_str!("card.md.j2")).map_err(failed)?;
    let text = template.render(Serde(values(wire))).map_err(failed)?;
    Ok(tidy(&text))
}

fn values(wire: &Wire) -> Value {
    let profiles: Vec<Value> = wire
        .profiles()
        .into_iter()
        .map(|profile| {
            let capabilities = profile.serve.capabilities;
            json!({
                "name": profile.name, "hardware": profile.serve.hardware, "mesh": profile.serve.mesh_device,
                "max_num_seqs": profile.serve.max_num_seqs, "max_model_len": profile.serve.max_model_len,
                "tool_parser": capabilities.as_ref().and_then(|c| c.tool_parser.clone()),
                "reasoning_parser": capabilities.as_ref().and_then(|c| c.reasoning_parser.clone()),
            })
        })
        .collect();
    let hardware: BTreeSet<String> =
        profiles.iter().filter_map(|p| p["hardware"].as_str()).map(str::to_owned).collect();
    let card = wire.container.card.clone().unwrap_or_default();
    let mut tags: BTreeSet<String> = ["tt-model-cache", "tt-model-container"].map(str::to_owned).into();
    tags.extend([wire.arch.clone(), wire.container.kind.clone()]);
    tags.extend(hardware.iter().map(|label| label.to_lowercase()));
    let license = card.license.as_ref().map(|license| {
        let (id, name) = (one_line(&license.id), license.name.as_deref().map(one_line));
        json!({
            "id": id, "name": name.as_deref().map(slug), "link": license.link.as_deref().map(one_line),
            "display": name.clone().unwrap_or(id.clone()),
        })
    });
    let vllm = wire.container.kind.starts_with("vllm");
    let base_model = card
        .base_model
        .clone()
        .filter(|list| !list.is_empty())
        .unwrap_or_else(|| vec![wire.weights.repo_id.clone()]);
    let weights: Vec<Value> = std::iter::once(&wire.weights)
        .chain(&wire.auxiliary_weights)
        .map(|w| json!({"repo_id": w.repo_id, "revision": w.revision}))
        .collect();
    let mut texts = serde_json::to_value(&card).expect("plain data");
    for text in texts.as_object_mut().into_iter().flat_map(|map| map.values_mut()) {
        if let Value::String(value) = text {
            // Blank is as good as absent, and the template sets the distances.
            *text = if value.trim().is_empty() { Value::Null } else { json!(value.trim()) };
        }
    }
    json!({
        "name": wire.name, "schema": wire.schema_version, "repo": wire.repo(), "tags": tags, "license": license, "weights": weights,
        "producer": format!("packager {}", wire.producer.tt_kernel_version),
        "pipeline_tag": card.pipeline_tag.as_deref().map(one_line).or(vllm.then(|| "text-generation".to_owned())),
        "base_model": base_model.iter().map(|model| one_line(model)).collect::<Vec<_>>(),
        "hardware": hardware,
        "context": profiles.iter().filter_map(|p| p["max_model_len"].as_u64()).max(),
        "any_seqs": profiles.iter().any(|p| !p["max_num_seqs"].is_null()),
        "any_len": profiles.iter().any(|p| !p["max_model_len"].is_null()),
        "profiles": profiles, "default_profile": wire.default_profile(), "openai": vllm, "card": texts,
        "server": if vllm { "vLLM's OpenAI-compatible server" } else { "the model's own HTTP server" },
        "ready_line": wire.ready_line(), "provenance": provenance(wire),
        "unpinned": list(wire, "unpinned"), "shipped": list(wire, "shipped"),
    })
}

fn list(wire: &Wire, key: &str) -> Vec<String> {
    let items = wire.container.built.get(key).and_then(Value::as_array);
    items.into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

fn provenance(wire: &Wire) -> Vec<(String, String)> {
    let short =
        |digest: &str| format!("{} (sha256, first 16 hex digits)", digest.get(..16).unwrap_or(digest));
    let mut rows = Vec::new();
    let mut row = |name: &str, value: String| {
        if !value.is_empty() {
            rows.push((name.to_owned(), value));
        }
    };
    row("tt-metal", tt_metal(wire));
    for part in ["vllm", "plugin"] {
        let source = |key: &str| wire.built(&format!("{part}/{key}")).to_owned();
        row(
            part,
            [source("sha"), source("wheel")].into_iter().find(|text| !text.is_empty()).unwrap_or_default(),
        );
    }
    for (key, name) in [
        ("code_sha256", "`code/` digest"),
        ("code_tree_sha256", "`code/` tree digest"),
        ("server_sha256", "server source digest"),
        ("cargo_lock_sha256", "Cargo.lock digest"),
    ] {
        let digest = wire.built(key);
        row(name, if digest.is_empty() { String::new() } else { short(digest) });
    }
    for (name, image) in
        wire.container.built.get("base_images").and_then(Value::as_object).into_iter().flatten()
    {
        row(&format!("base image {name}"), image.as_str().unwrap_or_default().to_owned());
    }
    row("toolchain", wire.built("toolchain").to_owned());
    let image = &wire.container.image;
    if image.registry == "hf" {
        row("image", image.digest.clone().unwrap_or_default());
    } else {
        row("image", wire.built("image_digest").to_owned());
        let digest = image.digest.as_deref().unwrap_or_default();
        row("image in its registry", format!("{}/{}@{digest}", image.registry, image.repository));
    }
    row("built", format!("{} by packager {}", wire.built("created_at"), wire.built("tt_model_version")));
    rows
}

/// A commit becomes a link only where it can be followed.
fn tt_metal(wire: &Wire) -> String {
    let Some(metal) = wire.container.built.get("tt_metal") else { return String::new() };
    if let Some(wheel) = metal["wheel"].as_str() {
        let digest =
            metal["wheel_sha256"].as_str().map(|digest| format!(", sha256 {digest}")).unwrap_or_default();
        let absent = if wire.has_wheel() { "" } else { "; not in this image, which runs without a card" };
        return format!("{wheel}{digest}{absent}");
    }
    let dirty = if metal["dirty"] == json!(true) { " (dirty tree)" } else { "" };
    let published = metal["mode"] == "git" || metal["pushed"] == json!(true);
    match (metal["sha"].as_str(), metal["remote"].as_str()) {
        (Some(sha), Some(remote)) if published && remote.starts_with("https://") => {
            format!("[{sha}]({}/commit/{sha}){dirty}", remote.trim_end_matches(".git"))
        }
        (Some(sha), _) => format!("{sha}{dirty}, local checkout, not published"),
        (None, _) => "local checkout, not published".into(),
    }
}

/// Starts of the generated lines that name the repository (section D.3).
const COMMANDS: [&str; 4] = ["tt model pull ", "tt serve ", "tt-model pull  ", "tt-model serve "];

/// The command and the repository that a line of the card names, and what follows.
fn command(line: &str) -> Option<(&'static str, &str, &str)> {
    let start = COMMANDS.into_iter().find(|start| line.starts_with(start))?;
    let rest = &line[start.len()..];
    let (repo, after) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
    hub::repo::check_id(repo).is_ok().then_some((start, repo, after))
}

/// The card with its commands pointed at `repo`; prose stays as it is.
pub fn repoint(card: &str, repo: &str) -> String {
    let line = |line: &str| match command(line) {
        Some((start, _, after)) => format!("{start}{repo}{after}\n"),
        None => format!("{line}\n"),
    };
    card.lines().map(line).collect()
}

/// The repository that the card's commands name.
pub fn target(card: &str) -> Option<&str> {
    card.lines().find_map(command).map(|(_, repo, _)| repo)
}

/// The tag that lists a package in the catalogue.
const LISTED: &str = "tt-model-catalog";

/// The card with or without the catalogue's tag; the tags stay sorted.
pub fn set_listed(card: &str, listed: bool) -> String {
    let own = format!("- {LISTED}");
    let mut out = String::new();
    let (mut tags, mut placed) = (false, !listed);
    for (number, line) in card.lines().enumerate() {
        if tags && line == own {
            continue;
        }
        if tags && !placed && (!line.starts_with("- ") || line > own.as_str()) {
            out.push_str(&own);
            out.push('\n');
            placed = true;
        }
        // The first line after the fence that the renderer writes.
        tags = line.starts_with("- ") && tags || number == 1 && line == "tags:";
        out.push_str(line);
        out.push('\n');
    }
    out
}

/// The front matter of a card.
pub fn front_matter(card: &str) -> Result<Value> {
    let wrong = |why: String| {
        Failure::new(Class::Verify, format!("{FILE} has no front matter that the Hub accepts"))
            .why(why)
            .next("correct the card section of the manifest and build again")
    };
    let front =
        card.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---\n")).map(|(front, _)| front);
    let front = front.ok_or_else(|| wrong("it does not start with a block between two lines ---".into()))?;
    serde_yaml::from_str(front).map_err(|error| wrong(error.to_string()))
}

/// True if a card is tagged for the catalogue. One whose front matter cannot be read counts as listed: the rules of a
/// listing are then kept in doubt.
pub fn is_listed(card: &str) -> bool {
    front_matter(card).map_or(true, |front| {
        front["tags"].as_array().is_some_and(|tags| tags.iter().any(|tag| tag == LISTED))
    })
}

/// Checks what the Hub checks at the commit, which would be after the upload.
pub fn check_front_matter(card: &str) -> Result<()> {
    let front = front_matter(card)?;
    let wrong = |why: String| {
        Err(Failure::new(Class::Verify, format!("{FILE} has front matter that the Hub does not accept"))
            .why(why)
            .next("correct the card section of the manifest and build again"))
    };
    let strings = |key: &str| match &front[key] {
        Value::Null => true,
        Value::Array(list) => list.iter().all(Value::is_string),
        _ => false,
    };
    if !front.is_object() {
        return wrong("it is no mapping".into());
    }
    for key in ["tags", "base_model"] {
        if !strings(key) {
            return wrong(format!("{key} is no list of texts"));
        }
    }
    match &front["license"] {
        Value::Null => {}
        Value::String(id) if crate::manifest::license::ids().any(|known| known == id) => {
            let name = front["license_name"].as_str();
            if id == "other" && name.is_none_or(|name| name.is_empty() || slug(name) != name) {
                return wrong(
                    "license is other, and license_name is not in lower case with single dashes".into(),
                );
            }
        }
        other => return wrong(format!("license {other} is not one of the Hub's identifiers")),
    }
    Ok(())
}

/// One blank line at most, one newline at the end.
fn tidy(text: &str) -> String {
    let mut out = String::new();
    let mut blank = 0;
    let mut fenced = false;
    for line in text.lines() {
        let line = line.trim_end();
        fenced ^= line.trim_start().starts_with("```");
        blank = if line.is_empty() { blank + 1 } else { 0 };
        if blank < 2 || fenced {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

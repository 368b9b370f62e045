// SPDX-License-Identifier: Apache-2.0
//! The commands an author uses before anything is built.

use std::{
    fmt::Write as _,
    fs,
    io::{IsTerminal as _, Write as _},
    path::Path,
};

use clap::CommandFactory as _;
use serde_json::json;

use super::{
    Cli,
    args::{InitArgs, PinArgs},
    output::Output,
};
use crate::{
    digest,
    error::{At, Class, Failure, Result},
    files,
    manifest::{self, init::Answers, schema},
    pins::{self, Lock},
};

/// `packager check`.
pub fn check(path: &Path, output: Output) -> Result<()> {
    let loaded = manifest::load(path)?;
    let text =
        format!("{} is valid: {} for {}\n", path.display(), loaded.manifest.name, loaded.manifest.repo);
    output.result(&json!({"valid": true, "name": loaded.manifest.name, "repo": loaded.manifest.repo}), &text);
    Ok(())
}

/// `packager schema`.
pub fn schema() {
    let text = serde_json::to_string_pretty(schema::schema()).expect("a schema is plain data");
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// `packager digest`.
pub fn digest(dir: &Path, output: Output) -> Result<()> {
    let digests = digest::digest(dir)?;
    let text = format!(
        "code_sha256       {}\ncode_tree_sha256  {}\n",
        digests.code_sha256, digests.code_tree_sha256
    );
    output.result(&digests, &text);
    Ok(())
}

/// `packager init`.
pub fn init(path: &Path, args: InitArgs, output: Output) -> Result<()> {
    if path.exists() && !args.force {
        let failure = Failure::new(Class::Usage, format!("{} exists", path.display()));
        return Err(failure.next("give another file with --manifest, or replace it with --force"));
    }
    let ask = |given: Option<String>, flag: &str, question: &str, example: &str| {
        if let Some(answer) = given {
            return Ok(answer);
        }
        if !std::io::stdin().is_terminal() {
            return Err(Failure::new(Class::Usage, format!("--{flag} is missing"))
                .next(format!("give --{flag} {example}")));
        }
        let _ = write!(std::io::stderr(), "{question} [{example}]: ");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).at("read", Path::new("the terminal"))?;
        let line = line.trim();
        Ok(if line.is_empty() { example.to_owned() } else { line.to_owned() })
    };
    let answers = Answers {
        repo: ask(args.repo, "repo", "Where is the package published", "organisation/model-p100a")?,
        weights: ask(args.weights, "weights", "Where are the weights", "organisation/model")?,
        hardware: ask(args.hardware, "hardware", "Which boards does it run on", "p100a")?,
        code: ask(args.code, "code", "Which directory of model code ships", "code")?,
        server: ask(args.server, "server", "Which program serves HTTP", "server")?,
    };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let text = manifest::init::render(&answers, dir).map_err(|problems| {
        let list: Vec<String> = problems
            .iter()
            .map(|p| format!("{}: expected {}, found {}", p.key, p.expected, p.found))
            .collect();
        let mut failure =
            Failure::new(Class::Manifest, "these answers give no valid manifest").why(list.join("; "));
        failure.next = "correct them and run init again; nothing was written".into();
        failure
    })?;
    files::write_aside(path, text.as_bytes())?;
    output.result(
        &json!({"written": path}),
        &format!("wrote {}; next: packager check, packager pin\n", path.display()),
    );
    Ok(())
}

/// `packager pin`.
pub async fn pin(path: &Path, args: PinArgs, output: Output) -> Result<()> {
    let loaded = manifest::load(path)?;
    let options = pins::Options {
        offline: args.offline,
        wheels: args.wheels,
        base_images: args.base_image.into_iter().collect(),
    };
    let now = pins::resolve(&loaded, &options).await?;
    if args.check {
        return check_pins(&loaded.dir, &now, output);
    }
    now.write(&loaded.dir)?;
    let mut text = format!("wrote {}\n", loaded.dir.join(pins::FILE).display());
    for miss in &now.unpinned {
        let _ = writeln!(text, "not pinned: {}: {}", miss.what, miss.why);
    }
    for miss in &now.unlisted {
        let _ = writeln!(text, "not listed: {}: {}", miss.what, miss.why);
    }
    output.result(&now, &text);
    Ok(())
}

fn check_pins(dir: &Path, now: &Lock, output: Output) -> Result<()> {
    let Some(locked) = Lock::read(dir)? else {
        return Err(Failure::new(Class::Manifest, format!("there is no {}", pins::FILE))
            .next("write it with `packager pin`"));
    };
    let drift = pins::drift(&locked, now);
    if drift.is_empty() {
        output.result(
            &json!({"drift": [], "unpinned": locked.unpinned}),
            "manifest.lock agrees with what can be resolved now\n",
        );
        return Ok(());
    }
    let list: Vec<String> =
        drift.iter().map(|d| format!("{}: locked {}, now {}", d.what, d.locked, d.now)).collect();
    let failure = Failure::new(Class::Verify, format!("{} differs in {} places", pins::FILE, drift.len()))
        .why(list.join("; "));
    Err(failure.next("if the change is wanted, run `packager pin` and review the difference"))
}

/// `packager help`.
pub fn help(topic: &[String]) -> Result<()> {
    if topic.iter().map(String::as_str).eq(["manifest"]) {
        let _ = std::io::stdout().write_all(manifest::help::text().as_bytes());
        return Ok(());
    }
    if topic.iter().map(String::as_str).eq(["json"]) {
        let _ = std::io::stdout().write_all(super::json::text().as_bytes());
        return Ok(());
    }
    let mut command = Cli::command();
    command.build();
    let mut found = &mut command;
    for name in topic {
        let unknown = || {
            Failure::new(Class::Usage, format!("there is no help on {name}"))
                .next("topics: manifest, json, or a command of `packager --help`")
        };
        found = found.find_subcommand_mut(name).ok_or_else(unknown)?;
    }
    let _ = std::io::stdout().write_all(found.render_long_help().to_string().as_bytes());
    Ok(())
}

/// `packager man`.
pub fn man(dir: Option<&Path>) -> Result<()> {
    match dir {
        Some(dir) => {
            fs::create_dir_all(dir).at("create", dir)?;
            clap_mangen::generate_to(Cli::command(), dir).at("write the manual pages to", dir)
        }
        None => clap_mangen::Man::new(Cli::command())
            .render(&mut std::io::stdout())
            .at("write", Path::new("the manual page")),
    }
}

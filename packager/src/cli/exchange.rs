// SPDX-License-Identifier: Apache-2.0
//! The commands that talk to the Hub and to registries.

use std::{fmt::Write as _, path::Path, sync::Arc};

use hub::{Settings, bar::Bar, progress::size, push::Visibility};

use super::{
    args::{FetchArgs, PushArgs},
    output::Output,
};
use crate::{
    error::{Class, Failure, Result},
    fetch, manifest,
    pins::Lock,
    push,
    registry::{self, Credentials, Options, Target},
};

/// `packager fetch`.
pub async fn fetch(manifest: &Path, args: FetchArgs, output: Output) -> Result<()> {
    let mut wants = if let Some(name) = &args.package {
        vec![fetch::package(name)]
    } else {
        let loaded = manifest::load(manifest)?;
        fetch::weights(&loaded, Lock::read(&loaded.dir)?.as_ref())
    };
    for want in &mut wants {
        want.verify = args.verify;
        if !args.include.is_empty() {
            want.allow.clone_from(&args.include);
        }
        if !args.exclude.is_empty() {
            want.ignore.clone_from(&args.exclude);
        }
    }
    let settings = Settings::from_environment()?;
    let bar = Bar::new(settings.progress && !output.json);
    let fetched = hub::fetch(&settings, &wants, &bar).await?;
    let mut text = String::new();
    for one in &fetched {
        let how = match one.downloaded {
            0 => "already here".into(),
            bytes => format!("{} downloaded", size(bytes)),
        };
        let _ = writeln!(text, "{}", one.snapshot.display());
        output.note(&format!(
            "{}@{}: {} files, {}, {how}",
            one.repo,
            one.revision,
            one.files,
            size(one.bytes)
        ));
    }
    output.result(&fetched, &text);
    Ok(())
}

/// `packager push`.
pub async fn push(args: PushArgs, output: Output) -> Result<()> {
    match args.registry.clone() {
        Some(registry) => push_image(args, &registry, output).await,
        None => push_package(args, output).await,
    }
}

/// To the Hub.
async fn push_package(args: PushArgs, output: Output) -> Result<()> {
    let options = push::Options {
        package: args.package,
        repo: args.repo,
        visibility: match (args.private, args.public || args.publish) {
            (true, _) => Some(Visibility::Private),
            (_, true) => Some(Visibility::Public),
            _ => None,
        },
        publish: args.publish,
        revision: args.revision,
        dry_run: args.dry_run,
    };
    let settings = Settings::from_environment()?;
    let bar = Bar::new(settings.progress && !output.json);
    let report = tokio::select! {
        report = push::push(&options, &settings, &bar) => report?,
        _ = tokio::signal::ctrl_c() => {
            let failure = Failure::new(Class::Interrupted, "the push was interrupted");
            return Err(failure.next("run it again: large files that arrived are not sent again"));
        }
    };
    let mut text = String::new();
    for file in &report.changed {
        let _ = writeln!(
            text,
            "{:<6}  {:>9}  {}",
            if report.pushed { "sent" } else { "send" },
            size(file.size),
            file.path
        );
    }
    for path in &report.removed {
        let _ = writeln!(text, "{:<6}  {:>9}  {path}", if report.pushed { "gone" } else { "remove" }, "");
    }
    let _ = writeln!(
        text,
        "{} files, {}; {} of them new or changed, {}; {} {} listed",
        report.files,
        size(report.bytes),
        report.changed.len(),
        if report.pushed {
            format!("{} sent", size(report.bytes_sent))
        } else {
            format!("{} to send", size(report.bytes_sent))
        },
        report.visibility.name(),
        if report.listed { "and" } else { "and not" },
    );
    if let Some(commit) = &report.commit {
        let _ = writeln!(text, "read back as pushed\n{}@{commit}", report.repo);
    }
    let _ = writeln!(text, "{}", report.url);
    output.result(&report, &text);
    Ok(())
}

/// To a registry.
async fn push_image(args: PushArgs, registry: &str, output: Output) -> Result<()> {
    let target = Target::parse(registry)?;
    let credentials = Credentials::find(&target.host)?;
    output.note(&format!("{} with {}", target.host, credentials.source));
    let options = Options {
        package: args.package,
        target,
        dry_run: args.dry_run,
        plain_http: args.plain_http,
        drop_image: args.drop_image,
    };
    let bar = Arc::new(Bar::new(!output.json));
    let report = tokio::select! {
        report = registry::push(&options, credentials, bar) => report?,
        _ = tokio::signal::ctrl_c() => {
            let failure = Failure::new(Class::Interrupted, "the push was interrupted");
            return Err(failure.next("run it again: what the registry has is not sent again"));
        }
    };
    let mut text = String::new();
    for blob in &report.blobs {
        let state = match (blob.there, report.pushed) {
            (true, _) => "there already",
            (false, true) => "sent",
            (false, false) => "to be sent",
        };
        let _ = writeln!(text, "{:<6}  {}  {:>9}  {state}", blob.role, blob.digest, size(blob.size));
    }
    let verb = if report.pushed { "sent" } else { "to send" };
    let _ = writeln!(
        text,
        "{verb} {} of {}",
        size(report.bytes_sent),
        size(report.blobs.iter().map(|blob| blob.size).sum())
    );
    if let Some(old) = &report.replaces {
        let moves = if report.pushed { "moved from" } else { "would move from" };
        let _ = writeln!(text, "the tag {moves} {old}");
    }
    let _ = writeln!(text, "{}\n{}", report.image, report.pinned);
    if report.package_updated {
        let _ = writeln!(text, "{} points at it now", options.package.display());
    }
    output.result(&report, &text);
    Ok(())
}

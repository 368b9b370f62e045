// SPDX-License-Identifier: Apache-2.0
//! The commands that talk to the Hub.

use std::{fmt::Write as _, path::Path};

use hub::{Settings, bar::Bar, progress::size};

use super::{args::FetchArgs, output::Output};
use crate::{error::Result, fetch, manifest, pins::Lock};

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

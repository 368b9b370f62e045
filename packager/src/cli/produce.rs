// SPDX-License-Identifier: Apache-2.0
//! The commands that make and prove a package.

use std::{fmt::Write as _, path::Path, time::Duration};

use serde_json::json;

use super::{args::BuildArgs, output::Output};
use crate::{
    card,
    error::Result,
    image::engine,
    manifest,
    package::{
        self, Options,
        inputs::{Inputs, Staged},
    },
    pins::Lock,
    verify,
};

fn options(args: BuildArgs, quiet: bool) -> Options {
    Options {
        out: args.out,
        allow_unpinned: args.allow_unpinned,
        twice: args.twice,
        again: args.again,
        builder: args.builder,
        base_images: args.base_image.into_iter().collect(),
        args: args.build_arg.into_iter().collect(),
        ca: args.build_ca,
        host_network: args.host_network,
        idle: Duration::from_secs(60 * args.idle_minutes),
        quiet,
    }
}

/// `packager build`.
pub async fn build(manifest: &Path, args: BuildArgs, output: Output) -> Result<()> {
    let loaded = manifest::load(manifest)?;
    let report = package::build(&loaded, &options(args, output.json), &|text| output.note(text)).await?;
    let text = if report.built {
        let again =
            if report.reproduced == Some(true) { "built twice, the same image both times\n" } else { "" };
        format!(
            "{again}{}\n  image    {}\n  size     {:.1} MB, of which ours {:.1} MB\n  next     packager verify {0}; packager serve {0}\n",
            report.package.display(),
            report.image,
            report.image_bytes as f64 / 1e6,
            report.own_bytes as f64 / 1e6,
        )
    } else {
        format!("unchanged: {} was made from these inputs ({})\n", report.package.display(), report.image)
    };
    output.result(&report, &text);
    Ok(())
}

/// `packager plan`.
pub async fn plan(manifest: &Path, args: BuildArgs, output: Output) -> Result<()> {
    let loaded = manifest::load(manifest)?;
    let target = args.out.join(&loaded.manifest.name);
    let engine = engine::find().await;
    let scratch = tempfile::tempdir()
        .map_err(|error| crate::error::Failure::io("create", Path::new("a temporary directory"), &error))?;
    let options = Options { allow_unpinned: true, ..options(args, true) };
    let code = scratch.path().join("code");
    let inputs = Inputs::gather(&loaded, &options, engine.as_ref().ok(), &code).await;
    let lock = Lock::read(&loaded.dir)?;
    let staged = loaded.manifest.build.is_none().then(|| Staged::new(&loaded, lock.as_ref(), &code));
    let staged = staged.transpose();
    let code = staged.as_ref().ok().and_then(Option::as_ref);
    let mut plan = package::inputs::plan(&loaded, inputs.as_ref().ok(), code, &target);
    let missing = [inputs.as_ref().err(), staged.as_ref().err(), engine.as_ref().err()];
    let missing: Vec<String> = missing.into_iter().flatten().map(ToString::to_string).collect();
    plan["missing"] = json!(missing);
    let mut text = String::new();
    for (key, value) in plan.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "{key:<15} {shown}");
    }
    output.result(&plan, &text);
    Ok(())
}

/// `packager card`.
pub fn card(package: &Path, output: Output) -> Result<()> {
    let text = card::render(&verify::read_wire(package)?)?;
    output.result(&json!({"card": text}), &text);
    Ok(())
}

/// `packager verify`.
pub fn verify(package: &Path, output: Output) -> Result<()> {
    let report = verify::verify(package)?;
    let mut text: String = report.proved.iter().map(|line| format!("ok  {line}\n")).collect();
    let _ = writeln!(text, "{} agrees with itself", package.display());
    output.result(&report, &text);
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! The commands that run a package.

use std::{path::Path, time::Duration};

use serde_json::json;

use super::{args::ServeArgs, output::Output};
use crate::{
    error::{Class, Failure, Result},
    image::{
        check,
        engine::{self, Engine},
    },
    serve::{self, Choice, Run},
    verify,
    wire::Wire,
};

/// `packager serve`.
pub async fn serve(args: ServeArgs, output: Output) -> Result<()> {
    let wire = verify::read_wire(&args.package)?;
    let mut choice = Choice {
        profile: args.profile,
        port: args.port.unwrap_or(20_000),
        device: args.device,
        free: serve::nodes(),
        user: format!("{}:{}", rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        cache: serve::cache_home(),
        args: args.args,
    };
    if args.print {
        // Works without an engine and without a card: the line is for reading.
        let chips = serve::profile(&wire, choice.profile.as_deref())?
            .serve
            .hardware
            .as_deref()
            .and_then(crate::manifest::hardware::chips);
        choice.free = (0..chips.unwrap_or(1)).collect();
        let run = serve::compose(&wire, &choice)?;
        output.result(&json!({"command": run.docker()}), &format!("{}\n", run.shell()));
        return Ok(());
    }
    let engine = engine::find().await?;
    if engine.rootless {
        choice.user = "0:0".into();
    }
    let image = &wire.container.image.tag;
    if engine.docker.inspect_image(image).await.is_err() {
        let layout = args.package.join("image");
        if !layout.is_dir() {
            let place = &wire.container.image;
            let pinned = format!(
                "{}/{}@{}",
                place.registry,
                place.repository,
                place.digest.as_deref().unwrap_or_default()
            );
            let failure = Failure::new(
                Class::Engine,
                format!("{image} is not in the engine, and the package has no image/"),
            );
            return Err(failure.next(format!("docker pull {pinned} && docker tag {pinned} {image}")));
        }
        output.note(&format!("loading {image}"));
        check::load(&engine, &layout).await?;
    }
    let run = create(&engine, &wire, &mut choice, args.port).await?;
    if !args.detach {
        wait(&engine, &run, output).await?;
    }
    let endpoint = format!("http://localhost:{}", run.port);
    let text = format!("{endpoint}\n");
    output.result(
        &json!({"endpoint": endpoint, "container": run.container, "image": run.image, "port": run.port}),
        &text,
    );
    Ok(())
}

/// Starts the container on the first free port. A port that was free a moment ago can be taken by another
/// container meanwhile: then the next one is tried, unless the user named it.
async fn create(engine: &Engine, wire: &Wire, choice: &mut Choice, wanted: Option<u16>) -> Result<Run> {
    choice.port = serve::free_port(wanted, 20_000)?;
    loop {
        let run = serve::compose(wire, choice)?;
        serve::make_mounts(&run)?;
        match serve::create(engine, &run).await {
            Err(failure) if wanted.is_none() && failure.why.contains("port is already allocated") => {
                choice.port = serve::free_port(None, choice.port + 1)?;
            }
            Err(failure) => return Err(failure),
            Ok(()) => return Ok(run),
        }
    }
}

async fn wait(engine: &Engine, run: &Run, output: Output) -> Result<()> {
    let limit = std::env::var("TT_MODEL_READY_TIMEOUT")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(4 * 60 * 60);
    let note = |text: &str| output.note(text);
    tokio::select! {
        result = serve::wait(engine, run, Duration::from_secs(limit), &note) => result,
        _ = tokio::signal::ctrl_c() => {
            // As consumers have it: Ctrl-C ends the watching only.
            let failure = Failure::new(Class::Interrupted, format!("{} keeps running", run.container));
            Err(failure.next("stop it with `packager stop`"))
        }
    }
}

/// `packager stop`.
pub async fn stop(package: &Path, profile: Option<&str>, output: Output) -> Result<()> {
    let wire = verify::read_wire(package)?;
    let profile = serve::profile(&wire, profile)?.name;
    let container = format!("tt-model-{}-{profile}", wire.name);
    let engine = engine::find().await?;
    let code = serve::stop(&engine, &container).await?;
    output.result(
        &json!({"container": container, "exit_code": code}),
        &format!("{container} stopped with exit code {code}\n"),
    );
    Ok(())
}

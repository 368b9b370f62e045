// SPDX-License-Identifier: Apache-2.0
//! The image in the engine: loading it, running a command in it as a stranger, taking it away.

use std::{collections::HashMap, fs, path::Path};

use bollard::{
    body_try_stream,
    models::{ContainerCreateBody, HostConfig},
    query_parameters::{
        CreateContainerOptionsBuilder, ImportImageOptions, ListContainersOptionsBuilder, LogsOptionsBuilder,
        RemoveContainerOptionsBuilder, RemoveImageOptionsBuilder,
    },
};
use futures_util::StreamExt as _;

use super::{
    engine::{Engine, ended_within_a_line},
    events::strip_escapes,
    stream,
};
use crate::{
    error::{At, Class, Failure, Result},
    files::{self, FileType},
};

/// Label of the containers that a build runs, with the build's own value: an interrupted build finds
/// and removes exactly its own.
pub const RUN_LABEL: &str = "org.tenstorrent.tt-model.packager-run";

/// Loads a layout as `docker load` does.
pub async fn load(engine: &Engine, layout: &Path) -> Result<()> {
    let dir = layout.to_path_buf();
    let (body, producer) = stream::produce(move |chunks| {
        let mut tar = tar::Builder::new(chunks);
        for entry in files::walk(&dir)? {
            if let FileType::File(_) = entry.class {
                let mut file = fs::File::open(&entry.full).at("open", &entry.full)?;
                let mut header = tar::Header::new_gnu();
                header.set_mode(0o644);
                header.set_size(file.metadata().at("inspect", &entry.full)?.len());
                tar.append_data(&mut header, &entry.path, &mut file).at("send", &entry.full)?;
            }
        }
        tar.finish().at("send", &dir)
    });
    let mut messages = std::pin::pin!(engine.docker.import_image(
        ImportImageOptions::default(),
        body_try_stream(body),
        None
    ));
    let mut loaded = false;
    loop {
        let what = "the image could not be loaded into the engine";
        let next = tokio::time::timeout(stream::IDLE, messages.next()).await;
        let next = next.map_err(|_| {
            Failure::new(Class::Engine, what).why(format!("no message came for {} s", stream::IDLE.as_secs()))
        })?;
        match next {
            None => break,
            Some(Ok(message)) => {
                loaded |= message.stream.is_some_and(|text| text.starts_with("Loaded image"));
            }
            Some(Err(error)) if loaded && ended_within_a_line(&error) => break,
            Some(Err(error)) => {
                if let Ok(Err(failure)) = producer.await {
                    return Err(failure);
                }
                return Err(engine.failed(what, &error));
            }
        }
    }
    producer.await.map_err(|error| Failure::new(Class::Failure, "sending the image stopped").why(error))?
}

/// Runs a command in an image the way the most careful consumer would: a user that the image does not
/// know, nothing writable but /tmp, no privileges, no network.
pub async fn run(engine: &Engine, image: &str, command: &[String], run: &str) -> Result<String> {
    let what = || format!("`{}` in the finished image", command.join(" "));
    let host = HostConfig {
        readonly_rootfs: Some(true),
        tmpfs: Some(HashMap::from([("/tmp".into(), String::new())])),
        cap_drop: Some(vec!["ALL".into()]),
        security_opt: Some(vec!["no-new-privileges".into()]),
        network_mode: Some("none".into()),
        ..HostConfig::default()
    };
    let body = ContainerCreateBody {
        image: Some(image.into()),
        cmd: Some(command.to_vec()),
        user: Some("54321:54321".into()),
        labels: Some(HashMap::from([(RUN_LABEL.into(), run.into())])),
        host_config: Some(host),
        ..ContainerCreateBody::default()
    };
    let name = format!("packager-check-{}", super::build::unique());
    let options = CreateContainerOptionsBuilder::default().name(&name).build();
    engine
        .docker
        .create_container(Some(options), body)
        .await
        .map_err(|error| engine.failed(what(), &error))?;
    let result = watch(engine, &name).await;
    remove_container(engine, &name).await;
    let (code, output) = result.map_err(|error| engine.failed(what(), &error))?;
    if code == 0 {
        return Ok(output);
    }
    let last: Vec<&str> = output.lines().rev().take(20).collect::<Vec<_>>().into_iter().rev().collect();
    let failure =
        Failure::new(Class::Engine, what()).why(format!("exit code {code}\n  {}", last.join("\n  ")));
    Err(failure.next("the image works for root on this machine only, or is incomplete; run it as shown with --user 54321:54321 --read-only"))
}

async fn watch(engine: &Engine, name: &str) -> Result<(i64, String), bollard::errors::Error> {
    engine.docker.start_container(name, None).await?;
    let code = match engine.docker.wait_container(name, None).next().await {
        Some(Ok(result)) => result.status_code,
        // The client turns a non-zero exit into an error.
        Some(Err(bollard::errors::Error::DockerContainerWaitError { code, .. })) => code,
        Some(Err(error)) => return Err(error),
        None => -1,
    };
    let options = LogsOptionsBuilder::default().stdout(true).stderr(true).build();
    let mut logs = std::pin::pin!(engine.docker.logs(name, Some(options)));
    let mut output = String::new();
    while let Some(Ok(frame)) = logs.next().await {
        output += &String::from_utf8_lossy(&frame.into_bytes());
    }
    Ok((code, strip_escapes(&output)))
}

/// Removes a container, running or not.
pub async fn remove_container(engine: &Engine, name: &str) {
    let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
    let _ = engine.docker.remove_container(name, Some(options)).await;
}

/// Removes what a build left when it was interrupted: its containers and its temporary tag.
pub async fn clean(engine: &Engine, run: &str, tag: &str) {
    let filters = HashMap::from([("label".to_owned(), vec![format!("{RUN_LABEL}={run}")])]);
    let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
    for container in engine.docker.list_containers(Some(options)).await.unwrap_or_default() {
        if let Some(id) = container.id {
            remove_container(engine, &id).await;
        }
    }
    untag(engine, tag).await;
}

/// Takes a name away from an image; its layers stay as the cache of the next build.
pub async fn untag(engine: &Engine, tag: &str) {
    let options = RemoveImageOptionsBuilder::default().noprune(true).build();
    let _ = engine.docker.remove_image(tag, Some(options), None).await;
}

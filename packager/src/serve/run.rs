// SPDX-License-Identifier: Apache-2.0
//! The life of a served container: start, wait until it is ready by every sign that consumers look at,
//! stop.

use std::{collections::HashMap, time::Duration};

use bollard::{
    models::{ContainerCreateBody, DeviceMapping, HostConfig, Mount, MountType, PortBinding},
    query_parameters::{
        CreateContainerOptionsBuilder, InspectContainerOptions, LogsOptionsBuilder,
        StopContainerOptionsBuilder,
    },
};
use futures_util::StreamExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::Run;
use crate::{
    error::{Class, Failure, Result},
    image::{check, engine::Engine, events::strip_escapes},
};

/// Seconds that a server has to end its work, as consumers give it.
const GRACE: i32 = 120;

/// Creates and starts the container; nothing is left of one that cannot start.
pub async fn create(engine: &Engine, run: &Run) -> Result<()> {
    let what = || format!("starting {}", run.container);
    let device = |id: &u32| {
        let path = format!("/dev/tenstorrent/{id}");
        DeviceMapping {
            path_on_host: Some(path.clone()),
            path_in_container: Some(path),
            cgroup_permissions: Some("rwm".into()),
        }
    };
    let hugepages = Mount {
        target: Some("/dev/hugepages-1G".into()),
        source: Some("/dev/hugepages-1G".into()),
        typ: Some(MountType::BIND),
        ..Mount::default()
    };
    let card = !run.devices.is_empty();
    let port = format!("{}/tcp", run.port);
    let binding = PortBinding { host_ip: None, host_port: Some(run.port.to_string()) };
    let host = HostConfig {
        binds: Some(run.mounts.iter().map(|(host, inside)| format!("{}:{inside}", host.display())).collect()),
        mounts: card.then(|| vec![hugepages]),
        devices: card.then(|| run.devices.iter().map(device).collect()),
        ipc_mode: card.then(|| "host".into()),
        port_bindings: Some(HashMap::from([(port.clone(), Some(vec![binding]))])),
        ..HostConfig::default()
    };
    let mut env: Vec<String> = run.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    // By value, as the engine has no other way: the value stands in no argument list and in no log.
    env.extend(run.pass.iter().filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?))));
    let body = ContainerCreateBody {
        image: Some(run.image.clone()),
        cmd: Some(run.argv.clone()),
        user: Some(run.user.clone()),
        env: Some(env),
        labels: Some(run.labels.iter().cloned().collect()),
        exposed_ports: Some(vec![port]),
        host_config: Some(host),
        ..ContainerCreateBody::default()
    };
    let options = CreateContainerOptionsBuilder::default().name(&run.container).build();
    engine.docker.create_container(Some(options), body).await.map_err(|error| {
        let failure = engine.failed(what(), &error);
        if failure.why.contains("already in use") {
            failure.next("it is served already: stop it first with `packager stop`")
        } else {
            failure
        }
    })?;
    if let Err(error) = engine.docker.start_container(&run.container, None).await {
        check::remove_container(engine, &run.container).await;
        return Err(engine.failed(what(), &error));
    }
    Ok(())
}

/// Waits for the ready line, then for `/health` and `/v1/models`. A container that ends before is removed,
/// with its last lines in the failure; one that is only slow keeps running.
pub async fn wait(engine: &Engine, run: &Run, limit: Duration, note: &dyn Fn(&str)) -> Result<()> {
    note(&format!("{} runs; waiting for `{}`", run.container, run.ready_line));
    if let Ok(result) = tokio::time::timeout(limit, ready(engine, run, note)).await {
        return result;
    }
    let failure =
        Failure::new(Class::Failure, format!("{} was not ready after {} s", run.container, limit.as_secs()));
    Err(failure.next(format!("it keeps running: docker logs {}", run.container)))
}

async fn ready(engine: &Engine, run: &Run, note: &dyn Fn(&str)) -> Result<()> {
    let options = LogsOptionsBuilder::default().follow(true).stdout(true).stderr(true).build();
    let mut logs = std::pin::pin!(engine.docker.logs(&run.container, Some(options)));
    let (mut partial, mut last) = (String::new(), Vec::new());
    let mut seen = false;
    while let Some(Ok(frame)) = logs.next().await {
        // Frames are cut anywhere.
        partial += &String::from_utf8_lossy(&frame.into_bytes());
        while let Some(at) = partial.find('\n') {
            let line = strip_escapes(partial[..at].trim_end());
            partial.drain(..=at);
            seen |= line.contains(&run.ready_line);
            note(&format!("  {line}"));
            last.push(line);
        }
        if seen {
            break;
        }
    }
    if !seen {
        let state = engine
            .docker
            .inspect_container(&run.container, None::<InspectContainerOptions>)
            .await
            .ok()
            .and_then(|c| c.state);
        let code = state.and_then(|state| state.exit_code).unwrap_or(-1);
        check::remove_container(engine, &run.container).await;
        let shown = last[last.len().saturating_sub(20)..].join("\n  ");
        let failure = Failure::new(
            Class::Failure,
            format!("the server ended with exit code {code} before it was ready"),
        );
        return Err(failure
            .why(format!("its last lines:\n  {shown}"))
            .next("correct what it says; the container was removed"));
    }
    for path in ["/health", "/v1/models"] {
        loop {
            match get(run.port, path).await {
                Ok((200, body)) if path != "/v1/models" || has_model(&body) => break,
                // Consumers take a missing health route for healthy.
                Ok((404, _)) if path == "/health" => break,
                Ok((404, _)) => {
                    note("note: the server has no /v1/models; `tt serve` would never call it ready");
                    break;
                }
                _ => tokio::time::sleep(Duration::from_millis(300)).await,
            }
        }
    }
    Ok(())
}

fn has_model(body: &str) -> bool {
    let value: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    value["data"].as_array().is_some_and(|models| models.iter().any(|model| model["id"].is_string()))
}

/// One plain HTTP GET on this host: status and body.
async fn get(port: u16, path: &str) -> std::io::Result<(u16, String)> {
    let work = async {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text).await?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let status = text.split_whitespace().nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Ok((status, text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()))
    };
    tokio::time::timeout(Duration::from_secs(5), work)
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// Stops the container with the consumers' grace and removes it. Returns its exit code.
pub async fn stop(engine: &Engine, container: &str) -> Result<i64> {
    let what = || format!("stopping {container}");
    let options = StopContainerOptionsBuilder::default().t(GRACE).build();
    engine.docker.stop_container(container, Some(options)).await.map_err(|error| {
        let failure = engine.failed(what(), &error);
        if failure.why.contains("No such container") { failure.next("it is not served") } else { failure }
    })?;
    let state = engine
        .docker
        .inspect_container(container, None::<InspectContainerOptions>)
        .await
        .map_err(|error| engine.failed(what(), &error))?;
    let code = state.state.and_then(|state| state.exit_code).unwrap_or(-1);
    check::remove_container(engine, container).await;
    if code == 137 {
        let failure = Failure::new(Class::Failure, format!("{container} had to be killed after {GRACE} s"));
        return Err(failure.next("the card may need a reset (tt-smi -r all); the server must end on SIGTERM"));
    }
    Ok(code)
}

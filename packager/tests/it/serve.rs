// SPDX-License-Identifier: Apache-2.0
//! A consumer's life with the small package: load, run, ready, ask, logs, stop, remove.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
};

use packager::{
    serve::{Choice, Device, compose},
    verify,
};
use serde_json::Value;

use crate::engine::{Small, docker, docker_text};

fn get(port: u64, path: &str) -> String {
    let mut stream =
        TcpStream::connect(("127.0.0.1", u16::try_from(port).expect("port"))).expect("connected");
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    text
}

#[test]
fn a_package_is_served_asked_and_stopped_as_consumers_do_it() {
    let small = Small::built("served");
    let package = small.package();
    let package = package.to_str().expect("path");
    // As after a pull: the image is only in the layout.
    let wire = verify::read_wire(&small.package()).expect("wire");
    docker(&["rmi", "-f", &wire.container.image.tag]);
    let served: Value =
        serde_json::from_str(&small.ok(&["serve", package, "--device", "cpu", "--json"])).expect("JSON");
    let port = served["port"].as_u64().expect("a port");
    let container = format!("tt-model-{}-default", small.name);
    assert_eq!(served["container"], container.as_str());
    assert_eq!(
        docker_text(&["inspect", "-f", "{{.Image}}", &container]),
        wire.container.image.digest.clone().expect("digest"),
        "the loaded image has the stated id"
    );
    let uid = rustix::process::getuid().as_raw();
    assert!(get(port, "/predict").contains(&format!("{{\"path\":\"/predict\",\"uid\":{uid}}}")));
    let second = small.fails(4, &["serve", package, "--device", "cpu"]);
    assert!(second.contains("packager stop"), "{second}");
    assert!(docker_text(&["logs", &container]).contains("Application startup complete"));
    assert_eq!(
        docker_text(&[
            "ps",
            "-q",
            "--filter",
            &format!("label=org.tenstorrent.tt-model={}", small.name),
            "--filter",
            "label=org.tenstorrent.tt-model.profile=default"
        ])
        .lines()
        .count(),
        1
    );
    assert!(small.ok(&["stop", package]).contains("exit code 0"));
    assert!(docker_text(&["ps", "-aq", "--filter", &format!("name={container}")]).is_empty());
    assert!(small.fails(4, &["stop", package]).contains("not served"));
}

#[test]
fn skopeo_reads_latest_into_an_engine_under_the_same_id() {
    let small = Small::built("skopeo");
    let wire = verify::read_wire(&small.package()).expect("wire");
    docker(&["rmi", "-f", &wire.container.image.tag]);
    let tools = std::process::Command::new(crate::support::repository().join("scripts/check-evidence.sh"))
        .arg("--install")
        .status();
    assert!(tools.is_ok_and(|status| status.success()), "skopeo cannot be installed");
    let host = crate::engine::ENGINE.clone();
    let target = format!("docker-daemon:{}", wire.container.image.tag);
    let copy = std::process::Command::new("skopeo")
        .args(["--insecure-policy", "copy", "--dest-daemon-host", &host])
        .arg(format!("oci:{}:latest", small.package().join("image").display()))
        .arg(target)
        .output()
        .expect("skopeo starts");
    assert!(copy.status.success(), "{}", String::from_utf8_lossy(&copy.stderr));
    assert_eq!(
        docker_text(&["inspect", "-f", "{{.Id}}", &wire.container.image.tag]),
        wire.container.image.digest.expect("digest")
    );
}

#[test]
fn a_server_that_ends_before_it_is_ready_is_shown_and_removed() {
    let small = Small::new("broken");
    small.edit("server/serve.pl", "$| = 1;", "die \"the device is on fire\\n\";");
    small.ok(&["pin", "--offline"]);
    small.ok(&["build"]);
    let package = small.package();
    let said = small.fails(1, &["serve", package.to_str().expect("path"), "--device", "cpu"]);
    assert!(said.contains("before it was ready") && said.contains("the device is on fire"), "{said}");
    assert!(docker_text(&["ps", "-aq", "--filter", &format!("name=tt-model-{}", small.name)]).is_empty());
}

#[test]
fn print_gives_the_docker_run_of_the_format_in_its_order_without_an_engine() {
    let small = Small::built("print");
    let package = small.package();
    let output = small
        .command()
        .env("DOCKER_HOST", "unix:///nowhere")
        .args(["serve", "--print", package.to_str().expect("path")])
        .output()
        .expect("runs");
    let line = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(line.lines().count(), 1, "{line}");
    let order = [
        "docker run --detach --name tt-model-test-print-default --user ",
        "--label org.tenstorrent.tt-model=test-print",
        "--label org.tenstorrent.tt-model.profile=default",
        "--label org.tenstorrent.tt-model.devices=0",
        "--device /dev/tenstorrent/0:/dev/tenstorrent/0",
        "--ipc host",
        "--mount type=bind,src=/dev/hugepages-1G,dst=/dev/hugepages-1G",
        ":/hf",
        ":/cache",
        ":/weight-cache",
        ":/tensor-cache",
        "--publish 20000:20000",
        "--env ARCH_NAME=blackhole",
        "--env HF_HOME=/hf",
        "TT_MESH_GRAPH_DESC_PATH=/opt/tt-metal/",
        "tt-model/test-print:",
        "small-server serve --host 0.0.0.0 --port 20000",
    ];
    let mut at = 0;
    for part in order {
        at += line[at..].find(part).unwrap_or_else(|| panic!("no `{part}` after {}", &line[at..]));
    }
    // The token is passed by name only.
    let output = small
        .command()
        .env("HF_TOKEN", "very-secret")
        .args(["serve", "--print", package.to_str().expect("path")])
        .output()
        .expect("runs");
    let line = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(line.contains("--env HF_TOKEN ") && !line.contains("very-secret"));
}

#[test]
fn too_few_free_cards_is_said_with_both_numbers() {
    let small = Small::built("cards");
    let wire = verify::read_wire(&small.package()).expect("wire");
    let choice = Choice {
        profile: None,
        port: 20_000,
        device: Device::Card,
        free: vec![],
        user: "1:1".into(),
        cache: "/c".into(),
        args: vec![],
    };
    let failure = compose(&wire, &choice).expect_err("no card");
    assert!(failure.what.contains("only 0 of 1") && failure.next.contains("--device cpu"));
    let run = compose(
        &wire,
        &Choice {
            free: vec![2, 3],
            profile: None,
            port: 1,
            device: Device::Card,
            user: "1:1".into(),
            cache: "/c".into(),
            args: vec!["--x".into()],
        },
    )
    .expect("composed");
    assert_eq!((run.devices.as_slice(), run.argv.last().map(String::as_str)), ([2].as_slice(), Some("--x")));
    assert!(fs::metadata(small.package().join("README.md")).is_ok());
}

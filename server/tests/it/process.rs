// SPDX-License-Identifier: Apache-2.0
//! The commands `config` and `doctor`, and what a running server writes to its log.

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::{
    life::{ended, ready, signal, spawn},
    support::{BINARY, TINY, TINY_DEV, client},
};

fn run(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(BINARY);
    command.args(arguments).envs(environment.iter().copied()).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn config_prints_flags_over_variables_over_defaults_and_no_secret() {
    let environment = [("FLUX2_PORT", "1234"), ("FLUX2_QUEUE_SIZE", "7"), ("API_KEY", "very-secret-key")];
    let output = run(&["config", "--port", "4321", "--checkpoint", TINY], &environment);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("very-secret-key"));
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&config["port"], &config["queue_size"]), (&json!(4321), &json!(7)));
    assert_eq!(
        (&config["host"], &config["api_key"], &config["drain_limit"]),
        (&json!("127.0.0.1"), &json!("set"), &json!(60.0))
    );
    assert_eq!(run(&["config", "--queue-size", "0"], &[]).status.code(), Some(2));
}

#[test]
fn config_tells_the_size_that_is_served() {
    for (checkpoint, environment, wanted) in [
        (TINY, &[][..], json!([1024, 1024, true])),
        (TINY_DEV, &[], json!([1024, 1024, false])),
        (TINY_DEV, &[("FLUX2_WIDTH", "1920"), ("FLUX2_HEIGHT", "1072")], json!([1920, 1072, false])),
        (TINY_DEV, &[("FLUX2_ANY_SIZE", "true")], json!([1024, 1024, true])),
    ] {
        let output = run(&["config", "--checkpoint", checkpoint], environment);
        let config: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json!([config["width"], config["height"], config["any_size"]]), wanted, "{environment:?}");
    }
}

#[test]
fn help_documents_every_flag_with_its_variable_and_default() {
    let help =
        String::from_utf8(run(&["serve", "--help"], &[("API_KEY", "very-secret-key")]).stdout).unwrap();
    assert!(!help.contains("very-secret-key"));
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "--port <PORT>",
        "[env: FLUX2_PORT=]",
        "[default: 20000]",
        "[env: API_KEY]",
        "FLUX2_DRAIN_LIMIT",
        "--width <PIXELS>",
        "FLUX2_HEIGHT",
        "--any-size",
        "FLUX2_MODEL",
        "KLEIN_SNAPSHOT",
    ] {
        assert!(flat.contains(part), "{part} is not in {flat}");
    }
}

#[test]
fn case_86_to_92_doctor_is_one_block_to_paste() {
    let output = run(
        &["doctor", "--checkpoint", TINY, "--port", "0"],
        &[("HF_TOKEN", "hf_secret"), ("API_KEY", "very-secret-key")],
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("hf_secret") && !text.contains("very-secret-key"));
    for part in [
        "version",
        "user",
        "processor",
        "memory",
        "devices",
        "holders",
        "hugepages",
        "iommu",
        "capabilities",
        "checkpoint",
    ] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(part)), "{part} is not in\n{text}");
    }
    let output = run(&["doctor", "--checkpoint", "/nowhere", "--port", "0"], &[]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8(output.stdout).unwrap().contains("FAULT"));
}

#[tokio::test]
async fn logs_hold_one_line_a_request_and_prompts_only_when_asked_for() {
    for (flags, told) in
        [(&["--log-format", "json"][..], false), (&["--log-format", "json", "--log-prompts"], true)]
    {
        let mut child = spawn(flags, &[]);
        let url = ready(&mut child);
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let request = client()
            .post(format!("{url}/predict"))
            .json(&json!({"prompt": "a private thing", "width": 16, "height": 32}));
        let request = request
            .header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"))
            .header("x-request-id", "r-1");
        assert_eq!(request.send().await.unwrap().status(), 200);
        signal(&child, "-TERM");
        let (code, log) = ended(child, std::time::Duration::from_secs(30));
        assert_eq!(code, 0);
        assert_eq!(log.contains("a private thing"), told, "{log}");
        let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let named = |name: &str| lines.iter().filter(|line| line["message"] == name).collect::<Vec<_>>();
        let [request] = named("request")[..] else { panic!("{log}") };
        for (field, value) in [
            ("route", json!("/predict")),
            ("status", json!(200)),
            ("trace_id", json!(trace)),
            ("request_id", json!("r-1")),
            ("size", json!("16x32")),
            ("seed", json!(42)),
            ("references", json!(0)),
        ] {
            assert_eq!(request[field], value, "{log}");
        }
        assert!(request["timing_ms"].as_str().unwrap().contains("dit_s"), "{log}");
        let [job] = named("job")[..] else { panic!("{log}") };
        assert_eq!(
            (&job["size"], &job["seed"], &job["request_id"]),
            (&json!("16x32"), &json!(42), &json!("r-1"))
        );
        assert!(job["timing_ms"].as_str().unwrap().contains("dit_s"));
    }
}

#[test]
fn a_public_address_without_a_key_is_warned_about() {
    for (flags, environment, warned) in [
        (&["--host", "0.0.0.0"][..], &[][..], true),
        (&["--host", "0.0.0.0"], &[("API_KEY", "long-enough-key")], false),
        (&[], &[], false),
    ] {
        let mut child = spawn(flags, environment);
        ready(&mut child);
        signal(&child, "-TERM");
        let (_, log) = ended(child, std::time::Duration::from_secs(30));
        assert_eq!(log.contains("without an API key"), warned, "{log}");
    }
}

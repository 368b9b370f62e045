// SPDX-License-Identifier: Apache-2.0
//! The page in a real browser: Debian's chromium through WebDriver. Screenshots are kept in `target/screenshots`.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use fantoccini::{Client, ClientBuilder, Locator, key::Key};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};

use crate::{
    scripted::Gate,
    support::{TestServer, client, png},
};

const WAIT: Duration = Duration::from_mins(1);

/// A browser that ends with the test.
struct Browser {
    client: Client,
    driver: Child,
    url: String,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Asked, not killed: it takes its browser with it.
        let _ = Command::new("kill").arg(self.driver.id().to_string()).status();
        let _ = self.driver.wait();
    }
}

impl Browser {
    async fn open(options: &[&str]) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        #[allow(clippy::zombie_processes)]
        // Waited for when the browser is dropped; a panic before ends the test process.
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver: apt-get install chromium chromium-driver");
        let mut arguments =
            vec!["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"];
        arguments.extend(options);
        let capabilities = json!({
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        });
        let Value::Object(capabilities) = capabilities else { unreachable!() };
        let url = format!("http://127.0.0.1:{port}");
        let mut builder = ClientBuilder::new(HttpConnector::new());
        builder.capabilities(capabilities);
        for _ in 0..100 {
            if let Ok(client) = builder.connect(&url).await {
                return Self { client, driver, url };
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("no session at {url}");
    }

    async fn text(&self, id: &str) -> String {
        self.client.find(Locator::Id(id)).await.unwrap().text().await.unwrap()
    }

    async fn shown(&self, id: &str) -> bool {
        self.client.find(Locator::Id(id)).await.unwrap().is_displayed().await.unwrap()
    }

    async fn fill(&self, id: &str, text: &str) {
        let field = self.client.find(Locator::Id(id)).await.unwrap();
        field.clear().await.unwrap();
        field.send_keys(text).await.unwrap();
    }

    async fn click(&self, id: &str) {
        self.client.find(Locator::Id(id)).await.unwrap().click().await.unwrap();
    }

    /// Waits until the element's text holds `part`.
    async fn until(&self, id: &str, part: &str) -> String {
        let start = std::time::Instant::now();
        loop {
            let text = self.text(id).await;
            if text.contains(part) {
                return text;
            }
            assert!(start.elapsed() < WAIT, "#{id} says {text:?}, wanted {part:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn screenshot(&self, name: &str) {
        let directory = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/screenshots"));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(name).with_extension("png"), self.client.screenshot().await.unwrap())
            .unwrap();
    }

    /// What the browser's console has at level SEVERE since the last call.
    async fn console_errors(&self) -> Vec<String> {
        let session = self.client.session_id().await.unwrap().unwrap();
        let path = format!("{}/session/{session}/se/log", self.url);
        let log: Value =
            client().post(path).json(&json!({"type": "browser"})).send().await.unwrap().json().await.unwrap();
        let entries = log["value"].as_array().unwrap();
        entries
            .iter()
            .filter(|entry| entry["level"] == "SEVERE")
            .map(|entry| entry["message"].to_string())
            .collect()
    }

    /// Width and height of the picture that is shown, as the browser decoded it.
    async fn picture(&self) -> (u64, u64) {
        let script = "const image = document.getElementById('picture'); return [image.naturalWidth, image.naturalHeight]";
        let size = self.client.execute(script, vec![]).await.unwrap();
        (size[0].as_u64().unwrap(), size[1].as_u64().unwrap())
    }
}

const NEEDS: &str = "the page's own requests go to its own server alone";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a browser: apt-get install chromium chromium-driver, then cargo test -p server --test it page -- --ignored"]
async fn generate_edit_and_history_by_keyboard_without_a_console_error() {
    let server = TestServer::real(&[]).await;
    let browser = Browser::open(&["--window-size=1280,1000"]).await;
    browser.client.goto(&server.url).await.unwrap();
    browser.until("model", "tiny").await;
    browser.screenshot("1-start-light").await;
    assert!(!browser.shown("steps").await && !browser.shown("guidance").await, "klein leaves no choice");

    // The prompt has the focus: type, go.
    let prompt = browser.client.active_element().await.unwrap();
    assert_eq!(prompt.attr("id").await.unwrap().as_deref(), Some("prompt"));
    browser.fill("width", "64").await;
    browser.fill("height", "96").await;
    browser.fill("seed", "7").await;
    let typed = format!("it's a \"red\" circle{}{}", Key::Control + "", Key::Enter + "");
    browser.client.find(Locator::Id("prompt")).await.unwrap().send_keys(&typed).await.unwrap();
    browser.until("status", "Done in").await;
    assert_eq!(browser.picture().await, (64, 96));
    let curl = browser.text("curl").await;
    assert!(curl.contains("/predict") && curl.contains("\"seed\":7"), "{curl}");
    browser.screenshot("2-generated").await;

    // The curl line and the Python line really make the same picture.
    let job = server.app.queue.all().pop().unwrap().id.clone();
    let shown = server.get(&format!("/jobs/{job}/image")).send().await.unwrap().bytes().await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    for (program, argument, script) in [("sh", "-c", curl), ("python3", "-c", browser.text("python").await)] {
        let status = Command::new(program).args([argument, &script]).current_dir(directory.path()).status();
        assert!(status.unwrap().success(), "{script}");
        let file = std::fs::read(directory.path().join("out.png")).unwrap();
        assert_eq!(file, shown, "{program}");
        std::fs::remove_file(directory.path().join("out.png")).unwrap();
    }

    // An edit with a reference.
    let reference = directory.path().join("blue.png");
    std::fs::write(&reference, png(64, 64, [0, 0, 255])).unwrap();
    browser
        .client
        .find(Locator::Id("files"))
        .await
        .unwrap()
        .send_keys(reference.to_str().unwrap())
        .await
        .unwrap();
    browser.client.wait().for_element(Locator::Css("#thumbs img")).await.unwrap();
    browser.click("go").await;
    browser.until("facts", "References\n1").await;
    assert!(browser.text("curl").await.contains("image[]=@blue.png"));
    let thumbs = browser.client.find_all(Locator::Css("#history img")).await.unwrap();
    assert_eq!(thumbs.len(), 2);
    browser.screenshot("3-edited").await;

    // Limits are checked by the browser, and by the server where it is passed by.
    browser.fill("width", "60").await;
    browser.click("go").await;
    let valid = browser
        .client
        .execute("return document.getElementById('form').checkValidity()", vec![])
        .await
        .unwrap();
    assert_eq!(valid, json!(false), "60 is off the grid");

    assert_eq!(browser.console_errors().await, [""; 0]);
    let script = "return performance.getEntriesByType('resource').map(entry => entry.name)";
    for name in browser.client.execute(script, vec![]).await.unwrap().as_array().unwrap() {
        let name = name.as_str().unwrap();
        assert!(
            name.starts_with(&server.url) || name.starts_with("blob:") || name.starts_with("data:"),
            "{NEEDS}: {name}"
        );
    }
    browser.client.goto(&format!("{}/docs", server.url)).await.unwrap();
    browser.until("routes", "POST /predict").await;
    browser.screenshot("4-reference").await;
    assert_eq!(browser.console_errors().await, [""; 0]);
    browser.client.clone().close().await.unwrap();
    server.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a browser: apt-get install chromium chromium-driver, then cargo test -p server --test it page -- --ignored"]
async fn cancel_errors_and_draining_are_shown_on_a_phone_in_the_dark() {
    let gate = Gate::closed();
    let server = TestServer::scripted(gate.clone(), Duration::ZERO, &[]).await;
    let browser = Browser::open(&[
        "--window-size=390,844",
        "--force-dark-mode",
        "--enable-features=WebContentsForceDark",
    ])
    .await;
    browser.client.goto(&server.url).await.unwrap();
    browser.until("model", "scripted").await;
    let fits = "return document.documentElement.scrollWidth <= innerWidth";
    assert_eq!(
        browser.client.execute(fits, vec![]).await.unwrap(),
        json!(true),
        "nothing sticks out on a phone"
    );
    browser.fill("width", "64").await;
    browser.fill("height", "64").await;
    browser.fill("prompt", "to be cancelled").await;
    browser.click("go").await;
    browser.until("status", "Reading").await;
    browser.client.active_element().await.unwrap().send_keys(&(Key::Escape + "")).await.unwrap();
    browser.until("status", "Cancelled").await;
    assert_eq!(browser.console_errors().await, [""; 0]);
    browser.screenshot("5-cancelled-dark-phone").await;

    gate.open();
    browser.fill("prompt", "nan").await;
    browser.click("go").await;
    browser.until("error", "not finite").await;
    browser.screenshot("6-error").await;

    server::serve::drain(&server.app);
    // The process still answers for its connections while it drains; a new one may be refused.
    browser.fill("prompt", "late").await;
    browser.click("go").await;
    browser.until("status", "Failed").await;
    let text = browser.text("error").await;
    assert!(text.contains("shutting down") || text.contains("cannot be reached"), "{text}");
    browser.screenshot("7-draining").await;
    browser.client.clone().close().await.unwrap();
    server.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a browser: apt-get install chromium chromium-driver, then cargo test -p server --test it page -- --ignored"]
async fn steps_guidance_and_the_one_size_are_those_of_the_model() {
    let server = TestServer::dev(&["--width", "64", "--height", "48"]).await;
    let browser = Browser::open(&["--window-size=1280,1000"]).await;
    browser.client.goto(&server.url).await.unwrap();
    browser.until("model", "tiny").await;
    assert!(browser.shown("steps").await && browser.shown("guidance").await);
    let values =
        "return ['steps', 'guidance', 'width', 'height'].map(id => document.getElementById(id).value)";
    assert_eq!(browser.client.execute(values, vec![]).await.unwrap(), json!(["50", "4", "64", "48"]));
    let fixed =
        "return [document.getElementById('width').readOnly, document.getElementById('preset').length]";
    assert_eq!(browser.client.execute(fixed, vec![]).await.unwrap(), json!([true, 1]));

    browser.fill("prompt", "a lighthouse").await;
    browser.fill("steps", "3").await;
    browser.fill("guidance", "2.5").await;
    browser.screenshot("8-dev").await;
    browser.click("go").await;
    browser.until("status", "Done in").await;
    assert_eq!(browser.picture().await, (64, 48));
    let facts = browser.text("facts").await;
    assert!(facts.contains("Steps\n3") && facts.contains("Guidance\n2.5"), "{facts}");
    let job = server.app.queue.all().pop().unwrap();
    let shown = server.get(&format!("/jobs/{}/image", job.id)).send().await.unwrap().bytes().await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    for (program, id) in [("sh", "curl"), ("python3", "python")] {
        let script = browser.text(id).await;
        let status = Command::new(program).args(["-c", &script]).current_dir(directory.path()).status();
        assert!(status.unwrap().success(), "{script}");
        assert_eq!(std::fs::read(directory.path().join("out.png")).unwrap(), shown, "{program}: {script}");
        std::fs::remove_file(directory.path().join("out.png")).unwrap();
    }
    assert_eq!(browser.console_errors().await, [""; 0]);
    browser.client.clone().close().await.unwrap();
    server.end().await.unwrap();
}

// SPDX-License-Identifier: Apache-2.0
//! How results and failures are shown: for people (colours only on a terminal) or as JSON.

use std::{
    fmt::Write as _,
    fs,
    io::{IsTerminal as _, Write as _},
    path::Path,
    process::ExitCode,
};

use serde::Serialize;
use serde_json::json;

use crate::error::Failure;

/// Where and how to show.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Machine form.
    pub json: bool,
    colors: bool,
}

impl Output {
    /// Colours: `--no-color` and `NO_COLOR` forbid, `CLICOLOR_FORCE` forces, else a terminal decides.
    pub fn new(json: bool, no_color: bool) -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0");
        let colors =
            !no_color && !set("NO_COLOR") && (set("CLICOLOR_FORCE") || std::io::stderr().is_terminal());
        Self { json, colors }
    }

    /// The result of a command: its JSON, or its text.
    pub fn result(self, value: &impl Serialize, text: &str) {
        let body = if self.json {
            format!("{}\n", serde_json::to_string_pretty(value).expect("results are plain data"))
        } else {
            text.to_owned()
        };
        // A reader that went away (a pipe to `head`) is no failure.
        let _ = std::io::stdout().write_all(body.as_bytes());
    }

    /// A line about what is going on, for people.
    pub fn note(self, text: &str) {
        if !self.json {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }

    /// Paints `text` if colours are on.
    pub fn paint(self, code: &str, text: &str) -> String {
        if self.colors { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
    }

    /// Shows a failure and gives its exit code.
    pub fn fail(self, failure: &Failure, manifest: Option<&Path>) -> ExitCode {
        let code = failure.class.exit_code();
        if self.json {
            let mut error = json!({"what": failure.what, "why": failure.why, "next_step": failure.next, "exit_code": code, "code": failure.class});
            if !failure.problems.is_empty() {
                error["problems"] = json!(failure.problems);
            }
            let text = serde_json::to_string_pretty(&json!({"error": error})).expect("plain data");
            let _ = writeln!(std::io::stdout(), "{text}");
            return code.into();
        }
        let mut out = String::new();
        if let Some(path) = manifest.filter(|_| !failure.problems.is_empty()) {
            let text =
                fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            for problem in &failure.problems {
                out += &problem.render(&path.display().to_string(), &text);
            }
            out += "\n";
        }
        let _ = writeln!(out, "{} {failure}", self.paint("1;31", "error:"));
        if !failure.next.is_empty() {
            let _ = writeln!(out, "\n{} {}", self.paint("1;36", "next:"), failure.next);
        }
        let _ = std::io::stderr().write_all(out.as_bytes());
        code.into()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! One form for what the two builders report, and what is kept of it: the log file, the last lines
//! of each step, the step that failed.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    time::Instant,
};

use bollard::models::{BuildInfo, BuildInfoAux};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::{At, Class, Failure, Result};

/// Lines of a step that are shown when it fails.
const KEPT: usize = 40;

/// Follows a build.
pub struct Follower {
    bar: ProgressBar,
    terminal: bool,
    quiet: bool,
    log: File,
    log_path: PathBuf,
    steps: BTreeMap<String, Step>,
    /// Key of the step that output without a key belongs to (classic builder).
    current: String,
    /// Id of the image, once it was reported.
    pub image: Option<String>,
    started: Instant,
}

#[derive(Default)]
struct Step {
    name: String,
    number: usize,
    partial: String,
    last: VecDeque<String>,
    failed: Option<String>,
    done: bool,
}

impl Follower {
    /// `quiet`: only the log file is written.
    pub fn new(log_path: &Path, quiet: bool) -> Result<Self> {
        let terminal = !quiet && console_is_terminal();
        let bar = ProgressBar::with_draw_target(
            None,
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
        );
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(std::time::Duration::from_millis(200));
        Ok(Self {
            bar,
            terminal,
            quiet,
            log: File::create(log_path).at("create", log_path)?,
            log_path: log_path.to_path_buf(),
            steps: BTreeMap::new(),
            current: String::new(),
            image: None,
            started: Instant::now(),
        })
    }

    /// Takes one message. Fields that are not known here were already ignored; a message without
    /// anything of interest is fine.
    pub fn take(&mut self, info: BuildInfo) {
        match info.aux {
            Some(BuildInfoAux::Default(image)) => self.image = image.id.or(self.image.take()),
            Some(BuildInfoAux::BuildKit(status)) => {
                for vertex in status.vertexes {
                    // All steps are listed at once; one is news when it starts.
                    if vertex.started.is_some() {
                        self.step(&vertex.digest, &vertex.name);
                    }
                    let step = self.steps.entry(vertex.digest).or_default();
                    step.done |= vertex.completed.is_some();
                    if !vertex.error.is_empty() && !vertex.error.contains("context canceled") {
                        step.failed = Some(vertex.error);
                    }
                }
                for log in status.logs {
                    self.output(&log.vertex, &String::from_utf8_lossy(&log.msg));
                }
            }
            None => {}
        }
        if let Some(text) = info.stream {
            if let Some(name) =
                text.strip_prefix("Step ").filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
            {
                let key = format!("{:06}", self.steps.len());
                self.step(&key, name.trim());
                self.current = key;
            } else {
                let key = self.current.clone();
                self.output(&key, &text);
            }
        }
        if let Some(status) = info.status {
            self.bar.set_message(status);
        }
    }

    fn step(&mut self, key: &str, name: &str) {
        let number = self.steps.len() + 1;
        let step = self.steps.entry(key.to_owned()).or_default();
        if !step.name.is_empty() {
            return;
        }
        name.clone_into(&mut step.name);
        step.number = number;
        let _ = writeln!(self.log, "[{:7.1} s] step {name}", self.started.elapsed().as_secs_f64());
        let shown: String = name.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(110).collect();
        self.say(&shown);
    }

    fn say(&self, text: &str) {
        if self.terminal {
            self.bar.set_message(text.to_owned());
        } else if !self.quiet {
            let _ = writeln!(std::io::stderr(), "  {text}");
        }
    }

    fn output(&mut self, key: &str, text: &str) {
        let step = self.steps.entry(key.to_owned()).or_default();
        // Pieces are cut anywhere, also inside a line or an escape sequence.
        step.partial.push_str(text);
        while let Some(at) = step.partial.find(['\n', '\r']) {
            let line = strip_escapes(&step.partial[..at]);
            step.partial.drain(..=at);
            if line.trim().is_empty() {
                continue;
            }
            let _ = writeln!(self.log, "{line}");
            if step.last.len() == KEPT {
                step.last.pop_front();
            }
            step.last.push_back(line);
        }
    }

    /// Ends the display.
    pub fn finish(&mut self) {
        self.bar.finish_and_clear();
        let _ = self.log.flush();
    }

    /// The failure as the last thing a user reads: the step, its command, its exit code, its last lines,
    /// where the rest is.
    pub fn failure(&mut self, engine_says: &str) -> Failure {
        self.finish();
        let failed = self.steps.values().filter(|step| step.failed.is_some()).max_by_key(|step| step.number);
        let step = failed
            .or_else(|| self.steps.get(&self.current))
            .or_else(|| self.steps.values().max_by_key(|step| step.number));
        let says = strip_escapes(step.and_then(|step| step.failed.as_deref()).unwrap_or(engine_says));
        let says = if exit_code(&says).is_some() || exit_code(engine_says).is_none() {
            says
        } else {
            strip_escapes(engine_says)
        };
        let name =
            step.map_or_else(|| "before its first step".to_owned(), |step| format!("in step {}", step.name));
        let mut why = says.trim().to_owned();
        if let Some(code) = exit_code(&why) {
            why = format!("exit code {code}\n  {why}");
        }
        let last = step
            .map(|step| {
                step.last
                    .iter()
                    .cloned()
                    .chain(std::iter::once(strip_escapes(&step.partial)))
                    .collect::<Vec<_>>()
            })
            .unwrap_or_default();
        let last: Vec<String> = last.into_iter().filter(|line| !line.trim().is_empty()).collect();
        if !last.is_empty() {
            why = format!(
                "{why}\n  last lines of the step:\n    {}",
                last[last.len().saturating_sub(20)..].join("\n    ")
            );
        }
        // The words may be the engine's own, or those of a tool in the step, which writes to the same disk.
        let full = why.to_lowercase().contains("no space left on device");
        let class = if full { Class::Disk } else { Class::Engine };
        let advice = if full { "free space for the engine (docker system df); " } else { "" };
        let failure = Failure::new(class, format!("the image build failed {name}")).why(why);
        failure.next(format!("{advice}full log: {}", self.log_path.display()))
    }
}

fn console_is_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&std::io::stderr())
}

/// The code in "returned a non-zero code: 17" (classic) or "exit code: 17" (BuildKit).
fn exit_code(text: &str) -> Option<u32> {
    let digits = ["non-zero code: ", "exit code: "]
        .iter()
        .find_map(|mark| text.rsplit_once(mark).map(|(_, rest)| rest))?;
    digits.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}

/// Without terminal escape sequences: a build log must not paint or move the reader's terminal.
pub fn strip_escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            if chars.next() == Some('[') {
                chars.by_ref().find(|c| ('@'..='~').contains(c));
            }
        } else if !c.is_control() || c == '\t' || c == '\n' {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_18_escapes_go_and_exit_codes_are_read_from_both_builders() {
        assert_eq!(strip_escapes("\x1b[91merror\x1b[0m: x\x07"), "error: x");
        assert_eq!(exit_code("The command '/bin/sh -c x' returned a non-zero code: 17"), Some(17));
        assert_eq!(exit_code("executor failed running [/bin/sh -c x]: exit code: 3"), Some(3));
        assert_eq!(exit_code("COPY failed: file not found"), None);
    }
}

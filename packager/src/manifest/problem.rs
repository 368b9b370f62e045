// SPDX-License-Identifier: Apache-2.0
//! One mistake in a manifest: where it stands, what was expected there, what was found, what to do.

use std::fmt::Write as _;

use serde::Serialize;

/// A position in a file, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Place {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

impl Place {
    /// For mistakes that belong to the file as a whole.
    pub const START: Self = Self { line: 1, column: 1 };
}

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Where it stands.
    #[serde(flatten)]
    pub place: Place,
    /// Dotted path of the key, `serve_profiles[0].hardware`; empty for the whole file.
    pub key: String,
    /// What the format wants there.
    pub expected: String,
    /// What stands there.
    pub found: String,
    /// What to do about it; may be empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hint: String,
}

impl Problem {
    /// A mistake at a place, without a hint.
    pub fn new(place: Place, key: &str, expected: &str, found: &str) -> Self {
        Self { place, key: key.into(), expected: expected.into(), found: found.into(), hint: String::new() }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: &str) -> Self {
        hint.clone_into(&mut self.hint);
        self
    }

    /// The mistake as a person reads it: `file:line:column`, the line with a caret, what was wanted.
    pub fn render(&self, file: &str, text: &str) -> String {
        let Place { line, column } = self.place;
        let key = if self.key.is_empty() { "the file" } else { &self.key };
        let mut out =
            format!("{file}:{line}:{column}: {key}: expected {}, found {}\n", self.expected, self.found);
        if let Some(source) = text.lines().nth(line - 1) {
            // A card paragraph can be one long line: show the part around the place.
            let from = column.saturating_sub(60).max(1);
            let shown: String = source.chars().skip(from - 1).take(100).collect();
            let _ = writeln!(out, "{line:>6} | {shown}");
            let _ = writeln!(out, "       | {}^", " ".repeat(column - from));
        }
        if !self.hint.is_empty() {
            let _ = writeln!(out, "       = hint: {}", self.hint);
        }
        out
    }
}

/// The known word closest to `word`, if it is close enough to be what was meant.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::normalized_damerau_levenshtein(&word.to_lowercase(), candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.5)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

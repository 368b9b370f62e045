// SPDX-License-Identifier: Apache-2.0
//! A JSON object read strictly: unknown and repeated fields are errors, and every error names the field, the value got
//! and the range. Values stay raw text until they are asked for, so that a number is echoed as it was written.

use std::ops::RangeInclusive;

use axum::http::StatusCode;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::errors::{ApiError, nearest};

/// Longest piece of a value that an error repeats.
const ECHO: usize = 60;

/// A value as it came.
#[derive(Clone, Debug)]
pub enum Raw<'a> {
    /// JSON text.
    Json(&'a str),
    /// The text of a form's field.
    Form(String),
}

/// The fields of a request that were not taken yet.
#[derive(Debug)]
pub struct Fields<'a> {
    fields: Vec<(String, Raw<'a>)>,
}

struct Pairs<'a>(Vec<(String, Raw<'a>)>);

impl<'de> Deserialize<'de> for Pairs<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Pairs<'de>;
            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<'de>, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
                    pairs.push((name, Raw::Json(value.get())));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

impl<'a> Fields<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 with the byte offset if it is not UTF-8 or not JSON; 422 if it is not an object or repeats a field.
    pub fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let bad = |code, message: String| Err(ApiError::new(StatusCode::BAD_REQUEST, code, message));
        let text = match std::str::from_utf8(body) {
            Ok(text) => text,
            Err(error) => {
                let offset = error.valid_up_to();
                return bad("not_utf8", format!("the body is not UTF-8 at byte {offset}"));
            }
        };
        let pairs: Pairs<'a> = match serde_json::from_str(text) {
            Ok(pairs) => pairs,
            Err(error) if error.is_data() => {
                let message = format!("the body is {}, wanted a JSON object", kind(text.trim_start()));
                return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "not_an_object", message));
            }
            Err(error) => {
                let offset = offset(text, error.line(), error.column());
                return bad("not_json", format!("the body is not JSON at byte {offset}: {error}"));
            }
        };
        Self::new(pairs.0)
    }

    /// The text fields of a form.
    ///
    /// # Errors
    /// 422 if a field is repeated.
    pub fn form(fields: Vec<(String, String)>) -> Result<Self, ApiError> {
        Self::new(fields.into_iter().map(|(name, text)| (name, Raw::Form(text))).collect())
    }

    fn new(fields: Vec<(String, Raw<'a>)>) -> Result<Self, ApiError> {
        let mut names = std::collections::HashSet::new();
        if let Some((name, _)) = fields.iter().find(|(name, _)| !names.insert(name)) {
            return Err(ApiError::field(clip(name), "is given twice"));
        }
        Ok(Self { fields })
    }

    /// A field's raw value; `null` counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Raw<'a>> {
        let index = self.fields.iter().position(|(known, _)| known == name)?;
        let (_, value) = self.fields.swap_remove(index);
        Some(value).filter(|value| !matches!(value, Raw::Json("null")))
    }

    /// Drops fields that are accepted and mean nothing here.
    pub fn ignore(&mut self, names: &[&str]) {
        self.fields.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// A string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let parse = |raw| match raw {
            Raw::Json(text) => as_string(name, text),
            Raw::Form(text) => Ok(text),
        };
        self.take(name).map(parse).transpose()
    }

    /// A whole number in `range`, written without fraction and exponent.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        self.take(name).map(|raw| as_integer(name, raw.text(), &range)).transpose()
    }

    /// A finite number.
    pub fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        self.parsed(name, "a number").map(|number: Option<f64>| number.filter(|number| number.is_finite()))
    }

    /// `true` or `false`.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.parsed(name, "true or false")
    }

    fn parsed<T: serde::de::DeserializeOwned>(
        &mut self,
        name: &str,
        wanted: &str,
    ) -> Result<Option<T>, ApiError> {
        let parse = |raw: Raw<'_>| {
            serde_json::from_str(raw.text())
                .map_err(|_| ApiError::field(name, format!("got {}, wanted {wanted}", clip(raw.text()))))
        };
        self.take(name).map(parse).transpose()
    }

    /// A list; its elements stay raw JSON.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<&'a RawValue>>, ApiError> {
        let refuse = |text: &str| ApiError::field(name, format!("got {}, wanted a list", clip(text)));
        match self.take(name) {
            None => Ok(None),
            Some(Raw::Json(text)) => serde_json::from_str(text).map(Some).map_err(|_| refuse(text)),
            Some(Raw::Form(text)) => Err(refuse(&text)),
        }
    }

    /// All fields were taken.
    ///
    /// # Errors
    /// 422 naming the first unknown field and the nearest of `known`.
    pub fn end(self, known: &[&str]) -> Result<(), ApiError> {
        let Some((name, _)) = self.fields.first() else { return Ok(()) };
        let hint = match nearest(name, known.iter().copied()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("known fields are {}", known.join(", ")),
        };
        let mut error = ApiError::field(clip(name), format!("unknown field; {hint}"));
        error.code = "unknown_field";
        Err(error)
    }
}

impl Raw<'_> {
    /// The text as it came.
    pub fn text(&self) -> &str {
        match self {
            Self::Json(text) => text,
            Self::Form(text) => text,
        }
    }
}

/// A string from raw JSON.
pub fn as_string(name: &str, raw: &str) -> Result<String, ApiError> {
    serde_json::from_str(raw)
        .map_err(|_| ApiError::field(name, format!("got {}, wanted a string", clip(raw))))
}

/// A whole number in `range` from its text: digits alone, so that no client's rounding goes unnoticed.
pub fn as_integer(name: &str, text: &str, range: &RangeInclusive<u64>) -> Result<u64, ApiError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && range.contains(number)).ok_or_else(|| {
        let (from, to) = (range.start(), range.end());
        let message = if from == to {
            format!("got {}, must be {from}", clip(text))
        } else {
            format!("got {}, wanted a whole number from {from} to {to}", clip(text))
        };
        ApiError::field(name, message)
    })
}

/// The start of a value, short enough for a message.
pub fn clip(text: &str) -> String {
    let mut clipped: String = text.chars().take(ECHO).flat_map(char::escape_default).collect();
    if text.chars().nth(ECHO).is_some() {
        clipped.push('…');
    }
    clipped.replace("\\\"", "\"")
}

fn kind(text: &str) -> &'static str {
    match text.bytes().next() {
        Some(b'[') => "a list",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "true or false",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// Byte offset of serde_json's line and column (in bytes, both from 1).
fn offset(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (start + column.saturating_sub(1)).min(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: &str) -> String {
        Fields::parse(body.as_bytes()).unwrap_err().message
    }

    #[test]
    fn bodies_that_are_not_json_are_told_where() {
        assert!(message("{\"prompt\": }").contains("byte 11"), "{}", message("{\"prompt\": }"));
        assert!(message("{\n\"a\": 1,\n!}").contains("byte 10"), "{}", message("{\n\"a\": 1,\n!}"));
        assert!(message("").contains("byte 0"));
        let error = Fields::parse(b"{\"a\": \"\xff\"}").unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (400, "not_utf8"));
        assert!(error.message.contains("byte 7"));
    }

    #[test]
    fn bodies_that_are_no_object_or_repeat_a_field_are_refused() {
        assert!(message("[1]").contains("a list"));
        assert!(message("null").contains("null"));
        assert!(message("{\"a\": 1, \"a\": 2}").contains("a: is given twice"));
    }

    #[test]
    fn case_79_integers_are_digits_in_range() {
        for text in ["-1", "1.0", "1e3", "11", "99999999999999999999", "\"5\"", "true", "[]", "+5"] {
            let error = as_integer("seed", text, &(0..=10)).unwrap_err();
            assert!(
                error.message.contains(text) && error.message.contains("from 0 to 10"),
                "{}",
                error.message
            );
        }
        assert_eq!(as_integer("seed", "7", &(0..=10)), Ok(7));
    }

    #[test]
    fn case_83_unknown_fields_name_the_nearest() {
        let fields = Fields::parse(b"{\"promt\": 1}").unwrap();
        let error = fields.end(&["prompt", "seed"]).unwrap_err();
        assert!(error.message.contains("did you mean prompt?"), "{}", error.message);
    }

    #[test]
    fn deep_nesting_does_not_end_the_process() {
        let deep = format!("{{\"a\": {}", "[".repeat(200_000));
        assert!(Fields::parse(deep.as_bytes()).is_err());
        let closed = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let _ = Fields::parse(closed.as_bytes()).map(|mut fields| fields.list("a").is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Checks a file against the JSON Schema of the manifest and reports every difference with its place.
//!
//! The schema is made from the types of `model.rs`, so an editor that uses it and this reader know
//! the same rules. Only the keywords that it uses are understood here; a test holds the reader
//! against an independent validator over the whole corpus.

use regex_lite::Regex;
use serde_json::{Map, Value};

use super::{
    problem::{Place, Problem, nearest},
    yaml::{Kind, Node, join},
};

/// All differences between `node` and `schema`, in file order.
pub fn check(schema: &Value, node: &Node) -> Vec<Problem> {
    let mut checker = Checker { root: schema, problems: Vec::new() };
    checker.value(schema, node, node.place, "");
    checker.problems.sort_by_key(|problem| problem.place);
    checker.problems
}

struct Checker<'a> {
    root: &'a Value,
    problems: Vec<Problem>,
}

impl<'a> Checker<'a> {
    fn resolve(&self, schema: &'a Value) -> &'a Value {
        let mut schema = schema;
        while let Some(reference) = schema["$ref"].as_str() {
            schema = self.root.pointer(reference.trim_start_matches('#')).unwrap_or(&Value::Null);
        }
        schema
    }

    fn accepts(&self, schema: &'a Value, node: &Node) -> bool {
        let mut trial = Checker { root: self.root, problems: Vec::new() };
        trial.value(schema, node, node.place, "");
        trial.problems.is_empty()
    }

    fn report(&mut self, place: Place, key: &str, expected: &str, found: &str, hint: &str) {
        self.problems.push(Problem::new(place, key, expected, found).hint(hint));
    }

    /// `at` is the place of the key for maps and lists, of the value for scalars.
    fn value(&mut self, schema: &'a Value, node: &Node, at: Place, path: &str) {
        let schema = self.resolve(schema);
        let place = if matches!(node.kind, Kind::Scalar(_)) { node.place } else { at };
        if let Some(branches) = schema["anyOf"].as_array() {
            match self.branch(branches, node) {
                Some(branch) => self.value(branch, node, at, path),
                None => self.wrong_type(&self.expected(schema), node, place, path),
            }
            return;
        }
        if let Some(choices) = Self::choices(schema) {
            if !matches!(&node.kind, Kind::Scalar(value) if choices.contains(&value)) {
                self.not_a_choice(&choices, node, place, path);
            }
            return;
        }
        if !Self::right_type(schema, node) {
            self.wrong_type(&self.expected(schema), node, place, path);
            return;
        }
        match &node.kind {
            Kind::Scalar(value) => self.scalar(schema, value, place, path),
            Kind::List(items) => {
                if let Some(min) = schema["minItems"].as_u64()
                    && (items.len() as u64) < min
                {
                    self.report(place, path, &format!("at least {min} entry"), "an empty list", "");
                }
                for (index, item) in items.iter().enumerate() {
                    self.value(&schema["items"], item, item.place, &format!("{path}[{index}]"));
                }
            }
            Kind::Map(entries) => self.map(schema, entries, place, path),
        }
        for rule in schema["allOf"].as_array().into_iter().flatten() {
            if self.accepts(&rule["if"], node) {
                self.value(&rule["then"], node, at, path);
            }
        }
    }

    fn map(&mut self, schema: &'a Value, entries: &[(String, Place, Node)], at: Place, path: &str) {
        let empty = Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&empty);
        for (key, key_at, node) in entries {
            let child = join(path, key);
            if let Some(property) = schema["properties"].get(key) {
                self.value(property, node, *key_at, &child);
            } else if schema["additionalProperties"] == Value::Bool(false) {
                let known: Vec<&str> = properties.keys().map(String::as_str).collect();
                let hint = nearest(key, known.iter().copied())
                    .map_or(String::new(), |near| format!("did you mean `{near}`?"));
                let expected = if known.is_empty() {
                    "no key here".into()
                } else {
                    format!("one of {}", known.join(", "))
                };
                self.report(*key_at, &child, &expected, "an unknown key", &hint);
            } else if schema["additionalProperties"].is_object() {
                self.value(&schema["additionalProperties"], node, *key_at, &child);
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !entries.iter().any(|(key, ..)| key == name) {
                let about = self.resolve(&properties[name]);
                let about = properties[name]["description"]
                    .as_str()
                    .or(about["description"].as_str())
                    .unwrap_or_default();
                self.report(
                    at,
                    &join(path, name),
                    &self.expected(&properties[name]),
                    "nothing (the key is missing)",
                    about,
                );
            }
        }
    }

    fn scalar(&mut self, schema: &'a Value, value: &Value, at: Place, path: &str) {
        if let (Some(pattern), Some(text)) = (schema["pattern"].as_str(), value.as_str()) {
            let fits = Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(text));
            if !fits {
                self.report(at, path, &self.expected(schema), &describe(value), "");
            }
        }
        let number = value.as_f64();
        let below = number < schema["minimum"].as_f64() && number.is_some();
        let above = schema["maximum"].as_f64().is_some_and(|max| number > Some(max));
        if below || above {
            self.report(at, path, &self.expected(schema), &describe(value), "");
        }
    }

    fn right_type(schema: &Value, node: &Node) -> bool {
        let fits = |name: &str| match (&node.kind, name) {
            (Kind::Map(_), "object") | (Kind::List(_), "array") => true,
            (Kind::Scalar(value), _) => match name {
                "string" => value.is_string(),
                "integer" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                "null" => value.is_null(),
                _ => false,
            },
            _ => false,
        };
        match &schema["type"] {
            Value::String(name) => fits(name),
            Value::Array(names) => names.iter().filter_map(Value::as_str).any(fits),
            _ => true,
        }
    }

    /// The branch of an `anyOf` that the author means: the right type, and for maps the most shared keys.
    fn branch(&self, branches: &'a [Value], node: &Node) -> Option<&'a Value> {
        let shared = |schema: &Value| match &node.kind {
            Kind::Map(entries) => {
                entries.iter().filter(|(key, ..)| schema["properties"].get(key).is_some()).count()
            }
            _ => 0,
        };
        let fitting = branches.iter().map(|branch| self.resolve(branch)).filter(|branch| {
            Self::choices(branch).is_some_and(|_| !matches!(&node.kind, Kind::Scalar(Value::Null)))
                || Self::right_type(branch, node)
        });
        fitting
            .enumerate()
            .max_by_key(|(index, branch)| (shared(branch), usize::MAX - index))
            .map(|(_, branch)| branch)
    }

    fn choices(schema: &'a Value) -> Option<Vec<&'a Value>> {
        if let Some(only) = schema.get("const") {
            return Some(vec![only]);
        }
        let one_of = || schema["oneOf"].as_array()?.iter().map(|choice| choice.get("const")).collect();
        schema["enum"].as_array().map(|choices| choices.iter().collect()).or_else(one_of)
    }

    fn not_a_choice(&mut self, choices: &[&Value], node: &Node, at: Place, path: &str) {
        let words: Vec<&str> = choices.iter().filter_map(|choice| choice.as_str()).collect();
        let expected = match words.as_slice() {
            [only] => format!("the string \"{only}\""),
            several => format!("one of {}", several.join(", ")),
        };
        let hint = match &node.kind {
            Kind::Scalar(Value::String(text)) => {
                nearest(text, words.iter().copied()).map(|near| format!("did you mean `{near}`?"))
            }
            Kind::Scalar(Value::Number(_)) => words
                .first()
                .map(|word| format!("write \"{word}\" in quotes: without them YAML reads a number")),
            _ => None,
        };
        self.report(at, path, &expected, &describe_node(node), &hint.unwrap_or_default());
    }

    fn wrong_type(&mut self, expected: &str, node: &Node, at: Place, path: &str) {
        let hint = match &node.kind {
            Kind::Scalar(Value::Null) if expected.contains("list") => {
                "write [] for an empty list, or remove the key"
            }
            Kind::Scalar(Value::Null) => "give it a value, or remove the key",
            Kind::Scalar(Value::Number(_) | Value::Bool(_)) if !expected.contains("number") => {
                "put the value in quotes"
            }
            Kind::Scalar(Value::String(_)) if expected.starts_with("a list") => {
                "begin the entry with `- `, or put it in [ ]"
            }
            Kind::Map(_) | Kind::List(_) | Kind::Scalar(_) => "",
        };
        self.report(at, path, expected, &describe_node(node), hint);
    }

    /// What a schema wants, in words.
    fn expected(&self, schema: &'a Value) -> String {
        let schema = self.resolve(schema);
        if let Some(words) = schema["x-expected"].as_str() {
            return words.into();
        }
        if let Some(branches) = schema["anyOf"].as_array() {
            let mut words: Vec<String> =
                branches.iter().map(|branch| self.expected(branch)).filter(|word| word != "null").collect();
            words.dedup();
            return words.join(" or ");
        }
        if let Some(choices) = Self::choices(schema) {
            let words: Vec<&str> = choices.iter().filter_map(|choice| choice.as_str()).collect();
            return if words.len() == 1 {
                format!("the string \"{}\"", words[0])
            } else {
                format!("one of {}", words.join(", "))
            };
        }
        let names = match &schema["type"] {
            Value::String(name) => vec![name.as_str()],
            Value::Array(names) => {
                names.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect()
            }
            _ => vec![],
        };
        let range = || match (schema["minimum"].as_i64(), schema["maximum"].as_i64()) {
            (Some(min), Some(max)) => format!("a whole number from {min} to {max}"),
            (Some(min), None) => format!("a whole number of at least {min}"),
            _ => "a whole number".into(),
        };
        let words: Vec<String> = names
            .into_iter()
            .map(|name| match name {
                "string" if schema.get("pattern").is_some() => "text that is not blank".into(),
                "string" => "a string".into(),
                "array" => format!("a list ({} each)", self.expected(&schema["items"])),
                "object" => match schema["properties"].as_object() {
                    Some(properties) => {
                        format!("a map of {}", properties.keys().cloned().collect::<Vec<_>>().join(", "))
                    }
                    None => "a map".into(),
                },
                "integer" => range(),
                other => other.into(),
            })
            .collect();
        if words.is_empty() { "any value".into() } else { words.join(" or ") }
    }
}

fn describe_node(node: &Node) -> String {
    match &node.kind {
        Kind::Scalar(value) => describe(value),
        Kind::List(_) => "a list".into(),
        Kind::Map(_) => "a map".into(),
    }
}

/// A scalar as a message shows it: shortened, with its type when that is the point.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "no value (null)".into(),
        Value::Bool(value) => format!("the boolean {value}"),
        Value::Number(value) => format!("the number {value}"),
        Value::String(text) if text.chars().count() > 60 => {
            format!("\"{}…\"", text.chars().take(60).collect::<String>())
        }
        other => other.to_string(),
    }
}

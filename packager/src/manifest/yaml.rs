// SPDX-License-Identifier: Apache-2.0
//! A YAML file as a tree that knows where everything stands.
//!
//! Two readers look at the text. `saphyr-parser` gives the events with line and column, from which
//! the tree is made; `serde_yaml` (the maintained `yaml_serde` under that name) reads the values.
//! serde_yaml alone would not do: it gives no place for most values, keeps the last of two equal map
//! keys without a word, and stops at the first mistake. What the two read differently, or what a
//! YAML 1.1 reader (the Python tools of this format) would read differently, is refused here: a
//! manifest must mean the same to everyone who opens it.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Value};

use super::problem::{Place, Problem};

/// More nodes than any manifest has; aliases count as what they expand to.
const MAX_NODES: usize = 20_000;
/// Deeper than any manifest is, and far from the end of the stack.
const MAX_DEPTH: usize = 64;
/// A manifest carries a whole model card, but no more than that.
pub const MAX_BYTES: usize = 1 << 20;

/// One value and its place.
#[derive(Debug, Clone)]
pub struct Node {
    /// Where the value starts.
    pub place: Place,
    /// The value.
    pub kind: Kind,
}

/// What a node holds.
#[derive(Debug, Clone)]
pub enum Kind {
    /// A scalar, already resolved by the core schema; never an array or object.
    Scalar(Value),
    /// A list.
    List(Vec<Node>),
    /// Key, place of the key, value; in file order, without repeats.
    Map(Vec<(String, Place, Node)>),
}

impl Node {
    /// The value without places.
    pub fn value(&self) -> Value {
        match &self.kind {
            Kind::Scalar(value) => value.clone(),
            Kind::List(items) => Value::Array(items.iter().map(Node::value).collect()),
            Kind::Map(entries) => Value::Object(
                entries.iter().map(|(key, _, node)| (key.clone(), node.value())).collect::<Map<_, _>>(),
            ),
        }
    }

    /// The place of the deepest part of `path` (keys and list indices) that exists.
    pub fn locate(&self, path: &str) -> Place {
        let mut node = self;
        let mut place = self.place;
        for step in
            path.split(['.', '[']).map(|step| step.trim_end_matches(']')).filter(|step| !step.is_empty())
        {
            let next = match &node.kind {
                Kind::Map(entries) => {
                    entries.iter().find(|(key, ..)| key == step).map(|(_, at, node)| (*at, node))
                }
                Kind::List(items) => {
                    step.parse().ok().and_then(|i: usize| items.get(i)).map(|node| (node.place, node))
                }
                Kind::Scalar(_) => None,
            };
            let Some((at, child)) = next else { break };
            place = if matches!(child.kind, Kind::Scalar(_)) { child.place } else { at };
            node = child;
        }
        place
    }

    fn size(&self) -> usize {
        match &self.kind {
            Kind::Scalar(_) => 1,
            Kind::List(items) => 1 + items.iter().map(Node::size).sum::<usize>(),
            Kind::Map(entries) => 1 + entries.iter().map(|(.., node)| node.size()).sum::<usize>(),
        }
    }
}

/// Reads one document. Problems that leave a usable tree come back beside it.
pub fn parse(text: &str) -> Result<(Node, Vec<Problem>), Vec<Problem>> {
    if text.len() > MAX_BYTES {
        let found = format!("{} bytes", text.len());
        return Err(vec![Problem::new(
            Place::START,
            "",
            &format!("a file of at most {MAX_BYTES} bytes"),
            &found,
        )]);
    }
    let mut builder = Builder {
        events: Parser::new_from_str(text),
        problems: Vec::new(),
        anchors: HashMap::new(),
        nodes: 0,
    };
    let root = builder.document().map_err(|problem| vec![*problem])?;
    let problems = builder.problems;
    if problems.is_empty() {
        // The second reader: same text, same meaning, or the file is refused.
        match serde_yaml::from_str::<Value>(text) {
            Ok(value) if value == root.value() => {}
            Ok(_) => {
                let problem = Problem::new(
                    Place::START,
                    "",
                    "YAML that every reader understands alike",
                    "a construct that two readers take differently",
                );
                return Err(vec![problem.hint("quote the strings that look like something else")]);
            }
            Err(error) => {
                let place = error
                    .location()
                    .map_or(Place::START, |at| Place { line: at.line(), column: at.column() });
                return Err(vec![Problem::new(place, "", "valid YAML", &error.to_string())]);
            }
        }
    }
    Ok((root, problems))
}

type Step<T> = Result<T, Box<Problem>>;

struct Builder<'a> {
    events: Parser<'a, saphyr_parser::StrInput<'a>>,
    problems: Vec<Problem>,
    anchors: HashMap<usize, (Node, usize)>,
    nodes: usize,
}

fn place(span: Span) -> Place {
    Place { line: span.start.line(), column: span.start.col() + 1 }
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Step<(Event<'a>, Place)> {
        match self.events.next() {
            Some(Ok((event, span))) => Ok((event, place(span))),
            Some(Err(error)) => {
                let at = Place { line: error.marker().line(), column: error.marker().col() + 1 };
                Err(Box::new(Problem::new(at, "", "valid YAML", error.info())))
            }
            None => Err(Box::new(Problem::new(Place::START, "", "a YAML mapping", "an empty file"))),
        }
    }

    fn document(&mut self) -> Step<Node> {
        loop {
            match self.next()? {
                (Event::StreamEnd, at) => {
                    return Err(Box::new(Problem::new(at, "", "a YAML mapping", "an empty file")));
                }
                (Event::StreamStart | Event::DocumentStart(_) | Event::Nothing, _) => {}
                (event, at) => {
                    let root = self.node(event, at, "", 0)?;
                    return self.only_document().map(|()| root);
                }
            }
        }
    }

    fn only_document(&mut self) -> Step<()> {
        loop {
            match self.next()? {
                (Event::StreamEnd, _) => return Ok(()),
                (Event::DocumentStart(_), at) => {
                    return Err(Box::new(
                        Problem::new(at, "", "one document", "a second one")
                            .hint("remove the `---` and what follows"),
                    ));
                }
                _ => {}
            }
        }
    }

    fn count(&mut self, more: usize, at: Place, path: &str) -> Step<()> {
        self.nodes += more;
        if self.nodes <= MAX_NODES {
            return Ok(());
        }
        let problem =
            Problem::new(at, path, &format!("at most {MAX_NODES} values, aliases expanded"), "more");
        Err(Box::new(problem.hint("write the values out instead of nesting aliases")))
    }

    fn node(&mut self, event: Event<'a>, at: Place, path: &str, depth: usize) -> Step<Node> {
        self.count(1, at, path)?;
        if depth > MAX_DEPTH {
            return Err(Box::new(Problem::new(
                at,
                path,
                &format!("at most {MAX_DEPTH} levels"),
                "deeper nesting",
            )));
        }
        let (kind, anchor, tag) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                (Kind::Scalar(self.scalar(&text, style, at, path)), anchor, tag)
            }
            Event::SequenceStart(anchor, tag) => (self.list(path, depth)?, anchor, tag),
            Event::MappingStart(anchor, tag) => (self.map(path, depth)?, anchor, tag),
            Event::Alias(id) => {
                let Some((node, size)) = self.anchors.get(&id).cloned() else {
                    return Err(Box::new(Problem::new(
                        at,
                        path,
                        "an alias of a finished anchor",
                        "an alias inside its own anchor",
                    )));
                };
                self.count(size, at, path)?;
                return Ok(node);
            }
            other => return Err(Box::new(Problem::new(at, path, "a value", &format!("{other:?}")))),
        };
        if let Some(tag) = tag {
            let found = format!("the tag {}{}", tag.handle, tag.suffix);
            self.problems
                .push(Problem::new(at, path, "plain YAML without tags", &found).hint("remove the tag"));
        }
        let node = Node { place: at, kind };
        if anchor != 0 {
            let size = node.size();
            self.anchors.insert(anchor, (node.clone(), size));
        }
        Ok(node)
    }

    fn list(&mut self, path: &str, depth: usize) -> Step<Kind> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Kind::List(items)),
                (event, at) => {
                    items.push(self.node(event, at, &format!("{path}[{}]", items.len()), depth + 1)?);
                }
            }
        }
    }

    fn map(&mut self, path: &str, depth: usize) -> Step<Kind> {
        let mut entries: Vec<(String, Place, Node)> = Vec::new();
        loop {
            let (event, key_at) = self.next()?;
            let key = match event {
                Event::MappingEnd => return Ok(Kind::Map(entries)),
                Event::Scalar(text, ..) => text.into_owned(),
                _ => {
                    return Err(Box::new(Problem::new(
                        key_at,
                        path,
                        "a plain key",
                        "a list, map or alias as key",
                    )));
                }
            };
            let child = join(path, &key);
            if key == "<<" {
                let problem = Problem::new(
                    key_at,
                    &child,
                    "keys written out",
                    "a merge key (`<<`), which readers treat differently",
                );
                self.problems.push(problem.hint("repeat the values here"));
            }
            let (event, at) = self.next()?;
            let node = self.node(event, at, &child, depth + 1)?;
            match entries.iter().find(|(earlier, ..)| *earlier == key) {
                Some((_, first, _)) => {
                    let problem = Problem::new(
                        key_at,
                        &child,
                        "each key once",
                        &format!("`{key}` again; it is already on line {}", first.line),
                    );
                    self.problems.push(problem.hint("keep one of the two"));
                }
                None => entries.push((key, key_at, node)),
            }
        }
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, at: Place, path: &str) -> Value {
        if style != ScalarStyle::Plain {
            return Value::String(text.to_owned());
        }
        if let Some(taken_as) = read_differently(text) {
            let problem = Problem::new(
                at,
                path,
                "a value that every YAML reader takes alike",
                &format!("`{text}`, which some readers take as {taken_as}"),
            );
            self.problems.push(problem.hint(&format!(
                "write \"{text}\" in quotes if it is text, or true, false or a decimal number"
            )));
        }
        resolve(text)
    }
}

/// Appends a key to a dotted path.
pub fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// A plain scalar by the YAML 1.2 core schema.
fn resolve(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if !digits.is_empty()
        && digits.bytes().all(|b| b.is_ascii_digit())
        && (digits == "0" || !digits.starts_with('0'))
    {
        let number = text.strip_prefix('+').unwrap_or(text);
        if let Ok(number) = number.parse::<i64>() {
            return number.into();
        }
        if let Ok(number) = number.parse::<u64>() {
            return number.into();
        }
        return Value::String(text.to_owned());
    }
    let looks_like_float = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && digits.bytes().any(|b| b.is_ascii_digit())
        && digits.contains(['.', 'e', 'E']);
    if looks_like_float && let Some(number) = text.parse::<f64>().ok().and_then(serde_json::Number::from_f64)
    {
        return Value::Number(number);
    }
    Value::String(text.to_owned())
}

/// What a YAML 1.1 reader takes this plain scalar for, when a YAML 1.2 reader takes it as text.
fn read_differently(text: &str) -> Option<&'static str> {
    const TRUTH: [&str; 12] = ["yes", "Yes", "YES", "no", "No", "NO", "on", "On", "ON", "off", "Off", "OFF"];
    if TRUTH.contains(&text) || (["y", "Y", "n", "N"].contains(&text)) {
        return Some("true or false");
    }
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let all = |accept: fn(u8) -> bool| digits.bytes().all(accept);
    let leading_zero =
        digits.len() > 1 && digits.starts_with('0') && all(|b| b.is_ascii_digit() || b == b'_');
    let radix = ["0x", "0o", "0b"].iter().any(|prefix| digits.starts_with(prefix))
        && digits.len() > 2
        && digits[2..].bytes().all(|b| b.is_ascii_hexdigit() || b == b'_');
    let underscore = digits.contains('_') && all(|b| b.is_ascii_digit() || b == b'_' || b == b'.');
    let sexagesimal = digits.contains(':')
        && digits.split(':').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    if leading_zero || radix || underscore || sexagesimal {
        return Some("a number");
    }
    // Exponents: `1e3` is text to YAML 1.1, which wants `1.0e+3`; a 7-digit revision can look like that.
    let exponent = digits.contains(['e', 'E']) && digits.parse::<f64>().is_ok();
    if exponent || [".inf", ".Inf", ".INF", ".nan", ".NaN", ".NAN"].contains(&digits) {
        return Some("a number");
    }
    let mut date = digits
        .split(['T', ' '])
        .next()
        .unwrap_or_default()
        .split('-')
        .map(|part| part.bytes().all(|b| b.is_ascii_digit()).then_some(part.len()));
    (date.next() == Some(Some(4))
        && matches!(date.next(), Some(Some(1 | 2)))
        && matches!(date.next(), Some(Some(1 | 2)))
        && date.next().is_none())
    .then_some("a date")
}

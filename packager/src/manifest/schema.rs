// SPDX-License-Identifier: Apache-2.0
//! The JSON Schema of the manifest: made from the types, with what `kind` says about `runtime`.

use std::sync::LazyLock;

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Value, json};

use super::{
    model::{Kind, Manifest},
    runtime::{HttpServer, TtDitServer, VllmFork, VllmPlugin},
};

/// The schema, as `packager schema` prints it.
pub fn schema() -> &'static Value {
    static SCHEMA: LazyLock<Value> = LazyLock::new(build);
    &SCHEMA
}

fn build() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let runtimes = [
        (Kind::VllmPlugin, generator.subschema_for::<VllmPlugin>()),
        (Kind::VllmFork, generator.subschema_for::<VllmFork>()),
        (Kind::TtDitServer, generator.subschema_for::<TtDitServer>()),
        (Kind::HttpServer, generator.subschema_for::<HttpServer>()),
    ];
    let mut root = Manifest::json_schema(&mut generator).to_value();
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    root["title"] = json!("tt-model container package, schema 5.1");
    root["allOf"] = runtimes
        .iter()
        .map(|(kind, runtime)| {
            let condition = json!({"properties": {"kind": {"const": kind.name()}}});
            let condition = match kind {
                // The default: also when the key is absent.
                Kind::VllmPlugin => condition,
                _ => json!({"properties": condition["properties"], "required": ["kind"]}),
            };
            json!({"if": condition, "then": {"properties": {"runtime": runtime}, "required": ["runtime"]}})
        })
        .collect();
    root["$defs"] = generator.take_definitions(true).into();
    // A flattened struct cannot say by itself that it is closed.
    if let Some(profile) = root["$defs"]["Profile"].as_object_mut() {
        profile.remove("unevaluatedProperties");
        profile.insert("additionalProperties".into(), json!(false));
    }
    root
}

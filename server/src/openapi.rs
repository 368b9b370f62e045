// SPDX-License-Identifier: Apache-2.0
//! The description of the routes, from the handlers themselves, with the ranges of the model that is served.

use std::collections::BTreeMap;

use flux2::request::Limits;
use utoipa::{
    IntoResponses, OpenApi, PartialSchema, ToSchema,
    openapi::{
        ContentBuilder, HeaderBuilder, Ref, RefOr, Response, ResponseBuilder, Schema,
        schema::{AdditionalProperties, ArrayItems, SchemaType, Type},
    },
};

use crate::{config::MAX_IMAGE_BASE64, errors::ErrorBody, routes};

/// All routes.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "flux2-server",
        description = "FLUX.2 images over HTTP: text to image, editing, and one to three reference images.\n\n\
            Every error has one body; every answer carries X-Request-Id. Where API keys are set, send \
            `Authorization: Bearer KEY`. Clients (by API key, else by address) take turns; a full queue answers 429 with \
            Retry-After.",
        license(name = "Apache-2.0")
    ),
    paths(
        routes::predict::predict,
        routes::jobs::generate,
        routes::jobs::list,
        routes::jobs::show,
        routes::jobs::image,
        routes::jobs::cancel,
        routes::job_events::events,
        routes::openai::generations,
        routes::openai::edits,
        routes::health::models,
        routes::health::health,
        routes::health::info,
        routes::health::liveness,
        routes::health::metrics,
        routes::docs::page,
        routes::docs::reference,
        routes::docs::openapi,
    ),
    components(schemas(ErrorBody))
)]
struct Routes;

/// The document, with the ranges of `limits`.
pub fn document(limits: &Limits) -> utoipa::openapi::OpenApi {
    let mut document = Routes::openapi();
    let Some(components) = document.components.as_mut() else { return document };
    for name in ["PredictRequest", "GenerateRequest", "GenerationRequest", "EditRequest"] {
        if let Some(RefOr::T(Schema::Object(object))) = components.schemas.get_mut(name) {
            if matches!(name, "PredictRequest" | "GenerateRequest") {
                object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
            }
            for (field, schema) in &mut object.properties {
                if let RefOr::T(schema) = schema {
                    set_range(field, schema, limits);
                }
            }
        }
    }
    document
}

fn set_range(field: &str, schema: &mut Schema, limits: &Limits) {
    match schema {
        Schema::Object(object) => {
            let range = match field {
                "width" => Some(
                    limits.only_size.map_or((limits.min_side, limits.max_side), |[width, _]| (width, width)),
                ),
                "height" => Some(
                    limits
                        .only_size
                        .map_or((limits.min_side, limits.max_side), |[_, height]| (height, height)),
                ),
                "num_steps" | "num_inference_steps" => Some((*limits.steps.start(), *limits.steps.end())),
                _ => None,
            };
            if let Some((from, to)) = range {
                object.minimum = Some(from.into());
                object.maximum = Some(to.into());
            }
            match field {
                "guidance_scale" => object.minimum = Some(0_u64.into()),
                "width" | "height" => object.multiple_of = Some(limits.grid.into()),
                "seed" => {
                    object.minimum = Some(0_u64.into());
                    object.maximum = Some((flux2::request::SEED_END - 1).into());
                }
                "prompt" => object.max_length = Some(limits.max_prompt_chars),
                _ => {}
            }
        }
        Schema::Array(array) if matches!(field, "images" | "image") => {
            array.max_items = Some(limits.max_references);
            if let ArrayItems::RefOrSchema(items) = &mut array.items
                && let RefOr::T(Schema::Object(item)) = items.as_mut()
                && item.schema_type == SchemaType::Type(Type::String)
            {
                item.max_length = Some(MAX_IMAGE_BASE64);
            }
        }
        _ => {}
    }
}

fn refusal(description: &str) -> RefOr<Response> {
    let body = ContentBuilder::new().schema(Some(Ref::from_schema_name(ErrorBody::name()))).build();
    let id =
        HeaderBuilder::new().schema(Some(String::schema())).description(Some("Id of the request")).build();
    let response = ResponseBuilder::new()
        .description(description)
        .content("application/json", body)
        .header("X-Request-Id", id);
    RefOr::T(response.build())
}

fn refusals(list: &[(&str, &str)]) -> BTreeMap<String, RefOr<Response>> {
    list.iter().map(|(status, description)| ((*status).to_owned(), refusal(description))).collect()
}

/// What a route that makes pictures may answer besides a picture.
pub struct Refusals;

impl IntoResponses for Refusals {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[
            ("400", "The body is not JSON, not UTF-8, a broken form, or broke off"),
            ("401", "An API key is needed"),
            ("408", "The body did not arrive in time"),
            ("409", "The job was cancelled"),
            ("413", "The body is over the limit"),
            ("415", "Wrong or missing content type"),
            ("422", "A field breaks the contract"),
            ("429", "The queue is full, or the wait would be too long; Retry-After says when to try again"),
            ("500", "The run failed; no picture was made"),
            ("503", "Loading, shutting down, or the device is lost"),
            ("504", "The run went over its execution limit"),
        ])
    }
}

/// What a route about jobs may answer besides the job.
pub struct JobRefusals;

impl IntoResponses for JobRefusals {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[
            ("400", "The path is not UTF-8"),
            ("401", "An API key is needed"),
            ("404", "There is no such job"),
            ("409", "The job's state does not allow it"),
            ("410", "The job was removed after its time"),
        ])
    }
}

/// A route that needs a key where keys are set.
pub struct Unauthorized;

impl IntoResponses for Unauthorized {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        refusals(&[("401", "An API key is needed")])
    }
}

// SPDX-License-Identifier: Apache-2.0
//! From pixels to a file, with everything that is needed to make the picture again in its metadata.
//!
//! PNG carries UTF-8 text chunks; JPEG and WebP carry the same as JSON in EXIF's image description.

use bytes::Bytes;
use flux2::RgbImage;
use image::{ExtendedColorType, ImageEncoder, codecs::jpeg::JpegEncoder, codecs::webp::WebPEncoder};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::queue::job::Params;

/// File format of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutputFormat {
    /// Lossless; identical pixels for identical requests.
    #[default]
    Png,
    /// Lossy, at the quality that `output_compression` gives.
    Jpeg,
    /// Lossless WebP.
    Webp,
}

impl OutputFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Png, Self::Jpeg, Self::Webp];

    /// Name in requests and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpeg",
            Self::Webp => "webp",
        }
    }

    /// Content type.
    pub const fn mime(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Webp => "image/webp",
        }
    }
}

/// Key and value of each entry of the metadata.
pub type Metadata = Vec<(&'static str, String)>;

/// What a picture says about itself.
pub fn metadata(
    params: &Params,
    model: &str,
    revision: &str,
    package: Option<&str>,
    prompt: bool,
) -> Metadata {
    let mut entries = vec![
        ("Software", format!("flux2-server {}", env!("CARGO_PKG_VERSION"))),
        ("model", model.to_owned()),
        ("model_revision", revision.to_owned()),
        ("seed", params.seed.to_string()),
        ("width", params.width.to_string()),
        ("height", params.height.to_string()),
        ("num_steps", params.num_steps.to_string()),
        ("reference_count", params.reference_count.to_string()),
    ];
    entries.extend(params.guidance_scale.map(|scale| ("guidance_scale", scale.to_string())));
    if let Some(digest) = package {
        entries.push(("package_digest", digest.to_owned()));
    }
    if prompt {
        entries.push(("prompt", params.prompt.clone()));
    }
    entries
}

/// Encodes a picture. `quality` 0 to 100 is used by JPEG alone.
pub fn encode(
    image: &RgbImage,
    format: OutputFormat,
    quality: u8,
    metadata: &Metadata,
) -> Result<Bytes, String> {
    let (width, height) = image.dimensions();
    let mut file = Vec::new();
    let done =
        match format {
            OutputFormat::Png => {
                let text: Vec<(&str, &str)> =
                    metadata.iter().map(|(key, value)| (*key, value.as_str())).collect();
                return Ok(flux2::pixels::encode_png(image, &text).into());
            }
            OutputFormat::Jpeg => {
                let mut encoder = JpegEncoder::new_with_quality(&mut file, quality.max(1));
                encoder.set_exif_metadata(exif(metadata)).map_err(image::ImageError::Unsupported).and_then(
                    |()| encoder.write_image(image.as_raw(), width, height, ExtendedColorType::Rgb8),
                )
            }
            OutputFormat::Webp => {
                let mut encoder = WebPEncoder::new_lossless(&mut file);
                encoder.set_exif_metadata(exif(metadata)).map_err(image::ImageError::Unsupported).and_then(
                    |()| encoder.write_image(image.as_raw(), width, height, ExtendedColorType::Rgb8),
                )
            }
        };
    done.map(|()| Bytes::from(file)).map_err(|error| error.to_string())
}

/// A TIFF block (EXIF 3.0, section 4.6) with the one tag `ImageDescription`, holding the metadata as JSON.
fn exif(metadata: &Metadata) -> Vec<u8> {
    const IMAGE_DESCRIPTION: u16 = 0x010E;
    const UTF8: u16 = 129;
    let object: serde_json::Map<String, serde_json::Value> =
        metadata.iter().map(|(key, value)| ((*key).to_owned(), value.as_str().into())).collect();
    let mut text = serde_json::Value::Object(object).to_string().into_bytes();
    text.push(0);
    let mut block = b"II*\0".to_vec();
    block.extend(8_u32.to_le_bytes()); // offset of the only directory
    block.extend(1_u16.to_le_bytes()); // which has one entry
    block.extend(IMAGE_DESCRIPTION.to_le_bytes());
    block.extend(UTF8.to_le_bytes());
    block.extend((text.len() as u32).to_le_bytes());
    block.extend(26_u32.to_le_bytes()); // offset of the text: right behind
    block.extend(0_u32.to_le_bytes()); // no further directory
    block.extend(text);
    block
}

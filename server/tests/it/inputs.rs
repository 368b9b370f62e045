// SPDX-License-Identifier: Apache-2.0
//! Images that strangers send.

use std::io::Cursor;

use base64::{Engine, engine::general_purpose};
use image::{DynamicImage, ImageFormat, Rgba, RgbaImage};
use reqwest::multipart::{Form, Part};
use serde_json::{Value, json};
use server::config::{MAX_IMAGE_BASE64, MAX_IMAGE_BYTES};

use crate::support::{TestServer, answer, base64, png, refused, shared, small, with};

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../code/tests/fixtures/references/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn edit(image: &str) -> Value {
    with(small("edit"), &json!({"images": [image], "seed": 5}))
}

async fn edited(server: &TestServer, image: &str) -> String {
    let (status, body) = server.post_json("/predict", &edit(image)).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["reference_count"], 1);
    body["image"].as_str().unwrap().to_owned()
}

async fn refused_image(server: &TestServer, image: &str) -> String {
    refused(&server.post_json("/predict", &edit(image)).await, 422, "images[0]")
}

fn encoded(image: impl Into<DynamicImage>) -> String {
    let mut file = Cursor::new(Vec::new());
    image.into().write_to(&mut file, ImageFormat::Png).unwrap();
    base64(file.get_ref())
}

/// Alpha over white, whatever colour hides below it.
#[tokio::test]
async fn case_59_hidden_colours_have_no_influence() {
    let server = shared();
    let hidden = |colour: [u8; 3]| {
        RgbaImage::from_fn(64, 64, |x, _| {
            if x < 32 { Rgba([200, 30, 30, 255]) } else { Rgba([colour[0], colour[1], colour[2], 0]) }
        })
    };
    let white =
        image::RgbImage::from_fn(64, 64, |x, _| image::Rgb(if x < 32 { [200, 30, 30] } else { [255; 3] }));
    let on_white = edited(&server, &encoded(white)).await;
    assert_eq!(edited(&server, &encoded(hidden([0, 0, 0]))).await, on_white);
    assert_eq!(edited(&server, &encoded(hidden([7, 250, 90]))).await, on_white);
}

#[tokio::test]
async fn case_61_cmyk_is_converted_or_refused_never_inverted() {
    let server = shared();
    let (status, body) = server.post_json("/predict", &edit(&base64(&fixture("cmyk.jpg")))).await;
    match status.as_u16() {
        200 => assert_eq!(body["reference_count"], 1),
        _ => assert!(refused(&(status, body), 422, "images[0]").contains("CMYK")),
    }
}

#[tokio::test]
async fn case_62_one_frame_of_the_listed_formats() {
    let server = shared();
    let grey = image::GrayImage::from_fn(64, 80, |x, y| image::Luma([(x * 3 + y) as u8]));
    let grey = DynamicImage::from(grey);
    let forms = [
        grey.clone(),
        grey.to_luma_alpha8().into(),
        grey.to_luma16().into(),
        grey.to_luma_alpha16().into(),
        grey.to_rgb16().into(),
        grey.to_rgba8().into(),
    ];
    let wanted = edited(&server, &encoded(grey.to_rgb8())).await;
    for form in forms {
        assert_eq!(edited(&server, &encoded(form)).await, wanted, "grey is the same grey in every depth");
    }
    for depth in [png::BitDepth::One, png::BitDepth::Two, png::BitDepth::Four, png::BitDepth::Eight] {
        edited(&server, &base64(&palette(depth))).await;
    }
    for format in [ImageFormat::Jpeg, ImageFormat::WebP] {
        let mut file = Cursor::new(Vec::new());
        grey.to_rgb8().write_to(&mut file, format).unwrap();
        edited(&server, &base64(file.get_ref())).await;
    }
    for name in ["animated.webp", "animated.png"] {
        let message = refused_image(&server, &base64(&fixture(name))).await;
        assert!(message.contains("frame") || message.contains("animat"), "{name}: {message}");
    }
    let message = refused_image(&server, &base64(&fixture("image.gif"))).await;
    assert!(message.contains("PNG"), "{message}");
}

/// A picture of palette entry 1.
fn palette(depth: png::BitDepth) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 64, 64);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(depth);
    encoder.set_palette(vec![0, 0, 0, 200, 100, 50]);
    let bits = depth as usize;
    let byte = (0..8).step_by(bits).fold(0_u8, |byte, shift| byte | 1 << shift);
    encoder.write_header().unwrap().write_image_data(&vec![byte; 64 * 64 * bits / 8]).unwrap();
    file
}

/// A head that promises 19000 × 19000 pixels is all that is read.
#[tokio::test]
async fn case_64_large_pictures_are_refused_by_their_head() {
    let server = shared();
    let mut file = png(64, 64, [1, 2, 3]);
    file[16..20].copy_from_slice(&19_000_u32.to_be_bytes());
    file[20..24].copy_from_slice(&19_000_u32.to_be_bytes());
    let crc = crc32(&file[12..29]);
    file[29..33].copy_from_slice(&crc.to_be_bytes());
    let start = std::time::Instant::now();
    let bomb = edit(&base64(&file));
    let attack = server.post_json("/predict", &bomb);
    let (answer, (status, _)) = tokio::join!(attack, server.get_json("/health"));
    assert_eq!(status, 200);
    let message = refused(&answer, 422, "images[0]");
    assert!(message.contains("19000"), "{message}");
    assert!(start.elapsed().as_secs() < 5);
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 },
        )
    })
}

#[tokio::test]
async fn case_65_other_formats_are_refused_whatever_they_are_called() {
    let server = shared();
    for magic in [
        &b"BM\x3a\0\0\0\0\0\0\0"[..],
        b"II*\0\x08\0\0\0",
        b"MM\0*\0\0\0\x08",
        b"\0\0\x01\0\x01\0",
        b"%PDF-1.4",
        b"<svg xmlns=''/>",
        b"P6 1 1 255 abc",
    ] {
        let padded = [magic, &[0; 64]].concat();
        let text = format!("data:image/png;base64,{}", base64(&padded));
        let message = refused_image(&server, &text).await;
        assert!(message.contains("PNG") && message.contains("WebP"), "{message}");
    }
    let cut = &png(64, 64, [1, 2, 3])[..40];
    refused_image(&server, &base64(cut)).await;
}

#[tokio::test]
async fn case_66_and_67_base64_in_every_form_is_the_same_picture() {
    let server = shared();
    let file = png(64, 64, [10, 200, 251]);
    let standard = base64(&file);
    let wanted = edited(&server, &standard).await;
    let wrapped: String = standard
        .as_bytes()
        .chunks(76)
        .flat_map(|line| [std::str::from_utf8(line).unwrap(), "\r\n"])
        .collect();
    for form in [
        general_purpose::URL_SAFE.encode(&file),
        general_purpose::URL_SAFE_NO_PAD.encode(&file),
        general_purpose::STANDARD_NO_PAD.encode(&file),
        format!(" {wrapped}\n\t"),
        format!("data:image/png;base64,{standard}"),
        format!("data:image/jpeg;charset=x;base64,{wrapped}"),
        format!("data:;base64, {standard}\n"),
    ] {
        assert_eq!(edited(&server, &form).await, wanted, "{}", &form[..40]);
    }
    for (text, reason) in
        [("AA*A", "offset 2"), ("", "empty"), ("data:image/png,AAAA", "base64"), ("AAAAA", "base64")]
    {
        let message = refused_image(&server, text).await;
        assert!(message.contains(reason), "{message}");
    }
    let second = with(small("x"), &json!({"images": [standard, "?"]}));
    refused(&server.post_json("/predict", &second).await, 422, "images[1]");
}

#[tokio::test]
async fn case_68_edits_take_image_and_images_and_json_in_order() {
    let server = shared();
    let (red, blue) = (png(64, 64, [255, 0, 0]), png(64, 64, [0, 0, 255]));
    let form = |names: [&'static str; 2], files: [&Vec<u8>; 2]| {
        let part = |file: &Vec<u8>| Part::bytes(file.clone()).file_name("a.png");
        Form::new()
            .text("prompt", "both")
            .text("size", "32x32")
            .text("seed", "4")
            .part(names[0], part(files[0]))
            .part(names[1], part(files[1]))
    };
    let send = async |form: Form| {
        let (status, body) =
            answer(server.post("/v1/images/edits").multipart(form).send().await.unwrap()).await;
        assert_eq!(status, 200, "{body}");
        body["data"][0]["b64_json"].clone()
    };
    let wanted = send(form(["image[]", "image[]"], [&red, &blue])).await;
    assert_eq!(send(form(["image", "image"], [&red, &blue])).await, wanted);
    assert_eq!(send(form(["image[0]", "image[1]"], [&red, &blue])).await, wanted);
    assert_ne!(send(form(["image[]", "image[]"], [&blue, &red])).await, wanted, "the order is kept");
    let url = |file: &[u8]| format!("data:image/png;base64,{}", base64(file));
    for images in [
        json!({"image": [url(&red), url(&blue)]}),
        json!({"images": [{"image_url": url(&red)}, {"image_url": url(&blue)}]}),
        json!({"image[]": [base64(&red), base64(&blue)]}),
    ] {
        let body = with(json!({"prompt": "both", "size": "32x32", "seed": 4}), &images);
        let (status, body) = server.post_json("/v1/images/edits", &body).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["data"][0]["b64_json"], wanted);
    }
    let (status, body) = server.post_json("/v1/images/edits", &json!({"prompt": "none"})).await;
    let message = refused(&(status, body), 422, "image");
    assert!(message.contains("image[]"), "{message}");
    let file_elsewhere = Form::new().text("prompt", "x").part("picture", Part::bytes(red).file_name("a.png"));
    let response = server.post("/v1/images/edits").multipart(file_elsewhere).send().await.unwrap();
    assert!(refused(&answer(response).await, 422, "picture").contains("image[]"));
}

#[tokio::test]
async fn case_69_the_parts_own_type_is_not_trusted() {
    let server = shared();
    let mut pictures = Vec::new();
    for kind in ["application/octet-stream", "image/jpeg", "text/plain", "image/png"] {
        let part = Part::bytes(png(64, 64, [1, 255, 1])).file_name("x").mime_str(kind).unwrap();
        let form =
            Form::new().text("prompt", "x").text("size", "32x32").text("seed", "1").part("image", part);
        let (status, body) =
            answer(server.post("/v1/images/edits").multipart(form).send().await.unwrap()).await;
        assert_eq!(status, 200, "{body}");
        pictures.push(body["data"][0]["b64_json"].clone());
    }
    pictures.dedup();
    assert_eq!(pictures.len(), 1);
}

#[tokio::test]
async fn case_70_the_body_limit_lets_the_largest_images_through() {
    let server = shared();
    let limit = server.app.body_bytes();
    assert!(limit >= 3 * MAX_IMAGE_BASE64);
    // Just below: three images at their limit get as far as the images themselves.
    let full = "A".repeat(MAX_IMAGE_BASE64);
    let body = with(small("x"), &json!({"images": [full, full, full]}));
    refused(&server.post_json("/predict", &body).await, 422, "images[0]");
    let over = with(small("x"), &json!({"images": ["A".repeat(MAX_IMAGE_BASE64 + 1)]}));
    let message = refused(&server.post_json("/predict", &over).await, 422, "images[0]");
    assert!(message.contains(&MAX_IMAGE_BASE64.to_string()), "{message}");
    let file = Form::new()
        .text("prompt", "x")
        .part("image", Part::bytes(vec![0; MAX_IMAGE_BYTES + 1]).file_name("x"));
    let response = server.post("/v1/images/edits").multipart(file).send().await.unwrap();
    refused(&answer(response).await, 422, "image[0]");
    for declared in [true, false] {
        let body = vec![b' '; limit + 1];
        let request = server.post("/predict").header("content-type", "application/json");
        let request = if declared {
            request.body(body)
        } else {
            let chunks =
                body.chunks(1 << 20).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect::<Vec<_>>();
            request.body(reqwest::Body::wrap_stream(futures_util::stream::iter(chunks)))
        };
        let message = refused(&answer(request.send().await.unwrap()).await, 413, "");
        assert!(message.contains(&limit.to_string()), "{message}");
    }
}

#[tokio::test]
async fn case_71_urls_are_never_fetched() {
    let server = shared();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("http://{}/a.png", listener.local_addr().unwrap());
    assert!(refused_image(&server, &url).await.contains("never fetched"));
    let (status, body) = server.post_json("/v1/images/edits", &json!({"prompt": "x", "image": url})).await;
    assert!(refused(&(status, body), 422, "image[0]").contains("never fetched"));
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "nobody came");
}

#[tokio::test]
async fn references_are_at_most_three_and_of_a_sane_shape() {
    let server = shared();
    let one = base64(&png(64, 64, [3, 3, 3]));
    let four = with(small("x"), &json!({"images": [one, one, one, one]}));
    let message = refused(&server.post_json("/predict", &four).await, 422, "images");
    assert!(message.contains('4') && message.contains('3'), "{message}");
    refused_image(&server, &base64(&png(63, 64, [0; 3]))).await;
    refused_image(&server, &base64(&png(64, 64 * 9, [0; 3]))).await;
    let wrong = with(small("x"), &json!({"images": "abc"}));
    refused(&server.post_json("/predict", &wrong).await, 422, "images");
    let wrong = with(small("x"), &json!({"images": [1]}));
    refused(&server.post_json("/predict", &wrong).await, 422, "images[0]");
}

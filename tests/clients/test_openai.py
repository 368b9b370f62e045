# SPDX-License-Identifier: Apache-2.0
"""The real openai package against a running server. Usage: test_openai.py URL; prints one line a check."""
import base64
import io
import struct
import sys
import zlib

import openai

URL = sys.argv[1]
SIZE = "64x48"
client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)


def png(colour, side=64):
    """A PNG of one colour, without any package."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = (b"\0" + bytes(colour) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def size_of(data):
    file = base64.b64decode(data)
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    return "%dx%d" % struct.unpack(">II", file[16:24])


def check(name, holds):
    if not holds:
        sys.exit(f"FAILED: {name}")
    print("ok:", name)


def raises(name, kind, call):
    try:
        call()
    except kind as error:
        check(f"{name} is {kind.__name__}: {error.message[:60]}", error.body["message"] and error.request_id)
    else:
        sys.exit(f"FAILED: {name} raised nothing")


check("models", client.models.list().data[0].id)
seed = {"seed": 9}
made = client.images.generate(prompt="a circle", size=SIZE, model="gpt-image-1", quality="high", extra_body=seed)
check("generate", size_of(made.data[0].b64_json) == SIZE and made.size == SIZE and made.created > 0)
check("generate, n", len(client.images.generate(prompt="a circle", size=SIZE, n=2).data) == 2)

red, blue = png([255, 0, 0]), png([0, 0, 255])
one = client.images.edit(prompt="change", image=("a.png", red, "image/png"), size=SIZE, extra_body=seed)
check("edit, one image", size_of(one.data[0].b64_json) == SIZE)
several = client.images.edit(prompt="change", image=[("a.png", red), io.BytesIO(blue)], size=SIZE, extra_body=seed)
check("edit, several images", several.data[0].b64_json != one.data[0].b64_json)

for partials in (0, 3):
    events = list(client.images.generate(prompt="a circle", size=SIZE, stream=True, partial_images=partials, extra_body=seed))
    kinds = [event.type for event in events]
    check(f"stream, {partials} partial", kinds == ["image_generation.partial_image"] * partials + ["image_generation.completed"])
    check("stream, the same picture", events[-1].b64_json == made.data[0].b64_json)
events = list(client.images.edit(prompt="change", image=red, size=SIZE, stream=True, partial_images=1))
check("stream, edit", [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"])

raises("a wrong size", openai.UnprocessableEntityError, lambda: client.images.generate(prompt="x", size="7x7"))
raises("an unknown field", openai.UnprocessableEntityError,
       lambda: client.images.generate(prompt="x", extra_body={"negative_prompt": "y"}))
raises("no image", openai.UnprocessableEntityError, lambda: client.images.edit(prompt="x", image=("a.png", b"no image")))
raises("a wrong path", openai.NotFoundError, lambda: client.get("/nowhere", cast_to=object))
raises("a wrong method", openai.APIStatusError, lambda: client.get("/images/generations", cast_to=object))
if len(sys.argv) > 2:
    locked = openai.OpenAI(base_url=sys.argv[2] + "/v1", api_key="wrong", max_retries=0)
    raises("a wrong key", openai.AuthenticationError, lambda: locked.models.list())

# SPDX-License-Identifier: Apache-2.0
"""With OpenAI's Python package (pip install openai). Usage: openai_client.py [url] [side]"""
import base64
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:20000"
SIZE = "x".join([sys.argv[2] if len(sys.argv) > 2 else "1024"] * 2)
client = OpenAI(base_url=URL + "/v1", api_key="none")
model = client.models.list().data[0].id

picture = client.images.generate(model=model, prompt="a red circle on a blue background", size=SIZE)
with open("openai.png", "wb") as file:
    file.write(base64.b64decode(picture.data[0].b64_json))

with open("openai.png", "rb") as reference:
    edited = client.images.edit(model=model, prompt="make the circle green", image=reference, size=SIZE)
print(len(base64.b64decode(edited.data[0].b64_json)), "bytes")

for event in client.images.generate(model=model, prompt="a star", size=SIZE, stream=True, partial_images=2):
    print(event.type, len(base64.b64decode(event.b64_json)), "bytes")

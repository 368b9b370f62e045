# SPDX-License-Identifier: Apache-2.0
"""A picture, and an edit of it, with Python's standard library alone. Usage: predict.py [url] [side]"""
import base64
import json
import sys
import urllib.error
import urllib.request

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:20000"
SIDE = int(sys.argv[2]) if len(sys.argv) > 2 else 1024


def predict(prompt, **fields):
    body = json.dumps({"prompt": prompt, "width": SIDE, "height": SIDE, **fields}).encode()
    request = urllib.request.Request(URL + "/predict", body, {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {json.load(error)['detail']}")


answer = predict("a red circle on a blue background", seed=1)
with open("picture.png", "wb") as file:
    file.write(base64.b64decode(answer["image"]))
print("picture.png", answer["timing_ms"])

edited = predict("make the circle green", seed=1, images=[answer["image"]])
with open("edited.png", "wb") as file:
    file.write(base64.b64decode(edited["image"]))
print("edited.png", edited["timing_ms"])

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The curl lines of the klein card and of the dev card, word for word but for the port. Usage: cards.sh PORT
set -eu
PORT=$1
command -v python >/dev/null || python() { python3 "$@"; }

# The klein card.
curl -s localhost:$PORT/predict -H 'Content-Type: application/json' \
  -d '{"prompt":"A red fox standing in fresh snow at dawn","width":1024,"height":1024,"seed":42}' > card.json

# The dev card.
curl -s localhost:$PORT/health > health.json

JOB=$(curl -s -X POST localhost:$PORT/generate \
        -H 'Content-Type: application/json' \
        -d '{"prompt": "a lighthouse in a thunderstorm", "seed": 3}' \
      | python -c 'import sys,json; print(json.load(sys.stdin)["job_id"])')

while :; do
  curl -s localhost:$PORT/jobs/$JOB > job.json # queued | running | done | error
  grep -Eq '"status": ?"(queued|running)"' job.json || break
  sleep 0.2
done
curl -s -o out.png localhost:$PORT/jobs/$JOB/image

python - <<'CHECK'
import base64, json, struct

def size(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n", png[:80]
    return struct.unpack(">II", png[16:24])

card = json.load(open("card.json"))
wanted = {"image", "width", "height", "model", "license", "seed", "num_steps", "reference_count", "timing_ms"}
assert wanted <= set(card) and card["seed"] == 42, card.keys()
assert size(base64.b64decode(card["image"])) == (card["width"], card["height"]) == (1024, 1024)
health = json.load(open("health.json"))
assert health["ready"] and health["model"] and health["resolution"], health
job = json.load(open("job.json"))
assert job["status"] == "done" and job["parameters"]["seed"] == 3, job
assert size(open("out.png", "rb").read()) == (1024, 1024)
print("ok: the curl lines of both cards")
CHECK

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The requests of the model's card with curl. Usage: curl.sh [host:port] [width] [height]
set -eu
at=${1:-localhost:20000} width=${2:-1024} height=${3:-1024}

# One picture, synchronously.
curl -sf "$at/predict" -H 'Content-Type: application/json' \
  -d '{"prompt":"A red fox standing in fresh snow at dawn","width":'"$width"',"height":'"$height"',"seed":42}' |
  python3 -c 'import sys,json,base64; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["image"]))' > predict.png

# The same as a job: queue it, follow it, fetch it.
JOB=$(curl -sf -X POST "$at/generate" \
        -H 'Content-Type: application/json' \
        -d '{"prompt": "a lighthouse in a thunderstorm", "seed": 3, "width": '"$width"', "height": '"$height"'}' |
      python3 -c 'import sys,json; print(json.load(sys.stdin)["job_id"])')
curl -sfN "$at/jobs/$JOB/events" | grep '^event:'
curl -sf -o job.png "$at/jobs/$JOB/image"

# An edit of the first picture, as OpenAI's clients send it.
curl -sf "$at/v1/images/edits" -F 'prompt=make it night' -F "size=${width}x$height" -F 'image[]=@predict.png' |
  python3 -c 'import sys,json,base64; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))' > edit.png

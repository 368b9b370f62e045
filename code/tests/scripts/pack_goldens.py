#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pack what dump_goldens.py wrote into the files that the repository keeps (60 MB become 22 MB).

usage: pack_goldens.py DUMP_DIR OUT_DIR

Nothing is rounded. Three rules make it smaller:
1. A tensor that occurs twice (same dtype, shape and bytes) is stored once; the other places name it in the file's
   metadata: `same_as` = {"te.embed": "t2i_64x64.f32_bf16noise/te.embed"}.
2. f32_bf16noise is an f32 run like f32, only from other noise. The outputs of the DiT blocks and of the VAE decoder
   stages are kept for that run alone; f32 keeps everything else (text encoder, references, noise, every step, picture).
3. Of diffusers' bf16 run, tensors over 50,000 bytes are kept as one number: how far the run strays there from
   f32_bf16noise (relative L2), in cases.json under `bf16_distance`. That number is all they are used for.

Writes OUT/<case>.<dtype>.safetensors.gz and OUT/cases.json.
"""
import gzip
import hashlib
import json
import re
import struct
import sys
from pathlib import Path

import numpy as np

RUNS = ("f32_bf16noise", "f32", "bf16")  # the order decides which copy of a repeated tensor is kept
STAGES = re.compile(r"dit\.(double|single|norm_out|x_embed)|vae\.dec\.(conv_in|mid|up)")
LARGEST_BF16 = 50_000


def read(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    return {
        name: (t["dtype"], t["shape"], data[end + t["data_offsets"][0] : end + t["data_offsets"][1]])
        for name, t in sorted(header.items())
    }


def write(path, tensors, same_as):
    """A gzipped safetensors file, the same bytes each time."""
    header, body = {"__metadata__": {"same_as": json.dumps(same_as, sort_keys=True)}}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(gzip.compress(struct.pack("<Q", len(head)) + head + body, 9, mtime=0))


def values(tensor):
    """A float tensor as float64, else None."""
    dtype, _, data = tensor
    if dtype == "F32":
        return np.frombuffer(data, "<f4").astype(np.float64)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return None


def distances(run, yardstick):
    """Relative L2 of each float tensor of `run` from the one of that name in `yardstick`."""
    out = {}
    for name, tensor in run.items():
        a, b = values(tensor), values(yardstick[name])
        if a is not None and a.any():
            out[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return out


def main(dump, out):
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name.removesuffix(".f32.json") for path in dump.glob("*.f32.json"))
    runs = {(case, run): read(dump / f"{case}.{run}.safetensors") for case in names for run in RUNS}
    kept = {}
    for run in RUNS:
        for case in names:
            tensors, same_as = {}, {}
            for name, tensor in runs[case, run].items():
                if run == "f32" and STAGES.match(name) or run == "bf16" and len(tensor[2]) > LARGEST_BF16:
                    continue
                key = (tensor[0], tuple(tensor[1]), hashlib.sha256(tensor[2]).digest())
                if key in kept:
                    same_as[name] = kept[key]
                else:
                    kept[key] = f"{case}.{run}/{name}"
                    tensors[name] = tensor
            write(out / f"{case}.{run}.safetensors.gz", tensors, same_as)
    cases = {}
    for case in names:
        meta = {run: json.loads((dump / f"{case}.{run}.json").read_text()) for run in RUNS}
        cases[case] = {
            **{key: meta["f32"][key] for key in ("prompt", "chat_text", "width", "height", "seed")},
            "references": sum(name.endswith(".source_rgb") for name in runs[case, "f32"]),
            "image_sha256": {run: meta[run]["image_sha256"] for run in RUNS},
            "bf16_distance": distances(runs[case, "bf16"], runs[case, "f32_bf16noise"]),
        }
    (out / "cases.json").write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

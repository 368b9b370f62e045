# SPDX-License-Identifier: Apache-2.0
"""Example pictures made with the unmodified Flux2KleinPipeline in bf16; saved as 16-colour PNG to keep them small.

usage: examples.py CHECKPOINT OUT_DIR
"""
import json, os, sys
import torch
from PIL import Image
from diffusers import Flux2KleinPipeline
CASES = [("red-circle", "a red circle on a blue background", 1), ("green-square", "a green square on a white background", 1),
         ("yellow-triangle", "a large yellow triangle on a black background", 1), ("blue-cross", "a blue cross on an orange background", 1),
         ("cyan-ring", "a large cyan ring on a black background", 1), ("red-square-right", "a red square on the right on a yellow background", 1)]


def main(ck, out):
    torch.set_num_threads(2); os.makedirs(out, exist_ok=True); meta = []
    pipe = Flux2KleinPipeline.from_pretrained(ck, torch_dtype=torch.bfloat16); pipe.set_progress_bar_config(disable=True)
    for name, prompt, seed in CASES:
        im = pipe(prompt=prompt, width=512, height=512, num_inference_steps=4, guidance_scale=1.0, generator=torch.Generator().manual_seed(seed)).images[0]
        im.quantize(16, dither=Image.Dither.NONE).save(f"{out}/{name}.png", optimize=True)
        meta.append({"file": name + ".png", "prompt": prompt, "seed": seed, "width": 512, "height": 512, "steps": 4}); print(meta[-1], os.path.getsize(f"{out}/{name}.png"))
    json.dump({"pipeline": "diffusers 0.37.1 Flux2KleinPipeline, bf16, CPU, guidance_scale 1.0", "saved_as": "PNG with 16 colours", "examples": meta}, open(f"{out}/examples.json", "w"), indent=1)


if __name__ == "__main__": main(*sys.argv[1:3])

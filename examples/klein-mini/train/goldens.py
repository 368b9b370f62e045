# SPDX-License-Identifier: Apache-2.0
"""Two small f32 goldens of klein-mini: run dump_goldens.py's `run` and keep only what a whole-pipeline test needs.

usage: goldens.py CHECKPOINT OUT_DIR
Kept per case: latents_final [L,128], velocity_step0 (every 4th image row), prompt_embeds statistics and its first and last rows,
input_ids, the picture as PNG (lossless, equals image_u8). Reference pictures come from dump_goldens.test_image's integer formula.
"""
import json, os, sys, tempfile
import torch
from PIL import Image
from diffusers import Flux2KleinPipeline
from safetensors.torch import load_file, save_file
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../code/tests/scripts"))
import dump_goldens as D  # noqa: E402
D.CASES = {"mini_t2i_512": ("a red circle on a blue background", 512, 512, 1, []), "mini_ref1_512": ("make the circle green", 512, 512, 2, [(512, 512, 1)])}


def main(model, out):
    torch.set_num_threads(2); os.makedirs(out, exist_ok=True); pipe = Flux2KleinPipeline.from_pretrained(model, torch_dtype=torch.float32); pipe.set_progress_bar_config(disable=True)
    for c, (p, w, h, seed, refs) in D.CASES.items():
        with tempfile.TemporaryDirectory() as t:
            D.run(pipe, c, t, "f32"); T = load_file(f"{t}/{c}.f32.safetensors"); m = json.load(open(f"{t}/{c}.f32.json"))
        L = (w // 16) * (h // 16); e = T["prompt_embeds"][0]
        keep = {"latents_final": T["step3.latents_after"][0], "velocity_step0_every4": T["step0.model_out"][0, :L:4], "input_ids": T["input_ids"],
                "prompt_embeds_rows_0_511": e[[0, 511]], "noise_first_8_rows": T["noise_packed"][0, :8]}
        save_file({k: v.contiguous() for k, v in keep.items()}, f"{out}/{c}.f32.safetensors")
        Image.fromarray(T["image_u8"].numpy()).save(f"{out}/{c}.f32.png", optimize=True)
        st = lambda x: {"mean": x.double().mean().item(), "std": x.double().std().item(), "min": x.min().item(), "max": x.max().item()}
        json.dump({k: m[k] for k in ("case", "prompt", "width", "height", "seed", "dtype", "chat_text", "image_sha256", "image_size")} | {"references": refs,
                  "prompt_embeds": st(e), "prompt_embeds_per_tap": [st(x) for x in e.chunk(3, -1)], "velocity_step0": st(T["step0.model_out"][0, :L]), "latents_final": st(keep["latents_final"]),
                  "sigmas": T["sched.sigmas"].tolist(), "timesteps": T["sched.timesteps"].tolist()}, open(f"{out}/{c}.json", "w"), indent=1)
    print(sum(os.path.getsize(os.path.join(out, f)) for f in os.listdir(out)), "bytes")


if __name__ == "__main__": main(*sys.argv[1:3])

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare `flux2-server generate --dtype f32` with diffusers' Flux2KleinPipeline in f32, byte by byte.

usage: compare_diffusers.py [--checkpoint DIR] [--seed N] [--binary FILE] [--work DIR] [--cases a,b]

Without --checkpoint, makes one with random weights from --seed. A case passes if no byte differs by more than 1 and at
most 0.1 % of the bytes differ at all. Ends with exit code 1 if one does not.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from dump_goldens import test_image

ROOT = Path(__file__).resolve().parents[3]
FOX = "A red fox standing in fresh snow at dawn, wildlife photography"
EDIT = "Replace the cup of coffee with a tall glass of orange juice.\nKeep the café's sign: 'OPEN 24/7' ☕"
LONG = "a lighthouse beside the sea, a tiny robot on a marble table, " * 40  # over 512 tokens: cut
# name: prompt, width, height, seed, references (width, height)
CASES = {
    "64x64": (FOX, 64, 64, 5, []),
    "512x512": (FOX, 512, 512, 0, []),
    "512x512 long": (LONG, 512, 512, 9, []),
    "848x624": (FOX, 848, 624, 1234, []),
    "1024x1024": (EDIT, 1024, 1024, 2**32 + 5, []),
    "1920x1088": (FOX, 1920, 1088, 2**53 - 1, []),
    "1080x1920 cropped": (FOX, 1080, 1920, 8, []),
    "512x768 1 ref": (EDIT, 512, 768, 3, [(300, 200)]),
    "1024x1024 1 ref": (EDIT, 1024, 1024, 3, [(1025, 1024)]),
    "768x512 2 refs": (EDIT, 768, 512, 6, [(1300, 900), (117, 90)]),
    "512x512 3 refs": (EDIT, 512, 512, 2, [(64, 64), (130, 777), (1920, 1080)]),
    "1920x1088 3 refs": (EDIT, 1920, 1088, 2, [(1024, 1024), (640, 480), (70, 101)]),
}


def ours(args, case, references, out):
    prompt, width, height, seed, _ = case
    command = [args.binary, "generate", prompt, "--dtype=f32", "--allow-small", "--json", "--checkpoint", args.checkpoint]
    command += ["--width", width, "--height", height, "--seed", seed, "--out", out]
    for file in references:
        command += ["--image", file]
    answer = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
    return np.asarray(Image.open(out)).astype(int), json.loads(answer)["timing"]["total_s"]


def theirs(pipe, case, references):
    """diffusers' picture. It floors sizes to 16; ours come from the next larger one, of which the middle is kept."""
    prompt, width, height, seed, _ = case
    grid_width, grid_height = -(-width // 16) * 16, -(-height // 16) * 16
    start = time.monotonic()
    with torch.no_grad():
        image = pipe(
            prompt=prompt,
            image=[Image.open(file) for file in references] or None,
            width=grid_width,
            height=grid_height,
            num_inference_steps=4,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
    left, top = (grid_width - width) // 2, (grid_height - height) // 2
    picture = np.asarray(image)[top : top + height, left : left + width]
    return picture.astype(int), time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/flux2-server")
    parser.add_argument("--work", type=Path, default=ROOT / "target/compare-diffusers")
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.checkpoint is None:
        args.checkpoint = args.work / f"random-{args.seed}"
        if not (args.checkpoint / "model_index.json").is_file():
            make = [sys.executable, Path(__file__).with_name("make_tiny_checkpoint.py"), args.checkpoint]
            subprocess.run([*make, "--seed", str(args.seed)], check=True)

    pipe = Flux2KleinPipeline.from_pretrained(args.checkpoint, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    print(f"checkpoint {args.checkpoint}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'case':<20} {'bytes':>9} {'differ':>7} {'%':>8} {'most':>4} {'std':>6} {'ours s':>7} {'diffusers s':>11}")
    failed = 0
    for name in args.cases.split(","):
        case = CASES[name]
        references = []
        for index, (width, height) in enumerate(case[4]):
            references.append(args.work / f"reference-{width}x{height}-{index + 1}.png")
            Image.fromarray(test_image(width, height, index + 1)).save(references[-1])
        wanted, their_s = theirs(pipe, case, references)
        got, our_s = ours(args, case, references, args.work / f"{name.replace(' ', '-')}.png")
        difference = np.abs(got - wanted)
        count, most = int((difference > 0).sum()), int(difference.max())
        passed = most <= 1 and count <= difference.size / 1000
        failed += not passed
        print(
            f"{name:<20} {difference.size:>9} {count:>7} {100 * count / difference.size:>8.5f} {most:>4} "
            f"{wanted.std():>6.1f} {our_s:>7.1f} {their_s:>11.1f}" + ("" if passed else "  FAILED"),
            flush=True,
        )
    print(f"{len(args.cases.split(',')) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

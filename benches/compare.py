#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ours beside PyTorch and diffusers on the same machine, in turn: kernels by shape, the model by stage.

usage: compare.py [--part linears,attention,convs,stages] [--runs N] [--threads N] [--sizes 512,1024] [--dtypes bf16,f32]
                  [--checkpoint DIR] [--binary FILE] [--shapes FILE]

Each row is measured `--runs` times after one that does not count, ours and each peer's in turn, in an order that is drawn
anew each time. Printed are minimum, median and maximum in seconds and the ratio of the medians and of the minima, peer to
ours: above 1 we are faster. The peers compute a stage without the pipeline around it; a whole picture of theirs is the sum
of text encoder, four steps and decoder. Ours is what `flux2-server bench` measures inside a picture. diffusers' text
encoder runs all 36 layers and the head, as its pipeline does.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = {
    "linears": [
        ("linear", 1536, 3072, 9216),
        ("linear", 1536, 3072, 27648),
        ("linear", 1536, 9216, 3072),
        ("linear", 1536, 12288, 3072),
        ("linear", 4608, 3072, 9216),
        ("linear", 4608, 12288, 3072),
        ("linear", 512, 2560, 9728),
        ("linear", 512, 9728, 2560),
    ],
    "attention": [("attention", 1536, 24), ("attention", 4608, 24)],
    "convs": [("conv", 128, 512, 512), ("conv", 256, 256, 256), ("conv", 512, 128, 128)],
}


class Peer:
    """A program that answers each line with one."""

    def __init__(self, name, command):
        self.name = name
        # Threads that wait for work by spinning would take the other's time.
        env = dict(os.environ, OMP_WAIT_POLICY="passive", KMP_BLOCKTIME="0")
        self.process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.about = self.process.stdout.readline().strip()
        if not self.about:
            sys.exit(f"{name} did not start: {' '.join(map(str, command))}")

    def say(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("unknown"):
            sys.exit(f"{self.name} stopped at {words}: {answer}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def in_turn(runs, measures):
    """Seconds by name of `runs` runs after the first."""
    seconds = {name: [] for name in measures}
    for run in range(runs + 1):
        for name in random.sample(list(measures), len(measures)):
            value = measures[name]()
            if run:
                seconds[name].append(value)
    return seconds


def row(title, seconds, flop=None):
    """Prints one comparison, ours being the first."""
    ours = next(iter(seconds.values()))
    for name, values in seconds.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        rate = f"{flop / middle / 1e12:7.3f} {flop / low / 1e12:7.3f}" if flop else " " * 15
        ratio = "" if values is ours else f"{middle / statistics.median(ours):6.2f}x {low / min(ours):6.2f}x"
        print(f"{title:<28} {name:<15} {low:9.4f} {middle:9.4f} {high:9.4f}  {rate}  {ratio}", flush=True)
        title = ""


def head(title):
    print(f"\n{title}\n{'':<28} {'':<15} {'min s':>9} {'median s':>9} {'max s':>9}  TFLOP/s of median, min; ratio of both")


def kernels(args, part):
    peers = [Peer("ours bf16", [args.shapes, "bf16", args.threads])]
    peers += [Peer(f"torch {dtype}", [sys.executable, ROOT / "benches/peer.py", dtype, args.threads]) for dtype in args.dtypes]
    head(f"{part}: " + "; ".join(f"{peer.name}: {peer.about}" for peer in peers))
    sums = {peer.name: [] for peer in peers}
    for shape in KERNELS[part]:
        for peer in peers:
            peer.say(*shape)
        seconds = in_turn(args.runs, {peer.name: lambda peer=peer: float(peer.say("run")) for peer in peers})
        what, *sizes = shape
        flop = {
            "linear": lambda rows, inputs, outputs: 2 * rows * inputs * outputs,
            "attention": lambda rows, heads: 4 * rows * rows * heads * 128,
            "conv": lambda side, inputs, outputs: 18 * side * side * inputs * outputs,
        }[what](*sizes)
        row(" x ".join(map(str, sizes)), seconds, flop)
        for name, values in seconds.items():
            sums[name].append(values)
    row("sum", {name: [sum(values) for values in zip(*lists)] for name, lists in sums.items()})
    for peer in peers:
        peer.close()


def ours(args, side, references):
    """Seconds by stage of pictures of ours, one run after one that does not count."""
    command = [args.binary, "bench", "--json", f"--size={side}x{side}", "--runs=1", "--checkpoint", args.checkpoint]
    command += ["--threads", args.threads, f"--references={references}"]
    answer = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
    answer = json.loads(answer)
    size = answer["sizes"][0]
    stages = {name: stage["median_s"] for name, stage in size["stages"].items()}
    return stages | {"load": answer["load_s"], "memory": size["peak_anonymous_bytes"]}


def theirs(args, dtype, *words):
    """Seconds of the second run of a stage, and of its loading, in a process that ends: no two models in memory."""
    peer = Peer(f"diffusers {dtype}", [sys.executable, ROOT / "benches/peer.py", dtype, args.threads, args.checkpoint])
    load = float(peer.say(*words).split()[1])
    peer.say("run")
    seconds = float(peer.say("run"))
    peer.close()
    return seconds, load


def stages(args):
    for side in args.sizes:
        lists = {}
        for _ in range(args.runs):
            names = ["ours bf16"] + [f"diffusers {dtype}" for dtype in args.dtypes]
            for name in random.sample(names, len(names)):
                if name == "ours bf16":
                    got = ours(args, side, 0)
                    # The DiT's seconds are of all steps.
                    got["dit step"] = got["dit"] / 4
                    if side == max(args.sizes):
                        got["vae_encode 1024"] = ours(args, side, 1)["reference_encode"]
                else:
                    dtype = name.split()[1]
                    got = {}
                    got["text_encoder"], got["load"] = theirs(args, dtype, "text_encoder")
                    got["dit step"], load = theirs(args, dtype, "dit", side)
                    got["load"] += load
                    got["vae_decode"], load = theirs(args, dtype, "vae_decode", side)
                    got["load"] += load
                    if side == max(args.sizes):
                        got["vae_encode 1024"], _ = theirs(args, dtype, "vae_encode", 1024)
                    got["picture"] = got["text_encoder"] + 4 * got["dit step"] + got["vae_decode"]
                for stage, value in got.items():
                    lists.setdefault(stage, {other: [] for other in names})[name].append(value)
        head(f"{side}x{side}, {args.runs} runs")
        for stage in ("text_encoder", "dit step", "vae_decode", "vae_encode 1024", "picture", "load"):
            if stage in lists:
                row(stage, lists[stage])
        memory = lists["memory"]["ours bf16"]
        print(f"{'anonymous memory at most':<28} ours bf16 {max(memory) / 1e9:.2f} GB")


def machine():
    info = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [flag for flag in fields.get("flags", "").split() if flag.startswith(("avx", "amx", "fma", "f16c"))]
    print(fields.get("model name", "unknown processor"), "|", os.cpu_count(), "CPUs |", " ".join(flags))
    print("load average before:", *os.getloadavg())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--part", type=words, default=["linears", "attention", "convs", "stages"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sizes", type=lambda text: [int(side) for side in text.split(",")], default=[512, 1024])
    parser.add_argument("--dtypes", type=words, default=["bf16", "f32"])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "target/full-size")
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/flux2-server")
    parser.add_argument("--shapes", type=Path, help="the program built from code/benches/shapes.rs")
    args = parser.parse_args()
    if unknown := set(args.part) - set(KERNELS) - {"stages"}:
        sys.exit(f"--part: unknown {', '.join(unknown)}; there are {', '.join([*KERNELS, 'stages'])}")
    machine()
    for part in args.part:
        stages(args) if part == "stages" else kernels(args, part)
    print("load average after:", *os.getloadavg())


if __name__ == "__main__":
    main()

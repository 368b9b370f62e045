#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures `packager fetch` beside Python's `hf download`: the same files from the same stand-in of the Hub on loopback.

    cargo build --release -p packager && cargo build --release -p hub --example stand_in
    python3 -m venv venv && venv/bin/pip install huggingface_hub
    benches/download.py --hf venv/bin/hf [--sizes 400,300,60] [--rounds 3]

Prints, for each round and program, seconds and the largest resident memory. Ours also hashes every byte and
brings it onto the disk before it is named; `hf` does neither.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(command, home, endpoint):
    """Runs a program with an empty cache; returns seconds and megabytes."""
    shutil.rmtree(home, ignore_errors=True)
    os.sync()
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    start = time.monotonic()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - start
    if status:
        raise SystemExit(f"{command[0]} failed:\n{errors.decode()}")
    return seconds, usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", default="hf", help="the `hf` program of huggingface_hub")
    parser.add_argument("--sizes", default="400,300,60", help="megabytes of the files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", default="release", choices=["release", "debug"])
    options = parser.parse_args()

    target = ROOT / "target" / options.profile
    hub = subprocess.Popen(
        [target / "examples/stand_in", "org/weights", *options.sizes.split(",")], stdout=subprocess.PIPE, text=True
    )
    try:
        endpoint = hub.stdout.readline().strip()
        programs = {
            "packager fetch": [str(target / "packager"), "fetch", "--package", "org/weights"],
            "hf download": [options.hf, "download", "org/weights"],
        }
        results = {name: [] for name in programs}
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as directory:
            for number in range(options.rounds):
                for name, command in programs.items():
                    seconds, memory = run(command, Path(directory) / "home", endpoint)
                    results[name].append(seconds)
                    print(f"round {number + 1}  {name:<15} {seconds:6.2f} s  {memory:6.0f} MB", flush=True)
        total = sum(int(size) for size in options.sizes.split(","))
        for name, times in results.items():
            best = min(times)
            print(f"best     {name:<15} {best:6.2f} s  {total / best:6.0f} MB/s")
    finally:
        hub.kill()


if __name__ == "__main__":
    main()

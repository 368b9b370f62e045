# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, a model, and a running ``flux2-server`` to compare with."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tt_flux2_klein import Device, KleinTT, open_device

ROOT = Path(__file__).resolve().parents[2]
#: Weights that are random and small: a picture takes half a second.
TINY = ROOT / "code/tests/fixtures/tiny"
#: Weights that are trained and small.
MINI = ROOT / "examples/klein-mini/checkpoint"
#: The server's binary, as the workspace's tests build it.
BINARY = os.environ.get("FLUX2_SERVER", str(ROOT / "target/debug/flux2-server"))
#: The stand-in of the Hub, as the workspace's tests build it.
HUB = str(Path(BINARY).parent / "examples/stand_in")
SETTINGS = ("KLEIN_SNAPSHOT", "KLEIN_TEXT_ENCODER", "HF_HUB_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "API_KEY")


@pytest.fixture(autouse=True, scope="session")
def no_settings() -> None:
    """Without the settings of whoever runs the tests."""
    for name in [name for name in os.environ if name in SETTINGS or name.startswith("FLUX2_")]:
        if name != "FLUX2_SERVER":
            del os.environ[name]


@pytest.fixture(scope="session")
def dev() -> Iterator[Device]:
    with open_device(device="cpu", threads=1) as device:
        yield device


@pytest.fixture(scope="session")
def model(dev: Device) -> KleinTT:
    return KleinTT(dev, TINY, small_sizes=True)


def picture(width: int, height: int) -> Image.Image:
    """A picture that any language can make."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 3 + y) % 256, (x ^ y) % 256, (x * y // 7) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def post(url: str, body: object, timeout: float = 120) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_for(process: subprocess.Popen[bytes], log: Path, words: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not re.search(words, log.read_text()):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a flux2-server with the tiny checkpoint and small sizes."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [BINARY, "serve", "--port", str(port), "--checkpoint", str(TINY), "--small-sizes", "--warm-up", "16"]
    with log.open("wb") as out, subprocess.Popen([*command, "--threads", "1"], stdout=out, stderr=out) as process:
        try:
            wait_for(process, log, "Application startup complete")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()

# SPDX-License-Identifier: Apache-2.0
"""The pinned weights from a hub into the Hugging Face cache."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HUB, TINY

REVISION = "e7b7dc27f91deacad38e78976d1f2b499d76a294"
CODE = """
from tt_flux2_klein import DownloadError, KleinTT, open_device
with open_device(device="cpu", threads=1) as dev:
    try:
        model = KleinTT(dev, small_sizes=True)
        print("picture", model.generate("x", 64, 64, 1)[0].size)
    except DownloadError as error:
        print("error", error)
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A hub that has the tiny checkpoint under the published model's name."""
    command = [HUB, f"black-forest-labs/FLUX.2-klein-4B@{REVISION}", TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout
            yield hub.stdout.readline().strip()
        finally:
            hub.terminate()


def run(home: Path, **settings: str) -> tuple[str, str]:
    """Output of ``CODE``, and what its terminal showed."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"HF_HOME": str(home), "TERM": "xterm"} | settings
    done = subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # The last writer closed it.
        pass
    assert done.stdout
    output = done.stdout.read().decode()
    assert done.wait() == 0, shown
    os.close(ours)
    return output.strip(), shown.decode()


def test_the_pinned_weights_are_downloaded_once_with_a_progress_bar(endpoint: str, tmp_path: Path) -> None:
    output, _ = run(tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert output.startswith("error ") and "offline" in output
    output, shown = run(tmp_path, HF_ENDPOINT=endpoint)
    assert output == "picture (64, 64)"
    assert " MB/s" in shown and "\r" in shown, shown
    assert (tmp_path / "hub/models--black-forest-labs--FLUX.2-klein-4B/snapshots" / REVISION / "model_index.json").is_file()
    output, shown = run(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert (output, shown) == ("picture (64, 64)", "")

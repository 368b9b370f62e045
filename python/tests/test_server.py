# SPDX-License-Identifier: Apache-2.0
"""``uvicorn tt_flux2_klein.server:app`` answers as ``flux2-server`` does."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, free_port, picture, post, wait_for
from test_pictures import file_of

BODY = {"prompt": "a red circle", "width": 64, "height": 64, "seed": 9}
SERVED = {"KLEIN_SNAPSHOT": str(TINY), "FLUX2_SMALL_SIZES": "true", "FLUX2_WARM_UP": "16", "FLUX2_THREADS": "1"}


class Uvicorn:
    """A process with the command of the card."""

    def __init__(self, directory: Path, *arguments: str, **settings: str) -> None:
        self.port, self.log = free_port(), directory / "log"
        command = ["uvicorn", "tt_flux2_klein.server:app", "--port", str(self.port), *arguments]
        with self.log.open("wb") as out:
            program = [sys.executable, "-m", *command]
            self.process = subprocess.Popen(program, env=os.environ | SERVED | settings, stdout=out, stderr=out)
        self.url = f"http://127.0.0.1:{self.port}"

    def ready(self) -> Uvicorn:
        wait_for(self.process, self.log, "Uvicorn running on")
        return self

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def asgi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uvicorn]:
    uvicorn = Uvicorn(tmp_path_factory.mktemp("uvicorn"))
    try:
        yield uvicorn.ready()
        assert uvicorn.process.poll() is None, uvicorn.log.read_text()
    finally:
        uvicorn.process.kill()


def get(url: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()


def test_pictures_are_those_of_the_rust_server_byte_for_byte(asgi: Uvicorn, server: str) -> None:
    for images in ([], [picture(80, 64), picture(64, 64)]):
        files = [base64.b64encode(file_of(image, "PNG")).decode() for image in images]
        (status, ours), (_, theirs) = (post(f"{url}/predict", BODY | {"images": files}) for url in (asgi.url, server))
        assert status == 200 and ours["image"] == theirs["image"]
        assert ours.keys() == theirs.keys() and ours["timing_ms"].keys() == theirs["timing_ms"].keys()


def test_every_route_and_refusal_is_the_rust_servers_own(asgi: Uvicorn, server: str) -> None:
    for path in ("/", "/docs", "/openapi.json", "/v1/models"):
        ours, theirs = get(asgi.url + path), get(server + path)
        same = ("content-type", "content-length", "cache-control", "x-content-type-options")
        assert (ours[0], [ours[1].get(name) for name in same]) == (theirs[0], [theirs[1].get(name) for name in same])
        if path != "/v1/models":  # which tells when it was loaded
            assert ours[2] == theirs[2]
    assert json.loads(get(f"{asgi.url}/health")[2])["ready"] is True
    assert b"tt_media_server_requests_total" in get(f"{asgi.url}/metrics")[2]
    head = get(f"{asgi.url}/docs", "HEAD")
    assert head[0] == 200 and head[2] == b"" and int(head[1]["content-length"]) > 0
    wrong: list[tuple[str, Any]] = [
        ("/predict", BODY | {"width": 500}),
        ("/predict", BODY | {"num_steps": 5}),
        ("/predict", BODY | {"colour": "red"}),
        ("/predict", [1]),
        ("/prediction", BODY),
        ("/jobs/none/cancel", {}),
        ("/v1/images/generations", {"prompt": "x", "size": "1x1"}),
    ]
    for path, body in wrong:
        ours_, theirs_ = post(asgi.url + path, body), post(server + path, body)
        assert ours_ == theirs_ and ours_[0] >= 400


def events(url: str, body: object) -> Iterator[tuple[float, str]]:
    """Names of server-sent events, with the time at which each came."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"event:"):
                yield time.monotonic(), line[6:].strip().decode()


def test_events_come_while_the_picture_is_made(asgi: Uvicorn) -> None:
    body = {"prompt": "x", "size": "512x512", "stream": True, "partial_images": 3}
    came = list(events(f"{asgi.url}/v1/images/generations", body))
    assert [name for _, name in came] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert came[-1][0] - came[0][0] > 0.1, "all came at once"


def test_a_client_that_goes_away_ends_its_picture(asgi: Uvicorn) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", asgi.port)
    large = json.dumps(BODY | {"width": 1920, "height": 1088})
    connection.request("POST", "/predict", large, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 60

    def states() -> list[str]:
        return [job["status"] for job in json.loads(get(f"{asgi.url}/jobs")[2])["jobs"]]

    while "running" not in states():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    connection.close()
    while "running" in states():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wait_for(asgi.process, asgi.log, "state=Cancelled")
    assert post(f"{asgi.url}/predict", BODY)[0] == 200


def test_large_bodies_pass_through_and_those_over_the_limit_are_refused(asgi: Uvicorn) -> None:
    noise = base64.b64encode(os.urandom(6_000_000)).decode()
    status, answer = post(f"{asgi.url}/predict", BODY | {"images": [noise]})
    assert status == 422 and answer["detail"].startswith("images[0]: is not an image")
    status, answer = post(f"{asgi.url}/predict", BODY | {"images": [noise[:-1] * 8]})
    assert status == 413 and "over the limit" in answer["detail"]


def test_sigterm_lets_the_picture_finish(tmp_path: Path) -> None:
    uvicorn = Uvicorn(tmp_path).ready()
    port, body = uvicorn.port, json.dumps(BODY | {"width": 768, "height": 768})
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    while b'"running"' not in get(f"{uvicorn.url}/jobs")[2]:
        time.sleep(0.02)
    uvicorn.process.send_signal(signal.SIGTERM)
    assert connection.getresponse().status == 200
    assert uvicorn.process.wait(60) in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in uvicorn.log.read_text()


def test_a_checkpoint_that_is_not_there_fails_the_start_with_one_sentence(tmp_path: Path) -> None:
    uvicorn = Uvicorn(tmp_path, KLEIN_SNAPSHOT=str(tmp_path))
    assert uvicorn.process.wait(60) == 3
    assert "has no model_index.json, but is KLEIN_SNAPSHOT" in uvicorn.log.read_text()


def test_without_lifespan_the_model_loads_at_the_first_request(tmp_path: Path) -> None:
    uvicorn = Uvicorn(tmp_path, "--lifespan", "off").ready()
    try:
        deadline = time.monotonic() + 60
        while (answer := post(f"{uvicorn.url}/predict", BODY))[0] == 503:
            assert answer[1]["error"]["code"] == "loading" and time.monotonic() < deadline
            time.sleep(0.1)
        assert answer[0] == 200
    finally:
        uvicorn.process.kill()

# SPDX-License-Identifier: Apache-2.0
"""How the package lives in a process: devices, threads, signals, what it refuses."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MINI, TINY, picture

from tt_flux2_klein import (
    CheckpointError,
    Device,
    DeviceError,
    KleinTT,
    Progress,
    Stopped,
    close_device,
    open_device,
)

HERE = Path(__file__).parent


def python(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)


def test_the_cards_quickstart_runs_word_for_word_without_torch(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    picture(512, 512).save(tmp_path / "media/croissant512.png")
    shutil.copy(HERE / "snippets/card.py", tmp_path)
    watch = "import runpy, sys; runpy.run_path('card.py'); assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", watch],
        cwd=tmp_path,
        env=os.environ | {"KLEIN_SNAPSHOT": str(TINY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning") == 1 and "the model runs on the CPU" in done.stderr
    from PIL import Image

    assert Image.open(tmp_path / "output.png").size == (512, 512)


def test_without_a_card_there_is_one_warning() -> None:
    code = """
import warnings
from tt_flux2_klein import open_device
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    open_device(device="cpu")
    assert not caught
    open_device(), open_device(0, 98304)
assert [w.category for w in caught] == [RuntimeWarning] and "the CPU" in str(caught[0].message)
assert caught[0].filename == "<string>"
"""
    assert python(code).stderr == ""


def test_devices_that_cannot_be_opened_say_why() -> None:
    with pytest.raises(DeviceError, match='this build has no "ttnn"'):
        open_device(device="ttnn")
    with pytest.raises(ValueError, match="device: got 'gpu'"):
        open_device(device="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads: got 0"):
        open_device(device="cpu", threads=0)
    with pytest.raises(ValueError, match="l1_small_size: got -1"):
        open_device(0, -1)


def test_a_closed_device_frees_its_models_and_says_so() -> None:
    with open_device(device="cpu") as dev:
        model = KleinTT(dev, TINY, small_sizes=True)
        assert not dev.closed
    close_device(dev)
    assert dev.closed
    for use in (lambda: model.encode("x"), lambda: KleinTT(dev, TINY), dev.__enter__):
        with pytest.raises(DeviceError, match="the device is closed"):
            use()


def test_closing_ends_a_run(dev: Device) -> None:
    mine = open_device(device="cpu", threads=1)
    model = KleinTT(mine, TINY, small_sizes=True)
    begun = threading.Event()
    with ThreadPoolExecutor() as pool:
        run = pool.submit(model.generate, "x", 1024, 1024, 1, callback=lambda _: begun.set())
        begun.wait()
        mine.close()
        with pytest.raises(DeviceError, match="the device was closed during the run"):
            run.result()


def test_precisions_and_checkpoints_that_are_wrong_say_so(dev: Device, tmp_path: Path) -> None:
    for precision, words in ((("fp8", None), "dit_prec: got 'fp8'"), (("bf16", "f32"), "te_prec: is f32 and dit_prec")):
        with pytest.raises(ValueError, match=words):
            KleinTT(dev, TINY, None, *precision)
    with pytest.raises(CheckpointError, match="has no model_index.json"):
        KleinTT(dev, tmp_path)
    with pytest.raises(OSError, match="is not a directory"):
        KleinTT(dev, tmp_path / "absent")
    assert KleinTT(dev, str(TINY), TINY / "text_encoder", None, "f32", False).dtype == "f32"


def test_the_environment_names_snapshot_and_text_encoder(dev: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLEIN_SNAPSHOT", str(MINI))
    assert KleinTT(dev).name == KleinTT(dev, MINI).name != KleinTT(dev, TINY).name
    monkeypatch.setenv("KLEIN_TEXT_ENCODER", "/absent")
    with pytest.raises(CheckpointError, match="/absent"):
        KleinTT(dev)


def test_two_models_in_one_process_do_not_disturb_each_other(model: KleinTT) -> None:
    with open_device(device="cpu", threads=1) as dev:
        other = KleinTT(dev, MINI, small_sizes=True)
        alone = [m.generate("a green square", 64, 64, 3)[0].tobytes() for m in (model, other)]
        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(m.generate, "a green square", 64, 64, 3) for m in (model, other) * 3]
        assert [run.result()[0].tobytes() for run in runs] == alone * 3
        assert alone[0] != alone[1]


def test_threads_take_turns_on_one_model(model: KleinTT) -> None:
    alone = [model.generate("x", 64, 64, seed)[0].tobytes() for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = [image.tobytes() for image, _ in pool.map(lambda seed: model.generate("x", 64, 64, seed), range(8))]
    assert together == alone


def test_the_gil_is_free_during_a_run(model: KleinTT) -> None:
    ticks = 0
    with ThreadPoolExecutor() as pool:
        run = pool.submit(model.generate, "x", 512, 512, 1)
        while not run.done():
            ticks += 1
            time.sleep(0.001)
    # Held during the run, it would let this thread count to a handful.
    assert ticks > 50


def test_a_callback_follows_and_stops(model: KleinTT) -> None:
    told: list[Progress] = []
    model.generate("x", 64, 64, 1, [picture(64, 64)], callback=told.append)
    stages = list(dict.fromkeys(progress.stage for progress in told))
    assert stages == ["text_encoder", "reference_encode", "context", "dit", "vae_decode"]
    assert [p.step for p in told] == sorted(p.step for p in told) and told[-1].step == told[-1].steps == 4
    assert 0 <= told[0].fraction <= told[-1].fraction == 1
    before = model.generate("x", 64, 64, 1)[0].tobytes()
    with pytest.raises(Stopped, match="the callback stopped the run"):
        model.generate("x", 64, 64, 1, callback=lambda progress: progress.step < 2)
    with pytest.raises(ZeroDivisionError):
        model.generate("x", 64, 64, 1, callback=lambda progress: bool(1 // 0))
    with pytest.raises(RuntimeError, match="a callback cannot start another"):
        model.generate("x", 64, 64, 1, callback=lambda _: model.encode("x") is None)
    assert model.generate("x", 64, 64, 1)[0].tobytes() == before


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, which it does not set where it was started with the signal ignored: in the background, in CI."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_ctrl_c_ends_a_run_within_one_operation(model: KleinTT) -> None:
    begun: list[float] = []

    def interrupt(progress: Progress) -> None:
        if progress.stage == "dit" and not begun:
            begun.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    start = time.monotonic()
    model.generate("x", 768, 768, 1)
    whole = time.monotonic() - start
    with pytest.raises(KeyboardInterrupt):
        model.generate("x", 768, 768, 1, callback=interrupt)
    # A run of this model has some two hundred operations, and what was left of it is most of it.
    assert time.monotonic() - begun[0] < whole / 4
    assert model.generate("x", 64, 64, 1)[0].size == (64, 64)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait_for_another_threads_run(model: KleinTT) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        begun = threading.Event()
        run = pool.submit(model.generate, "x", 1024, 1024, 1, callback=lambda _: begun.set() or not stop.is_set())
        begun.wait()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            model.encode("x")
        stop.set()
        with pytest.raises(Stopped):
            run.result()


def test_pickling_and_copying_are_refused(model: KleinTT, dev: Device) -> None:
    for thing in (model, dev):
        for use in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied: it .* in each process"):
                use(thing)


def test_a_forked_process_is_told_to_load_its_own(model: KleinTT) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            model.encode("x")
            os.write(write, b"it ran")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"load it in each process" in os.read(read, 1000)

# SPDX-License-Identifier: Apache-2.0
"""Types of the native part; see ``src/``."""

from collections.abc import Callable
from concurrent.futures import Future

DEVICES: str
REF_CACHE_SIZE: int

_Callback = Callable[[str, int, int, float], bool | None]
_Seconds = list[tuple[str, float]]

def find_weights(snapshot: str | None, te_dir: str | None) -> tuple[str, str | None]: ...

class Model:
    name: str
    device: str
    dtype: str
    embeds_shape: tuple[int, int]
    def __new__(
        cls, checkpoint: str, text_encoder: str | None, dtype: str, threads: int | None, small_sizes: bool
    ) -> Model: ...
    def generate(
        self,
        prompt: str,
        width: str,
        height: str,
        seed: str,
        images: list[bytes],
        callback: _Callback | None,
    ) -> tuple[bytes, tuple[int, int], _Seconds, list[float], int]: ...
    def encode(self, prompt: str, callback: _Callback | None) -> bytearray: ...
    def references(
        self, images: list[bytes], callback: _Callback | None
    ) -> tuple[bytearray, list[tuple[int, int]]]: ...
    def denoise(
        self,
        embeds: bytes,
        width: str,
        height: str,
        seed: str,
        tokens: bytes,
        grids: list[tuple[int, int]],
        callback: _Callback | None,
    ) -> tuple[bytearray, tuple[int, int], _Seconds, list[float]]: ...
    def decode(
        self, latents: bytes, grid_height: int, grid_width: int, callback: _Callback | None
    ) -> tuple[bytearray, tuple[int, int]]: ...
    def close(self) -> None: ...

class Server:
    def __new__(cls) -> Server: ...
    def start(self) -> tuple[Future[None], Future[None], Future[None]]: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def open(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], peer: str | None
    ) -> Exchange: ...

class Exchange:
    def feed(self, piece: bytes) -> Future[None]: ...
    def end_body(self) -> None: ...
    def response(self) -> Future[tuple[int, list[tuple[bytes, bytes]]] | None]: ...
    def piece(self) -> Future[bytes | None]: ...
    def close(self) -> None: ...

# SPDX-License-Identifier: Apache-2.0
"""The `docker run` of a profile, in the order of section E.2."""
import os
import socket
from pathlib import Path

from . import hub
from .manifest import chips_of, need

LABEL = "org.tenstorrent.tt-model"
DESCRIPTOR = "/opt/tt-metal/tt_metal/fabric/mesh_graph_descriptors/p150_mesh_graph_descriptor.textproto"


def cards():
    return os.environ.get("TT_MODEL_CARDS") != "0"


def free_port(wanted):
    for port in [wanted] if wanted else range(20000, 20100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    need(False, f"port {wanted or '20000 to 20099'} is busy")


def name(manifest, profile):
    return f"tt-model-{manifest['name']}-{profile['name']}"


def compose(manifest, profile, port, own, extra):
    """Words of the command, and the host directories that it mounts."""
    chips = chips_of(profile["hardware"])
    nodes = sorted(int(node.name) for node in Path("/dev/tenstorrent").glob("*") if node.name.isdigit()) if cards() else []
    need(not cards() or len(nodes) >= chips, f"only {len(nodes)} of {chips} tt device(s) are free, and this profile needs {chips}")
    nodes = nodes[:chips]
    words = ["docker", "run", "--detach", "--name", name(manifest, profile), "--user", f"{os.getuid()}:{os.getgid()}"]
    for key, value in (("", manifest["name"]), (".profile", profile["name"]), (".devices", ",".join(map(str, nodes)))):
        words += ["--label", f"{LABEL}{key}={value}"]
    for node in nodes:
        words += ["--device", f"/dev/tenstorrent/{node}:/dev/tenstorrent/{node}"]
    if cards():
        words += ["--ipc", "host", "--mount", "type=bind,src=/dev/hugepages-1G,dst=/dev/hugepages-1G"]
    env = {"HF_HOME": "/hf", "TT_METAL_CACHE": "/cache", "TT_DIT_CACHE_DIR": "/weight-cache", "TT_CACHE_PATH": "/tensor-cache"}
    mounts = [(hub.home(), "/hf"), (own / "cache", "/cache"), (own / "weights", "/weight-cache"), (own / "tensors", "/tensor-cache")]
    if hub.home() not in hub.cache().parents:
        mounts.append((hub.cache(), "/hf-hub"))
        env["HF_HUB_CACHE"] = "/hf-hub"
    for host, inside in mounts:
        words += ["--mount", f"type=bind,src={host},dst={inside}"]
    words += ["--publish", f"{port}:{port}"]
    if os.environ.get("HF_TOKEN"):
        words += ["--env", "HF_TOKEN"]
    env |= launcher_env(manifest, profile)
    if chips == 1:
        env.setdefault("TT_MESH_GRAPH_DESC_PATH", DESCRIPTOR)
    for key in sorted(env):
        words += ["--env", f"{key}={env[key]}"]
    words += [manifest["container"]["image"]["tag"], *argv(manifest, profile, port), *extra]
    return words, [host for host, _ in mounts]


def launcher_env(manifest, profile):
    need(manifest["container"]["kind"] == "http-server", "only http-server is acted out here")
    return dict(profile["env"])


def argv(manifest, profile, port):
    whole = {"{host}": "0.0.0.0", "{port}": str(port)}
    words = [whole.get(word, word) for word in manifest["container"]["runtime"]["command"]]
    for argument in profile["args"]:
        words += [str(word) for word in argument] if isinstance(argument, list) else [str(argument)]
    return words


def ready_line(manifest):
    return manifest["container"]["runtime"].get("ready_line") or '"event": "ready"'

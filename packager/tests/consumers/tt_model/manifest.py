# SPDX-License-Identifier: Apache-2.0
"""The wire manifest, read as strictly as any reader may: section B of the format."""
import json
import re

FILE = "tt_kernel_manifest.json"
SLUG = re.compile(r"[a-z0-9][a-z0-9._-]*")
TOP = ["schema_version", "name", "tt_metal_version", "arch", "device_count", "producer", "weights", "auxiliary_weights",
       "mesh", "entrypoint", "resources", "capabilities", "env", "bundled", "deps", "container"]
CONTAINER = ["image", "kind", "runtime", "serve", "serve_profiles", "default_profile", "code_dir", "verify", "built", "card"]
SERVE = ["hardware", "mesh_device", "port", "max_model_len", "max_num_seqs", "block_size", "server_timeout",
         "capabilities", "additional_config", "args", "env"]
WEIGHTS = ["repo_id", "revision", "allow_patterns", "ignore_patterns", "repo_type"]
CHIPS = {"p100": 1, "p150": 1, "n150": 1, "e150": 1, "p300": 2, "n300": 2}
MESHES = {"N150": 1, "P100": 1, "P150": 1, "P150x2": 2, "N300": 2, "P300": 2, "N150x4": 4, "P150x4": 4, "P300x2": 4,
          "T3K": 8, "P150x8": 8, "QB2": 4, "TG": 32, "BH-Galaxy": 32}


class Refused(Exception):
    """What a consumer shows on its card: one sentence."""


def need(condition, what):
    if not condition:
        raise Refused(what)


def unique(pairs):
    keys = [key for key, _ in pairs]
    need(len(keys) == len(set(keys)), f"a key stands twice: {keys}")
    return dict(pairs)


def keys(value, expected, where):
    need(isinstance(value, dict), f"{where} is no object")
    need(list(value) == expected, f"{where} has the keys {list(value)}, in the format it has {expected}")


def text(value, where, null=False):
    need(isinstance(value, str) and value or (null and value is None), f"{where} is no text: {value!r}")


def read(path):
    """The manifest of a directory's file; `Refused` says what is wrong."""
    need(path.is_file(), f"{path.parent} is not a tt-model bundle")
    raw = path.read_text(encoding="utf-8")
    manifest = json.loads(raw, object_pairs_hook=unique)
    need(json.dumps(manifest, indent=2, ensure_ascii=False) == raw.rstrip("\n"), "the manifest is not in its written form")
    keys(manifest, TOP, "the manifest")
    version = manifest["schema_version"]
    need(version in ("5", "5.1", "6"), f"Unsupported bundle schema_version {version!r}")
    need(SLUG.fullmatch(manifest["name"]), f"unsafe container name {manifest['name']!r}")
    for key in ("tt_metal_version", "arch"):
        text(manifest[key], key)
    need(type(manifest["device_count"]) is int and manifest["device_count"] > 0, "device_count is no count")
    producer = manifest["producer"]
    keys(producer, ["tt_kernel_version", "created_at", "hostname"], "producer")
    need(producer["hostname"] in (None, ""), "the build host's name is public")
    for index, weights in enumerate([manifest["weights"], *manifest["auxiliary_weights"]]):
        keys(weights, WEIGHTS, f"weights {index}")
        need(weights["repo_id"].count("/") == 1, "weights must be a namespaced HF id")
        need(re.fullmatch("[0-9a-f]{40}", weights["revision"] or ""), "the weights are not pinned")
        need(weights["repo_type"] == "model", "weights of another type")
    need(manifest["env"] == {} and all(manifest[key] is None for key in TOP[8:12] + TOP[13:15]), "fields of other schemas are set")
    container(manifest["container"])
    chips = chips_of(resolved(manifest, None)["hardware"])
    need(chips == manifest["device_count"], f"device_count {manifest['device_count']}, the default profile has {chips}")
    return manifest


def container(value):
    keys(value, CONTAINER, "container")
    image = value["image"]
    keys(image, ["registry", "repository", "tag", "digest"], "container.image")
    text(image["tag"], "container.image.tag")
    need(re.fullmatch("sha256:[0-9a-f]{64}", image["digest"] or ""), "container.image.digest is none")
    need(value["kind"] in ("vllm-plugin", "vllm-fork", "tt-dit-server", "http-server"), f"unknown kind {value['kind']!r}")
    need(isinstance(value["runtime"], dict) and isinstance(value["built"], dict), "runtime and built are objects")
    serve(value["serve"], SERVE, "container.serve")
    need(value["serve_profiles"], "the manifest declares no serve profiles")
    for profile in value["serve_profiles"]:
        serve(profile, [*SERVE, "name", "description"], "a profile")
        need(re.fullmatch("[A-Za-z0-9_.-]+", profile["name"] or ""), f"unsafe profile name {profile['name']!r}")
    names = [profile["name"] for profile in value["serve_profiles"]]
    need(value["default_profile"] in [None, *names], "default_profile names no profile")
    need(isinstance(value["verify"], list), "verify is no list")
    if value["kind"] == "http-server":
        command = value["runtime"].get("command")
        need(isinstance(command, list) and command and all(isinstance(word, str) and word for word in command), "no command")
        need("{port}" in command, "runtime.command never names {port}")
        for word in command:
            need(word in ("{host}", "{port}") or not re.search(r"\{[a-z_]+\}", word), f"{word} is substituted as a whole only")


def serve(value, expected, where):
    keys(value, expected, where)
    for key, kind in (("additional_config", dict), ("args", list), ("env", dict)):
        need(isinstance(value[key], kind), f"{where}.{key} is {value[key]!r}")
    need(all(isinstance(item, str) for item in value["env"].values()), f"{where}.env holds what is no text")


def merge(base, overlay):
    """Profile over serve: nulls and empty containers never replace."""
    merged = dict(base)
    for key, value in overlay.items():
        if value is None or value == [] or value == {}:
            continue
        merged[key] = merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def resolved(manifest, name):
    """The profile of that name, or the default one, merged and complete."""
    box = manifest["container"]
    name = name or box["default_profile"] or box["serve_profiles"][0]["name"]
    found = [profile for profile in box["serve_profiles"] if profile["name"] == name]
    need(found, f"there is no profile {name}")
    profile = merge(box["serve"], found[0])
    for key in ("hardware", "mesh_device"):
        need(profile[key], f"serve profile {name!r}: {key} is required")
    chips = chips_of(profile["hardware"])
    need(MESHES.get(profile["mesh_device"]) == chips, f"mesh_device {profile['mesh_device']!r} is not of {chips} chips")
    return profile


def chips_of(hardware):
    match = re.fullmatch(r"([a-z]\d+)([a-z]?)(?:x(\d+))?", hardware.strip().lower())
    count = CHIPS.get(match[1], 0) * int(match[3] or 1) if match else 0
    need(count, f"hardware {hardware!r} is not a recognised board label")
    return count

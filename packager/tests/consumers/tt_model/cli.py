# SPDX-License-Identifier: Apache-2.0
"""`tt-model`: sections D, E and F."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import hub, image as images, manifest as manifests, run as runs
from .manifest import Refused, need


def root():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tt-model"


def index():
    path = root() / "installed.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_index(entries):
    root().mkdir(parents=True, exist_ok=True)
    aside = root() / "installed.json.new"
    aside.write_text(json.dumps(entries, indent=2))
    aside.rename(root() / "installed.json")


def say(text):
    print(text, flush=True)


def step(label, work):
    """tt reads these two lines."""
    say(f"{label}…")
    started, detail = time.monotonic(), work()
    say(f"✓ {label}  {detail or ''}  {time.monotonic() - started:.1f}s")


def own(manifest):
    # Caches stay under ~/.cache, whatever XDG says.
    return Path.home() / ".cache/tt-model" / manifest["name"]


def pull(target, with_weights):
    repo, _, revision = target.partition("@")
    need(repo.count("/") == 1, f"{repo} is no bundle id")
    sha = hub.head(repo, revision or "main")
    record = index().get(repo.lower())
    with tempfile.TemporaryDirectory() as directory:
        step(f"bundle {repo}@{sha[:12]}", lambda: hub.snapshot(repo, sha, Path(directory)))
        manifest = manifests.read(Path(directory) / manifests.FILE)
    image = manifest["container"]["image"]
    if images.is_current(image, record):
        say(f"○ image {image['tag']} is here")
        loaded = images.identity(image["tag"])
    else:
        loaded = load(repo, sha, image)
    folder = root() / "pulled" / repo.replace("/", "__")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifests.FILE).write_text(json.dumps(manifest, indent=2, ensure_ascii=False))
    profiles = [profile["name"] for profile in manifest["container"]["serve_profiles"]]
    entry = {
        "repo_id": repo, "container": True, "image": image["tag"], "revision": sha, "manifest": str(folder / manifests.FILE),
        "arch": manifest["arch"], "image_digest": image["digest"], "image_loaded_id": loaded,
        "profile": manifest["container"]["default_profile"] or profiles[0], "profiles": profiles,
    }
    write_index({**index(), repo.lower(): entry})
    if with_weights:
        fetch_weights(manifest)
    return manifest


def load(repo, sha, image):
    """The snapshot again, into another directory; or the registry."""
    loaded = []
    if image["registry"] != "hf":
        step(f"image {images.pinned(image)}", lambda: loaded.append(images.from_registry(image)))
        return loaded[0]
    with tempfile.TemporaryDirectory() as directory:
        def work():
            hub.snapshot(repo, sha, Path(directory))
            loaded.append(images.from_layout(Path(directory) / "image", image))
        step(f"image {image['tag']}", work)
    return loaded[0]


def fetch_weights(manifest):
    for weights in [manifest["weights"], *manifest["auxiliary_weights"]]:
        step(f"weights {weights['repo_id']}@{weights['revision']}", lambda: f"{hub.fetch(weights)} files")


def installed(repo):
    record = index().get(repo.lower())
    need(record, f"{repo} is not installed: tt-model pull {repo}")
    return record, manifests.read(Path(record["manifest"]))


def serve(options, extra):
    need("--port" not in extra, "give --port to tt-model, not to the server")
    repo = options.bundle
    record = index().get(repo.lower())
    if not record:
        need(not options.local_only, f"{repo} is not installed, and --local-only forbids a pull")
        pull(repo, not options.no_weights)
    elif options.refresh and hub.head(repo) != record["revision"]:
        say(f"↻ {repo} has a newer revision")
        pull(repo, not options.no_weights)
    record, manifest = installed(repo)
    image = manifest["container"]["image"]
    profile = manifests.resolved(manifest, options.profile)
    if options.print:
        words, _ = runs.compose(manifest, profile, options.port or 20000, own(manifest), extra)
        say(" ".join(words))
        return
    if not images.is_current(image, record):
        need(not options.local_only, f"image {image['tag']} is not loaded in docker")
        pull(f"{repo}@{record['revision']}", False)
    if not (options.no_weights or options.local_only):
        fetch_weights(manifest)
    if any("models--" in value for value in profile["env"].values()):
        weights = manifest["weights"]
        snapshot = hub.repository(weights["repo_id"]) / "snapshots" / weights["revision"]
        need(snapshot.is_dir(), f"the weights are pinned to {snapshot}, which is not there")
    port = runs.free_port(options.port)
    words, mounts = runs.compose(manifest, profile, port, own(manifest), extra)
    for directory in mounts:
        Path(directory).mkdir(parents=True, exist_ok=True)
    step(f"container {runs.name(manifest, profile)}", lambda: images.docker(*words[1:])[:12])
    if not options.detach:
        wait(runs.name(manifest, profile), runs.ready_line(manifest))
    say(f"http://localhost:{port}")


def wait(container, line):
    """Until the ready line is a part of any line of the log."""
    with subprocess.Popen(["docker", "logs", "--follow", container], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as logs:
        for got in logs.stdout:
            if line in got.decode(errors="replace"):
                logs.terminate()
                return
    raise Refused("container exited before it was ready")


def running(repo, profile=None, everything=False):
    """Containers of a bundle, by the labels that they inherit from the image."""
    words = ["ps", *(["--all"] if everything else []), "--filter", f"label={runs.LABEL}.repo={repo}"]
    if profile:
        words += ["--filter", f"label={runs.LABEL}.profile={profile}"]
    return images.docker(*words, "--format", "{{.Names}}").split()


def stop(repo, profile):
    containers = running(repo, profile)
    need(containers, f"{repo} is not served")
    for container in containers:
        images.docker("stop", "--time", "120", container)
        code = images.docker("inspect", "--format", "{{.State.ExitCode}}", container)
        tag = images.docker("inspect", "--format", "{{.Config.Image}}", container)
        images.docker("rm", container)
        if code in ("137", ""):
            done = subprocess.run(["docker", "run", "--rm", "--entrypoint", "tt-smi", tag, "-r", "all"], timeout=180)
            need(done.returncode == 0, f"{container} was killed, and reset did not complete")
        say(f"✓ {container}  stopped, exit code {code}")


def remove(options):
    record, manifest = installed(options.bundle)
    for container in running(options.bundle, everything=True):
        images.docker("rm", "--force", container)
    others = [entry for key, entry in index().items() if key != options.bundle.lower()]
    if all(entry["image"] != record["image"] for entry in others):
        image = manifest["container"]["image"]
        for reference in [record["image"], *([] if image["registry"] == "hf" else [images.pinned(image)])]:
            images.docker("rmi", reference, check=False)
    shutil.rmtree(Path(record["manifest"]).parent)
    write_index({key: entry for key, entry in index().items() if key != options.bundle.lower()})
    if not options.keep_cache:
        shutil.rmtree(own(manifest), ignore_errors=True)
    if options.include_weights:
        shutil.rmtree(hub.repository(manifest["weights"]["repo_id"]), ignore_errors=True)
    say(f"✓ removed {options.bundle}")


def listed():
    for entry in index().values():
        image = json.loads(Path(entry["manifest"]).read_text())["container"]["image"]
        say(f"{entry['repo_id']}\t{entry['revision']}\t{'ready' if images.is_current(image, entry) else 'image missing'}")


def info(repo):
    _, manifest = installed(repo)
    say(json.dumps(manifest, indent=2, ensure_ascii=False))
    say(f"needs {manifest['device_count']} chip(s) of {manifest['arch']}")


def parser():
    top = argparse.ArgumentParser(prog="tt-model")
    top.add_argument("--verbose", action="store_true")
    commands = top.add_subparsers(dest="command", required=True)
    flags = {
        "pull": ["--with-weights", "--force"], "logs": ["--follow"], "stop": [], "profiles": [], "info": [],
        "serve": ["--detach", "--print", "--refresh", "--no-update-check", "--no-weights", "--local-only"],
        "rm": ["--keep-cache", "--include-weights"],
    }
    for name, names in flags.items():
        command = commands.add_parser(name)
        command.add_argument("bundle")
        for flag in names:
            command.add_argument(flag, action="store_true")
        if name in ("serve", "logs", "stop"):
            command.add_argument("--profile")
    commands.choices["serve"].add_argument("--port", type=int)
    commands.add_parser("list")
    return top


def main(arguments):
    options, extra = parser().parse_known_args(arguments)
    try:
        if options.command == "serve":
            serve(options, [word for word in extra if word != "--"])
        elif extra:
            raise Refused(f"unknown arguments: {extra}")
        elif options.command == "pull":
            pull(options.bundle, options.with_weights)
        elif options.command == "logs":
            found = running(options.bundle, options.profile)
            need(found, f"{options.bundle} is not served")
            return subprocess.run(["docker", "logs", *(["--follow"] if options.follow else []), found[0]]).returncode
        elif options.command == "stop":
            stop(options.bundle, options.profile)
        elif options.command == "rm":
            remove(options)
        elif options.command == "profiles":
            for profile in installed(options.bundle)[1]["container"]["serve_profiles"]:
                say(profile["name"])
        elif options.command == "info":
            info(options.bundle)
        else:
            listed()
    except Refused as refused:
        print(f"✗ {refused}", file=sys.stderr, flush=True)
        return 1
    return 0

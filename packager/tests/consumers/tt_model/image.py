# SPDX-License-Identifier: Apache-2.0
"""The image into the engine (section D.2), and whether it is there already (section C.4)."""
import os
import shutil
import subprocess
import tarfile

from .manifest import Refused, need


def docker(*arguments, check=True, **options):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, **options)
    if check and done.returncode:
        raise Refused(f"docker {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def identity(reference):
    """The engine's Id of an image; empty if it has none of that name."""
    return docker("image", "inspect", "--format", "{{.Id}}", reference, check=False)


def is_current(image, record):
    """The Id is the digest, or the record says that this digest was loaded here and got this Id."""
    found = identity(image["tag"])
    loaded = record and record["image_digest"] == image["digest"] and record["image_loaded_id"] == found
    return bool(found) and (found == image["digest"] or bool(loaded))


def pinned(image):
    return f"{image['registry']}/{image['repository']}@{image['digest']}"


def from_registry(image):
    docker("pull", pinned(image))
    docker("tag", pinned(image), image["tag"])
    return identity(image["tag"])


def from_layout(layout, image):
    """By skopeo where there is one, else by docker load, which never gives another name."""
    need((layout / "oci-layout").is_file(), f"{layout} is not an OCI layout")
    way = os.environ.get("TT_MODEL_LOADER") or ("skopeo" if shutil.which("skopeo") else "docker")
    if way == "skopeo":
        host = ["--dest-daemon-host", os.environ["DOCKER_HOST"]] if os.environ.get("DOCKER_HOST") else []
        command = ["skopeo", "--insecure-policy", "copy", *host, f"oci:{layout}:latest", f"docker-daemon:{image['tag']}"]
        done = subprocess.run(command, capture_output=True, text=True)
        need(done.returncode == 0, f"skopeo failed: {done.stderr.strip()}")
    else:
        load = subprocess.Popen(["docker", "load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with tarfile.open(fileobj=load.stdin, mode="w|", dereference=True) as archive:
            for path in sorted(layout.rglob("*")):
                if path.is_file():
                    archive.add(path, path.relative_to(layout).as_posix())
        load.stdin.close()
        said = load.stdout.read().decode()
        need(load.wait() == 0, f"docker load failed: {said.strip()}")
    found = identity(image["tag"])
    need(found, f"image {image['tag']} is not loaded in docker")
    return found

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the commands of examples/ci as their services would for a tag, but for the installation of packager.

usage: run_ci_examples.py PACKAGER

A copy of the tests' small package is the author's repository; Debian's docker-registry with a password is the
registry. check-ci-examples.sh calls this.
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "packager/tests/fixtures/small-package"
PASSWORD = "a-passw0rd-of-a-test"


def steps(path):
    """Commands of a workflow for a tag, in order, with the variables that the workflow itself sets."""
    document = YAML(typ="safe").load(path)
    if "jobs" in document:
        (job,) = document["jobs"].values()
        return [step["run"] for step in job["steps"] if "run" in step], dict(document["env"])
    return list(document["release"]["script"]), {"PACKAGE": document["variables"]["PACKAGE"]}


def registry(work):
    """Start it; its process and address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    users = subprocess.run(["htpasswd", "-nbB", "ann", PASSWORD], check=True, capture_output=True, text=True).stdout
    (work / "users").write_text(users)
    (work / "registry.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {work}/data}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
        f"auth: {{htpasswd: {{realm: test, path: {work}/users}}}}\n")
    log = open(work / "registry.log", "w")
    process = subprocess.Popen(["docker-registry", "serve", work / "registry.yml"], stdout=log, stderr=log)
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"127.0.0.1:{port}"
        time.sleep(0.1)
    sys.exit(f"docker-registry does not start: {(work / 'registry.log').read_text()}")


def run(path, packager, work):
    process, address = registry(work)
    try:
        repository = work / "repository"
        shutil.copytree(SMALL, repository)
        manifest = repository / "manifest.yaml"
        manifest.write_text(manifest.read_text().replace("name: small\n", "name: my-model\n"))
        (work / "bin").mkdir()
        (work / "bin/packager").symlink_to(Path(packager).resolve())
        commands, variables = steps(path)
        environment = {
            **os.environ, **variables, "PATH": f"{work}/bin:{os.environ['PATH']}", "HOME": str(work),
            "DOCKER_CONFIG": str(work / "docker"), "TOKEN": PASSWORD, "GITHUB_ACTOR": "ann",
            "GITHUB_REPOSITORY": "Author/My-Model", "GITHUB_REF_NAME": "v1.0", "CI_REGISTRY": address,
            "CI_REGISTRY_USER": "ann", "CI_REGISTRY_PASSWORD": PASSWORD, "CI_COMMIT_TAG": "v1.0",
            "CI_REGISTRY_IMAGE": f"{address}/author/my-model",
        }
        # What the author did once, and committed.
        subprocess.run(["packager", "pin"], cwd=repository, env=environment, check=True, stdout=subprocess.DEVNULL)
        for command in commands:
            if "cargo install" in command:
                continue
            command = command.replace("ghcr.io", address)
            print(f"$ {command}", flush=True)
            # GitHub's shell for `run`.
            subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=repository, env=environment, check=True,
                           stdin=subprocess.DEVNULL)
        built, pushed = (json.loads((repository / name).read_text()) for name in ("build.json", "push.json"))
        assert built["built"] and pushed["read_back"] and pushed["package_updated"], (built, pushed)
        assert pushed["image"] == f"{address}/author/my-model:v1.0", pushed["image"]
        subprocess.run(["packager", "verify", variables["PACKAGE"]], cwd=repository, env=environment, check=True,
                       stdout=subprocess.DEVNULL)
        subprocess.run(["docker", "rmi", "-f", built["image"]], env=environment, check=True, stdout=subprocess.DEVNULL)
    finally:
        process.kill()
        process.wait()


def main():
    for path in sorted((ROOT / "examples/ci").glob("*.yml")):
        print(f"== {path.relative_to(ROOT)}", flush=True)
        with tempfile.TemporaryDirectory() as work:
            run(path, sys.argv[1], Path(work))


if __name__ == "__main__":
    main()

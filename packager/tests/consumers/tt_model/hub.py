# SPDX-License-Identifier: Apache-2.0
"""The Hub as the consumer asks it: a revision's head, a whole snapshot, weights into the Hugging Face cache."""
import fnmatch
import hashlib
import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from .manifest import Refused, need


def home():
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")


def cache():
    return Path(os.environ.get("HF_HUB_CACHE") or home() / "hub")


def ask(path):
    url = path if "://" in path else os.environ.get("HF_ENDPOINT", "https://huggingface.co") + path
    request = urllib.request.Request(url)
    if os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {os.environ['HF_TOKEN']}")
    try:
        return urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        raise Refused(f"the Hub answers {error.code} for {path}") from error
    except OSError as error:
        raise Refused(f"cannot reach the Hub: {error}") from error


def head(repo, revision="main"):
    """The commit that a revision is."""
    sha = json.load(ask(f"/api/models/{repo}/revision/{urllib.parse.quote(revision, safe='')}"))["sha"]
    need(re.fullmatch("[0-9a-f]{40}", sha), f"{sha} is no commit")
    return sha


def listing(repo, sha):
    url, entries = f"/api/models/{repo}/tree/{sha}?recursive=true", []
    while url:
        answer = ask(url)
        entries += [entry for entry in json.load(answer) if entry["type"] == "file"]
        url = (re.search('<(.*?)>; rel="next"', answer.headers.get("Link") or "") or [None, None])[1]
    return entries


def save(repo, sha, entry, target):
    """One file, whole and right; returns the name of its blob."""
    path = target.with_name(target.name + ".incomplete")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ask(f"/{repo}/resolve/{sha}/{urllib.parse.quote(entry['path'])}") as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)
    need(path.stat().st_size == entry["size"], f"{entry['path']} is not whole")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest() if "lfs" in entry else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    need(found == (entry["lfs"] if "lfs" in entry else entry)["oid"], f"{entry['path']} has other bytes than the Hub lists")
    path.rename(target)
    return found


def snapshot(repo, sha, directory):
    """The whole repository at a commit."""
    for entry in listing(repo, sha):
        need(not any(part in ("", ".", "..") for part in entry["path"].split("/")), f"unsafe path {entry['path']}")
        save(repo, sha, entry, directory / entry["path"])


def wanted(weights, path):
    allow, ignore = weights["allow_patterns"], weights["ignore_patterns"]
    return (not allow or any(fnmatch.fnmatch(path, one) for one in allow)) and not any(fnmatch.fnmatch(path, one) for one in ignore or [])


def missing(weights):
    """Paths of a pinned snapshot that the cache lacks; needs the Hub for the list."""
    root = repository(weights["repo_id"]) / "snapshots" / weights["revision"]
    entries = listing(weights["repo_id"], weights["revision"])
    return [entry for entry in entries if wanted(weights, entry["path"]) and not (root / entry["path"]).is_file()]


def repository(repo):
    return cache() / ("models--" + repo.replace("/", "--"))


def fetch(weights):
    """The weights at their pin, in the standard layout. Returns how many files came."""
    repo, sha = weights["repo_id"], weights["revision"]
    root, lacking = repository(repo), missing(weights)
    for entry in lacking:
        blobs, link = root / "blobs", root / "snapshots" / sha / entry["path"]
        blobs.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        name = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        if not (blobs / name).exists():
            save(repo, sha, entry, blobs / name)
        link.symlink_to(os.path.relpath(blobs / name, link.parent))
    main = root / "refs/main"
    if not main.exists():
        main.parent.mkdir(parents=True, exist_ok=True)
        main.write_text(sha)
    return len(lacking)

#!/usr/bin/env python3
"""Lay an overlay over an installed vLLM: python3 overlay.py ARCHIVE [--site DIR].

Every file must be, byte for byte, the one that the overlay was made against, or
nothing is changed.  It needs nothing but Python, and runs without a GPU.
"""

import argparse
import gzip
import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import zlib
from pathlib import Path

MANIFEST = "MANIFEST.json"


def sha256(path):
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def installed():
    """The folder that the package vllm is in, without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit("error: vLLM is not installed for this Python")
    return Path(next(iter(found.submodule_search_locations))).parent


def read(archive):
    """The manifest and the files, whole or not at all."""
    try:
        plain = gzip.decompress(archive.read_bytes())  # whole, or it raises
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            files = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}
        told = json.loads(files.pop(MANIFEST))
        wanted = {
            path: entry["after"]
            for path, entry in told["files"].items()
            if entry["after"] is not None
        }
        found = {k: hashlib.sha256(v).hexdigest() for k, v in files.items()}
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, LookupError,
            TypeError, AttributeError) as e:  # fmt: skip
        sys.exit(f"error: {archive} is not an overlay: {e}")
    if found != wanted:
        sys.exit(f"error: {archive}: its files are not those of its manifest")
    return told, files


def lay(site, told, files):
    """Change the files; returns how many were changed."""
    state = {path: sha256(site / path) for path in told["files"]}
    wanted = {path: entry["after"] for path, entry in told["files"].items()}
    if state == wanted:
        return 0
    strange = [
        path for path, entry in told["files"].items() if state[path] != entry["before"]
    ]
    if strange:
        tag = told["vllm"]["tag"]
        print(f"error: {site}: not the files of vLLM {tag}:", file=sys.stderr)
        for path in strange:
            print(f"  {path}", file=sys.stderr)
        sys.exit(f"mend: start from the published image of {tag}; nothing was changed")
    new = []
    for path, content in files.items():  # first beside them, as a disk can be full
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".overlay")
        part.write_bytes(content)
        part.chmod(target.stat().st_mode if target.exists() else 0o644)
        new.append((part, target))
    for part, target in new:
        os.replace(part, target)
    for path, entry in told["files"].items():
        if entry["after"] is None:
            (site / path).unlink()
    return len(told["files"])


def require_writable(path):
    """Whether the record could be written, without making it."""
    place = path = path.resolve()
    while not place.exists():
        place = place.parent
    fits = place.is_file() if place == path else place.is_dir()
    if not fits or not os.access(place, os.W_OK):
        sys.exit(f"error: {path} cannot be written; nothing was changed")


def record(told, path):
    """Add to the image's own record, in its form, unless it is there."""
    lines = [
        f"MI300X_OVERLAY: {told['version']}",
        *(f"MI300X_OVERLAY_PATCH: {p['name']} sha256:{p['sha256']}"
          for p in told["patches"]),
    ]  # fmt: skip
    before = path.read_text() if path.is_file() else ""
    if lines[0] not in before.splitlines():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--site", type=Path, help="the folder that vllm/ is in")
    parser.add_argument("--versions", type=Path, default=Path("/app/versions.txt"))
    options = parser.parse_args()
    told, files = read(options.archive)
    site = options.site or installed()
    try:
        require_writable(options.versions)  # before anything is changed
        count = lay(site, told, files)
        record(told, options.versions)
    except OSError as error:
        sys.exit(f"error: {error.filename}: {(error.strerror or '').lower()}")
    done = f"{count} files changed" if count else "nothing to change"
    print(f"overlay {told['version']}, {len(told['patches'])} patches: {done}")
    for name, why in told["left_out"].items():
        print(f"  not in it: {name} {why}")


if __name__ == "__main__":
    main()

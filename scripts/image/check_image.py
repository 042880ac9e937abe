#!/usr/bin/env python3
"""Say what is in this image, and whether it is what it says.

Runs in the image's build, and at any time by hand:
    docker run --rm --entrypoint python3 IMAGE /app/mi300x/check_image.py
It needs no GPU.
"""

import argparse
import hashlib
import importlib.metadata as metadata
import re
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent
EXTENSIONS = ("_C.abi3.so", "_rocm_C.abi3.so", "_moe_C.abi3.so")


def facts(path):
    """The record of the image: KEY: value, or KEY=value."""
    pairs = re.findall(r"^(\w+)(?:: |=)(.*)$", path.read_text(), re.MULTILINE)
    return dict(pairs)


def problems(told, site, sums, archs):
    """What is not as it should be, one sentence each."""
    try:
        import torch
    except Exception as error:
        yield f"PyTorch cannot be imported: {type(error).__name__}: {error}"
        return
    if torch.version.hip is None:
        yield f"PyTorch {torch.__version__} is not built for ROCm"
    if torch.__version__ != told.get("MI300X_TORCH"):
        yield (
            f"PyTorch was {told.get('MI300X_TORCH')} in the base image and is "
            f"{torch.__version__}"
        )
    version = metadata.version("vllm")
    if version != told.get("MI300X_VERSION"):
        yield f"vLLM is {version}, the record says {told.get('MI300X_VERSION')}"
    lines = sums.read_text().splitlines()
    if not lines:
        yield f"{sums} is empty"
    for line in lines:
        wanted, name = line.split("  ", 1)
        path = site / name
        if not path.is_file():
            yield f"{name} is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            yield f"{name} is not the patched file"
    for name in EXTENSIONS:
        path = site / "vllm" / name
        if not path.is_file():
            yield f"vllm/{name} is missing"
            continue
        content = path.read_bytes()
        for arch in archs:
            # A compressed bundle (CCOB) does not show it.
            if f"amdhsa--{arch}".encode() not in content and b"CCOB" not in content:
                yield f"vllm/{name} has no code for {arch}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--versions", type=Path, default=Path("/app/versions.txt"))
    parser.add_argument("--sums", type=Path, default=HOME / "patched-files.sha256")
    parser.add_argument("--site", type=Path, help="the folder that vllm/ is in")
    parser.add_argument("--arch", default="gfx942")
    options = parser.parse_args()
    for path in (options.versions, options.sums):
        if not path.is_file():
            sys.exit(
                f"error: {path} does not exist: this is no image of the whole stack"
            )
    told = facts(options.versions)
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        sys.exit("error: vLLM is not installed for this Python")
    site = options.site or Path(str(found.locate_file("")))
    for key, value in told.items():
        if key.startswith("MI300X_"):
            print(f"{key}: {value}")
    found = list(problems(told, site, options.sums, options.arch.split(";")))
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

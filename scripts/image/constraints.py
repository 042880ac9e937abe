#!/usr/bin/env python3
"""Print pip constraints that keep the ROCm packages of this Python as they are.

Without them pip may answer a requirement with a PyTorch for CUDA.
"""

import argparse
import importlib.metadata as metadata
import sys

# What docker/Dockerfile.rocm_base builds for ROCm.
NAMES = ("torch", "torchvision", "torchaudio", "triton", "triton-kernels", "amdsmi",
         "amd-aiter", "flash-attn", "amd-mori", "mori")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", default="", help="the version that it must be")
    wanted = parser.parse_args().torch
    found = {}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "torch" not in found:
        sys.exit("error: this Python has no PyTorch: is this the release's base image?")
    if wanted and found["torch"] != wanted:
        sys.exit(
            f"error: PyTorch is {found['torch']}, the release is built with {wanted}: "
            "this is another base image; scripts/stack image --any-toolchain takes it"
        )
    for name, version in found.items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()

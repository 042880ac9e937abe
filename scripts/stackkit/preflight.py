"""doctor --serve: whether this machine can serve the model, before it tries."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .doctor import OK, PROBLEM, WARNING, Finding
from .pins import Pin
from .rocm import ARCH, UNLIMITED, Machine, Packages

SHARED_MEMORY = 16_000_000_000
FILES = 65536
# Reported to replay captured graphs wrongly on MI300X (vllm-project/vllm#46386).
REPLAY_DEFECT = ("7.2.0", "7.2.3")

_DEVICES = "docker run --device /dev/kfd --device /dev/dri"


def preflight(
    machine: Machine, pin: Pin, version: str | None, *, gpus: int, python: str
) -> list[Finding]:
    """Look at devices, limits, ROCm and packages; nothing is changed.

    Args:
        machine: Where to look.
        pin: What the stack was made for.
        version: What this checkout builds; None if that is not known.
        gpus: How many GPUs are wanted.
        python: The Python that vLLM is, or would be, installed for.
    """
    packages = machine.packages(python)
    return [
        *_gpus(machine, gpus),
        *_nodes(machine),
        *_rocm(machine, pin),
        *_limits(machine),
        *_torch(packages, pin, python),
        *_vllm(machine, packages, version),
        *_aiter(machine, packages),
    ]


def _gpus(machine: Machine, wanted: int) -> Iterator[Finding]:
    archs = machine.archs
    if not archs:
        yield Finding(
            "GPUs",
            PROBLEM,
            "the kernel driver shows no AMD GPU",
            "load the amdgpu driver: sudo modprobe amdgpu",
        )
        return
    others = sorted({arch for arch in archs if arch != ARCH})
    right = archs.count(ARCH)
    detail = f"{right} of {ARCH}"
    if others:
        detail += f", {len(archs) - right} of {' and '.join(others)}"
    if not right:
        mend = "the stack is for MI300X, MI300A and MI325X; use plain vLLM elsewhere"
        yield Finding("GPUs", PROBLEM, detail, mend)
    elif right < wanted:
        mend = "choose a recipe for fewer GPUs: scripts/stack serve --list"
        yield Finding("GPUs", PROBLEM, f"{detail}; {wanted} are wanted", mend)
    elif others:
        mend = "keep the others out with ROCR_VISIBLE_DEVICES"
        yield Finding("GPUs", WARNING, detail, mend)
    else:
        yield Finding("GPUs", OK, detail)


def _nodes(machine: Machine) -> Iterator[Finding]:
    nodes = list(machine.nodes)
    names = [node.path.name for node in nodes]
    if "kfd" not in names:
        yield Finding(
            "/dev/kfd", PROBLEM, "does not exist", f"in a container: {_DEVICES} ..."
        )
    if not any(name.startswith("renderD") for name in names):
        mend = f"in a container: {_DEVICES} ..."
        yield Finding("/dev/dri", PROBLEM, "has no render device", mend)
    for node in nodes:
        what = f"/{node.path.relative_to(machine.root)}"
        if node.usable:
            detail = f"readable and writable; group {node.group}"
            yield Finding(what, OK, detail)
        else:
            # The number: the name may be another one in the image, or none.
            yield Finding(
                what,
                PROBLEM,
                f"user {os.geteuid()} may not open it; it belongs to group "
                f"{node.group}",
                f"in a container: --group-add {node.group}; else: sudo usermod -a -G "
                f"{node.group} $USER, and log in again",
            )


def _rocm(machine: Machine, pin: Pin) -> Iterator[Finding]:
    found, wanted = machine.rocm, pin.toolchain.rocm
    if found is None:
        yield Finding(
            "ROCm",
            WARNING,
            f"none in {machine.home}",
            "an image brings its own; else set ROCM_PATH",
        )
        return
    if found != wanted:
        yield Finding(
            "ROCm",
            WARNING,
            f"{found}; the release is built with {wanted}",
            f"use {pin.toolchain.base_image}",
        )
    else:
        yield Finding("ROCm", OK, found)
    low, high = (_numbers(text) for text in REPLAY_DEFECT)
    if low <= _numbers(found) <= high:
        yield Finding(
            "graph replay",
            WARNING,
            f"ROCm {REPLAY_DEFECT[0]} to {REPLAY_DEFECT[1]} is reported to replay "
            "captured graphs wrongly on MI300X (vllm-project/vllm#46386)",
            "compare with an eager server: scripts/stack smoke --recipe NAME; if they "
            "differ, serve with --eager",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _limits(machine: Machine) -> Iterator[Finding]:
    size = machine.shared_memory
    shown = f"{size / 1e9:.1f} GB"
    if size < SHARED_MEMORY:
        mend = "docker run --ipc=host, or --shm-size 16g"
        yield Finding("/dev/shm", PROBLEM, f"{shown}, of 16 GB wanted", mend)
    else:
        yield Finding("/dev/shm", OK, shown)
    for what, value, wanted, option in (
        ("memlock", machine.memlock, UNLIMITED, "memlock=-1"),
        ("open files", machine.files, FILES, f"nofile={FILES}"),
    ):
        shown = "unlimited" if value == UNLIMITED else f"{value}"
        if value == UNLIMITED or UNLIMITED != wanted <= value:
            yield Finding(what, OK, shown)
        else:
            need = "unlimited" if wanted == UNLIMITED else f"{wanted}"
            mend = f"docker run --ulimit {option}"
            yield Finding(what, WARNING, f"{shown}, of {need} wanted", mend)


def _torch(packages: Packages, pin: Pin, python: str) -> Iterator[Finding]:
    wanted = pin.toolchain.torch
    found = packages.torch
    if found is None:
        yield Finding(
            "PyTorch",
            PROBLEM,
            f"{python} has none",
            f"use {pin.toolchain.base_image}, or name another Python with --python",
        )
    elif packages.error:
        yield Finding(
            "PyTorch",
            PROBLEM,
            f"{found} cannot be imported: {packages.error}",
            f"use {pin.toolchain.base_image}",
        )
    elif packages.hip is None:
        yield Finding(
            "PyTorch",
            PROBLEM,
            f"{found} is not built for ROCm",
            f"install {wanted} again, or use {pin.toolchain.base_image}",
        )
    elif found != wanted:
        detail = f"{found}; the release is built with {wanted}"
        yield Finding("PyTorch", WARNING, detail, f"use {pin.toolchain.base_image}")
    else:
        yield Finding("PyTorch", OK, f"{found}, HIP {packages.hip}")


def _vllm(
    machine: Machine, packages: Packages, version: str | None
) -> Iterator[Finding]:
    told = machine.image.get("MI300X_VERSION")
    found = packages.vllm
    if found is None:
        yield Finding(
            "vLLM", PROBLEM, "not installed", "scripts/stack build; docs/serving.md"
        )
        return
    if told and told != found:
        yield Finding(
            "image",
            PROBLEM,
            f"/app/versions.txt says {told}, installed is vLLM {found}",
            "scripts/stack image makes a new one",
        )
    if version is None:
        yield Finding("vLLM", WARNING, f"{found}; not compared", "scripts/stack apply")
    elif found != version:
        yield Finding(
            "vLLM",
            PROBLEM,
            f"installed is {found}, this checkout builds {version}",
            "scripts/stack build, and install the wheel; or check out the version "
            "that is installed",
        )
    else:
        yield Finding("vLLM", OK, found)


def _aiter(machine: Machine, packages: Packages) -> Iterator[Finding]:
    if packages.aiter is None:
        mend = "use the release's base image"
        yield Finding("AITER", PROBLEM, "not installed", mend)
        return
    named = machine.environment.get("AITER_JIT_DIR")
    if named:
        yield Finding(
            "AITER kernels",
            WARNING,
            f"AITER_JIT_DIR={named} hides the kernels that were built with AITER; "
            "those that are not in it are compiled by the first request, for minutes",
            "unset AITER_JIT_DIR",
        )
        return
    kernels = packages.aiter / "jit"
    count = len(list(kernels.glob("*.so")))
    if not os.access(kernels, os.W_OK):
        yield Finding(
            "AITER kernels",
            WARNING,
            f"{kernels} cannot be written by user {os.geteuid()}; a kernel that is "
            "not in it cannot be added",
            f"chmod -R g+w {kernels}, and run with group 0",
        )
    elif not count:
        yield Finding(
            "AITER kernels",
            WARNING,
            "none are built; the first requests compile them, for minutes",
            "wait, or use the release's base image",
        )
    else:
        yield Finding("AITER kernels", OK, f"{count} built")

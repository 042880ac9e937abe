"""What this machine has for AMD GPUs: devices, limits, ROCm, PyTorch, vLLM."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import process
from .errors import USAGE, StackError

ARCH = "gfx942"
PYTHON = "python3"
UNLIMITED = resource.RLIM_INFINITY

_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, os, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {name: version(name) for name in ("torch", "triton", "vllm")}
aiter = util.find_spec("aiter")
found["aiter"] = os.path.dirname(aiter.origin) if aiter and aiter.origin else None
found["hip"] = found["error"] = None
if found["torch"]:
    try:
        import torch
        found["hip"] = torch.version.hip
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Node:
    """A device file and what this process may do with it."""

    path: Path
    usable: bool
    group: int


@dataclass(frozen=True)
class Packages:
    """What one Python has; None is absent."""

    torch: str | None = None
    hip: str | None = None  # what torch was built for; None for CUDA or the CPU
    triton: str | None = None
    vllm: str | None = None
    aiter: Path | None = None
    error: str | None = None  # why torch cannot be imported


@dataclass(frozen=True)
class Machine:
    """The parts of a machine that serving and building look at.

    ``root`` is / except in tests.
    """

    root: Path = Path("/")
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    memlock: int = field(
        default_factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    )
    files: int = field(
        default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )

    @property
    def archs(self) -> list[str]:
        """One name for each AMD GPU, as the kernel driver tells."""
        found = []
        nodes = self.root / "sys/class/kfd/kfd/topology/nodes"
        for path in sorted(nodes.glob("*/properties")):
            match = re.search(
                r"^gfx_target_version (\d+)$", path.read_text(), re.MULTILINE
            )
            number = int(match[1]) if match else 0
            if number:  # a CPU's is 0
                major, rest = divmod(number, 10000)
                minor, step = divmod(rest, 100)
                found.append(f"gfx{major}{minor:x}{step:x}")
        return found

    @property
    def nodes(self) -> Iterator[Node]:
        """The device files that ROCm opens."""
        for path in (
            self.root / "dev/kfd",
            *sorted((self.root / "dev/dri").glob("renderD*")),
        ):
            if path.exists():
                usable = os.access(path, os.R_OK | os.W_OK)
                yield Node(path, usable, path.stat().st_gid)

    @property
    def home(self) -> Path:
        """Where ROCm is, if it is installed."""
        named = self.environment.get("ROCM_PATH") or "/opt/rocm"
        return self.root / named.lstrip("/")

    @property
    def rocm(self) -> str | None:
        """The version of the installed ROCm."""
        try:
            text = (self.home / ".info" / "version").read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return text.strip().split("-")[0] or None

    @property
    def shared_memory(self) -> int:
        """Bytes of /dev/shm, 0 if there is none."""
        path = self.root / "dev/shm"
        if not path.is_dir():
            return 0
        told = os.statvfs(path)
        return told.f_blocks * told.f_frsize

    @property
    def image(self) -> dict[str, str]:
        """What the image we are in says of itself, from /app/versions.txt."""
        try:
            text = (self.root / "app/versions.txt").read_text()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        pairs = re.findall(r"^(\w+)(?:: |=)(.*)$", text, re.MULTILINE)
        return dict(pairs)

    def packages(self, python: str = PYTHON) -> Packages:
        """What ``python`` has installed.

        Raises:
            StackError: if it cannot be started.
        """
        try:
            # Not with our own path before it: the question is about that Python.
            done = process.run([python, "-c", _QUESTION], env={"PYTHONUTF8": "1"})
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise StackError(
                f"{python} cannot be started: {(error.strerror or '').lower()}",
                mend="name the Python that has ROCm's PyTorch with --python",
                code=USAGE,
            ) from error
        if done.returncode:
            raise StackError(
                f"{python} does not say what it has installed",
                mend="name the Python that has ROCm's PyTorch with --python",
                details=process.tail(done.stderr, 3),
            )
        told = json.loads(done.stdout.decode().strip().splitlines()[-1])
        aiter = told.pop("aiter")
        return Packages(**told, aiter=Path(aiter) if aiter else None)

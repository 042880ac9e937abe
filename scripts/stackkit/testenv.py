"""What tests run in: PyTorch and Triton for the CPU, and the no-GPU harness."""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import urllib.parse
from pathlib import Path

from . import process
from .base import hash_file
from .errors import StackError
from .pins import Project
from .report import Step

PYTEST_OPTIONS = ("-p", "harness.plugin", "--noconftest", "-p", "no:cacheprovider")
TORCH_INDEX = "TORCH_INDEX_URL"
STAMP = "test-requirements.stamp"


def _phases(project: Project) -> tuple[tuple[list[str], list[Path]], ...]:
    """What pip installs, in order: its options, and requirement files."""
    folder = project.root / "tests"
    extra = os.environ.get(TORCH_INDEX)
    return (
        (
            [f"--extra-index-url={extra}"] if extra else [],
            [folder / "requirements.txt", folder / "requirements-torch.txt"],
        ),
        (["--no-deps"], [folder / "requirements-triton.txt"]),
    )


def _requirements(project: Project) -> list[Path]:
    return [path for _, files in _phases(project) for path in files]


def digest(project: Project) -> str:
    """An id of everything but the tree under test that can change a result."""
    parts = [platform.python_version()]
    harness = sorted((project.root / "ci" / "harness").rglob("*.py"))
    for path in (*_requirements(project), *harness):
        parts.append(f"{path.relative_to(project.root)} {hash_file(path)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def environment(project: Project, tree: Path) -> dict[str, str]:
    """Variables under which pytest imports the vLLM of ``tree`` with no GPU."""
    return {
        "PYTHONPATH": os.pathsep.join((str(project.root / "ci"), str(tree))),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def ensure(project: Project, step: Step) -> None:
    """Install what the tests need into the tool's environment, once.

    Args:
        project: Names the locked requirement files.
        step: Told the size of what is about to be downloaded.

    Raises:
        StackError: if pip fails; its words are in the details.
    """
    from .index import pip

    stamp = Path(sys.prefix) / STAMP
    content = "".join(f"{hash_file(path)}\n" for path in _requirements(project))
    if stamp.is_file() and stamp.read_text() == content:
        return
    phases = [
        [*options, *(part for path in files for part in ("-r", str(path)))]
        for options, files in _phases(project)
    ]
    step("asking the package index for sizes")
    count, size = _size(phases)
    room = shutil.disk_usage(sys.prefix).free
    step(
        f"installing {count} packages for the tests, {size / 1e6:.0f} MB to download; "
        f"{TORCH_INDEX} names an index with CPU builds of PyTorch"
    )
    if room < 4 * size:
        raise StackError(
            f"{sys.prefix}: {room / 1e9:.1f} GB free, the test packages need about "
            f"{4 * size / 1e9:.1f} GB",
            mend=f"free some space, or set {TORCH_INDEX} to an index with CPU builds",
        )
    for phase in phases:
        done = pip("install", "--quiet", "--no-input", *phase)
        if done.returncode:
            raise StackError(
                "the test packages could not be installed",
                mend="check the network and PIP_INDEX_URL, then run it again",
                details=process.tail(done.stderr),
            )
    stamp.write_text(content)


def triton(project: Project, version: str, step: Step) -> Path | None:
    """A folder to put before others on PYTHONPATH, so that Triton is ``version``.

    Args:
        project: Its cache holds the Tritons that are not the tests' own.
        version: As the package index names it.
        step: Told the size of what is about to be downloaded.

    Returns:
        None if the environment itself has this version.

    Raises:
        StackError: if pip fails; its words are in the details.
    """
    from .index import pip

    if importlib.metadata.version("triton") == version:
        return None
    tag = f"{version}-cp{sys.version_info.major}{sys.version_info.minor}"
    home = project.cache / "triton" / tag
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    wanted = ["--no-deps", "--ignore-installed", f"triton=={version}"]
    _, size = _size([wanted])
    step(f"installing Triton {version} into the cache, {size / 1e6:.0f} MB to download")
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        target = Path(folder) / tag
        done = pip("install", "--quiet", "--no-input", "--target", target, *wanted)
        if done.returncode:
            raise StackError(
                f"Triton {version} could not be installed",
                mend="check the network and PIP_INDEX_URL, then run it again",
                details=process.tail(done.stderr),
            )
        if not home.is_dir():  # else another run was faster
            target.rename(home)
    return home


def _size(phases: list[list[str]]) -> tuple[int, int]:
    """How many packages pip would install, and their bytes as the index tells."""
    from .index import finder, pip

    urls: list[str] = []
    for phase in phases:
        arguments = ("--dry-run", "--quiet", "--no-input", "--report", "-")
        done = pip("install", *arguments, *phase)
        if done.returncode:
            raise StackError(
                "the package index does not offer the test packages",
                mend="check the network and PIP_INDEX_URL, then run it again",
                details=process.tail(done.stderr),
            )
        report = json.loads(done.stdout)
        urls += [item["download_info"]["url"] for item in report["install"]]
    session = finder().session

    def size_of(url: str) -> int:
        if url.startswith("file:"):
            return (
                Path(urllib.parse.unquote(url.removeprefix("file://"))).stat().st_size
            )
        return int(session.head(url).headers.get("Content-Length", 0))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return len(urls), sum(pool.map(size_of, urls))

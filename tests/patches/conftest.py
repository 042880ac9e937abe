"""The real stack: its patches and their commits on the real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from stackkit import apply, patchfile, pins, worktree  # noqa: E402

PROJECT = pins.load(ROOT)


def pytest_generate_tests(metafunc):
    if "patch_name" in metafunc.fixturenames:
        names = patchfile.names(PROJECT.patches(PROJECT.pin(None)))
        metafunc.parametrize("patch_name", names)


@pytest.fixture(scope="session")
def tree() -> worktree.Tree:
    """build/<release>, with the series as it is now."""
    subprocess.run([ROOT / "scripts" / "stack", "apply"], check=True)
    return worktree.Tree(PROJECT, PROJECT.pin(None))


@pytest.fixture(scope="session")
def commits(tree) -> dict[str, apply.Applied]:
    patches = patchfile.load(PROJECT.patches(tree.pin))
    return {a.patch.name: a for a in apply.known_commits(tree, patches)}

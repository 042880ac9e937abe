"""Each patch keeps the rules that vLLM's own pre-commit configuration sets."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys

import pytest
from stackkit import git
from stackkit.prove import check_out

# In vLLM's tools/pre_commit; each takes file names and needs nothing but Python.
CHECKS = (
    "check_spdx_header.py",
    "check_forbidden_imports.py",
    "check_torch_cuda.py",
    "check_boolean_context_manager.py",
)


@pytest.fixture(scope="session")
def slot(tmp_path_factory):
    return tmp_path_factory.mktemp("prefix") / "tree"


@pytest.fixture
def prefix(tree, commits, patch_name, slot):
    """The stack up to a patch, and the Python files of the patch."""
    applied = commits[patch_name]
    check_out(tree, applied.tree, slot)
    files = [
        change.path
        for change in applied.patch.files
        if change.path.endswith(".py") and change.new != git.NO_BLOB
    ]
    return slot, files


def run(prefix, *command):
    folder, files = prefix
    return subprocess.run(
        [*command, *files], cwd=folder, capture_output=True, text=True
    )


def test_ruff_is_the_version_that_vllm_pins(tree):
    config = (tree.path / ".pre-commit-config.yaml").read_text()
    pinned = re.search(r"ruff-pre-commit\n  rev: v(\S+)", config)[1]
    assert tree.pin.toolchain.ruff == pinned
    told = subprocess.run(
        [sys.executable, "-m", "ruff", "--version"], capture_output=True, text=True
    )
    assert told.stdout.split()[1] == pinned


@pytest.mark.parametrize("what", [("check",), ("format", "--check", "--diff")])
def test_patch_passes_ruff(prefix, what):
    done = run(prefix, sys.executable, "-m", "ruff", *what, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_patch_passes_pre_commit_check(prefix, check):
    before = {name: (prefix[0] / name).read_bytes() for name in prefix[1]}
    done = run(prefix, sys.executable, f"tools/pre_commit/{check}")
    assert done.returncode == 0, done.stdout + done.stderr
    # The SPDX check writes the header that it misses.
    after = {name: (prefix[0] / name).read_bytes() for name in prefix[1]}
    assert after == before


@pytest.mark.parametrize("folder, imports", [("vllm/", "silent"), ("tests/", "skip")])
def test_stack_passes_mypy(tree, commits, tmp_path, folder, imports):
    """As vLLM's hook runs it, in an environment that has no torch. Slow, so at once."""
    files = {
        change.path: change.new
        for applied in commits.values()
        for change in applied.patch.files
        if change.path.startswith(folder) and change.path.endswith(".py")
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--python-version", "3.12"),
            *("--follow-imports", imports, "--no-site-packages"),
            *("--cache-dir", tmp_path),
            *(path for path, new in files.items() if new != git.NO_BLOB),
        ],
        cwd=tree.path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_is_the_version_that_vllm_pins(tree):
    config = (tree.path / ".pre-commit-config.yaml").read_text()
    pinned = re.search(r"mypy\[faster-cache\]==([\d.]+)", config)[1]
    assert importlib.metadata.version("mypy") == pinned


def test_a_broken_file_is_seen(tree, tmp_path):
    """The checks above can fail: each one rejects a file made to break it."""
    bad = {
        "check_spdx_header.py": "x = 1\n",
        "check_forbidden_imports.py": "import re\n",
        "check_torch_cuda.py": "import torch\n\ntorch.cuda.synchronize()\n",
        "check_boolean_context_manager.py": "with open('a') and open('b'):\n    x\n",
    }
    shutil.copytree(tree.path / "tools", tmp_path / "tools")
    (tmp_path / "vllm").mkdir()
    for check, text in bad.items():
        (tmp_path / "vllm" / "bad.py").write_text(text)
        done = subprocess.run(
            [sys.executable, f"tools/pre_commit/{check}", "vllm/bad.py"],
            cwd=tmp_path,
            capture_output=True,
        )
        assert done.returncode != 0, check

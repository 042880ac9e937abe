"""Fixtures: each test gets a copy of a project that is made once per process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for _folder in (HERE, HERE.parent.parent / "scripts"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import lab as lab_module  # noqa: E402
from lab import Lab, make_project  # noqa: E402


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch, tmp_path):
    """No setting of the person who runs the tests reaches them."""
    import os

    for key in list(os.environ):
        if key.startswith(("GIT_", "PIP_")):
            monkeypatch.delenv(key)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    yield
    # Hundreds of small repositories; left to pytest, they outlive three runs.
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="session")
def _made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_project(folder / "whole")
    make_project(folder / "two", ("core-alpha", "core-beta"))
    for name in ("whole", "two"):
        applied = folder / f"{name}-applied"
        shutil.copytree(folder / name, applied, symlinks=True)
        Lab(applied).ok("apply")
    return folder


@pytest.fixture
def fresh(_made, tmp_path) -> Lab:
    """A project nobody has applied yet: five patches; its archive is in the cache."""
    made = _copy(_made / "whole", tmp_path)
    made.fill_cache()
    return made


@pytest.fixture
def lab(_made, tmp_path) -> Lab:
    """The same project after an apply."""
    return _copy(_made / "whole-applied", tmp_path)


@pytest.fixture
def two(_made, tmp_path) -> Lab:
    """An applied project of two patches, where each git call counts."""
    return _copy(_made / "two-applied", tmp_path)


def _copy(source: Path, tmp_path: Path) -> Lab:
    folder = tmp_path / source.name
    shutil.copytree(source, folder, symlinks=True)
    return lab_module.Lab(folder)

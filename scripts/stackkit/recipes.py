"""Recipes: how to serve the model, as files that vLLM itself reads.

A recipe is a file for ``vllm serve --config``, in ``scripts/recipes/<release>``. The
environment is the same for all of them and stands in ``mi300x.env`` beside them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import USAGE, StackError
from .pins import Pin, Project

ENVIRONMENT = "mi300x.env"
DEFAULT = "tp8-ep"


@dataclass(frozen=True)
class Recipe:
    """One way to serve the model."""

    name: str
    path: Path
    about: str  # the first sentence of the file
    flags: dict[str, Any]
    environment: dict[str, str]

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        sizes = ("tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size")
        count = 1
        for size in sizes:
            count *= int(self.flags.get(size, 1))
        return count

    def command(self, checkpoint: str | None, *more: str) -> tuple[str, ...]:
        """What serves it; ``checkpoint`` and flags in ``more`` win over the file's."""
        model = (checkpoint,) if checkpoint else ()
        return ("vllm", "serve", *model, "--config", os.fspath(self.path), *more)

    def own_environment(self, caller: Mapping[str, str]) -> dict[str, str]:
        """What is to be set; what the caller has set itself stays."""
        return {k: v for k, v in self.environment.items() if k not in caller}


def folder(project: Project, pin: Pin) -> Path:
    return project.root / "scripts" / "recipes" / pin.release


def load(project: Project, pin: Pin) -> list[Recipe]:
    """Every recipe of a release.

    Raises:
        StackError: if it has none, or a file is not a mapping of flags.
    """
    place = folder(project, pin)
    files = sorted(place.glob("*.yaml"))
    if not files:
        raise StackError(
            f"{place}: there are no recipes for {pin.release}",
            mend="name another release with --release",
            code=USAGE,
        )
    environment = read_environment(place / ENVIRONMENT)
    return [_read(path, environment) for path in files]


def find(project: Project, pin: Pin, name: str) -> Recipe:
    """The recipe called ``name``.

    Raises:
        StackError: if there is none.
    """
    recipes = load(project, pin)
    for recipe in recipes:
        if recipe.name == name.removesuffix(".yaml"):
            return recipe
    raise StackError(
        f"there is no recipe {name!r} for {pin.release}",
        mend=f"one of: {', '.join(recipe.name for recipe in recipes)}",
        code=USAGE,
    )


def _read(path: Path, environment: dict[str, str]) -> Recipe:
    text = path.read_text("utf-8")
    try:
        flags = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise StackError(
            f"{path}: not valid YAML: {error}", mend=f"git checkout {path}", code=USAGE
        ) from error
    if not isinstance(flags, dict):
        raise StackError(
            f"{path}: is not a mapping of vLLM's flags",
            mend=f"git checkout {path}",
            code=USAGE,
        )
    head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    about = " ".join(line.strip("# ") for line in head).split(". ")[0]
    return Recipe(path.stem, path, about, flags, environment)


def read_environment(path: Path) -> dict[str, str]:
    """The variables of an env file.

    Raises:
        StackError: naming the line that is not ``NAME=value``.
    """
    found = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise StackError(
                f"{path}:{number}: {line!r} is not NAME=value",
                mend=f"git checkout {path}",
                code=USAGE,
            )
        found[name] = value
    return found

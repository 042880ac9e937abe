"""stack.toml: which vLLM releases are supported and exactly what each one is."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import USAGE, StackError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEX = {"tree": "40", "sha256": "64", "commit": "7,40"}
# What a pin says of a fact that is not known.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Toolchain:
    """What the release's ROCm image is built with."""

    rocm: str
    torch: str
    triton: str
    aiter: str
    base_image: str
    ruff: str


@dataclass(frozen=True)
class Sdist:
    """The release's source archive on a Python package index."""

    name: str
    sha256: str
    # What the build backend adds to the tagged tree.
    generated: tuple[str, ...]


@dataclass(frozen=True)
class Pin:
    """One vLLM release: the commit, its tree, and the archive that holds it.

    The commit is abbreviated, or :data:`UNKNOWN`, where only the archive is at hand;
    there is no archive of a tree that was never released.
    """

    release: str
    tag: str
    url: str
    commit: str
    tree: str
    sdist: Sdist | None
    toolchain: Toolchain

    def toml(self) -> str:
        """The pin as a table of stack.toml."""
        lines = [f"[release.{json.dumps(self.release)}]"]
        for key in ("tag", "url", "commit", "tree"):
            lines.append(f"{key} = {json.dumps(getattr(self, key))}")
        parts = {"sdist": self.sdist, "toolchain": self.toolchain}
        for name, part in parts.items():
            if part is not None:
                lines += ["", f"[release.{json.dumps(self.release)}.{name}]"]
                for key, value in vars(part).items():
                    text = list(value) if isinstance(value, tuple) else value
                    lines.append(f"{key} = {json.dumps(text)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Project:
    """A checkout of this repository and where its parts live."""

    root: Path
    default_release: str
    pins: dict[str, Pin] = field(repr=False)

    def pin(self, release: str | None) -> Pin:
        """The pin of ``release`` (``0.22.0`` or ``v0.22.0``), else the default."""
        wanted = release or self.default_release
        found = self.pins.get(wanted) or self.pins.get("v" + wanted)
        if found is None:
            raise StackError(
                f"stack.toml has no release {wanted!r}",
                mend=f"choose one of: {', '.join(self.pins)}",
                code=USAGE,
            )
        return found

    @property
    def build(self) -> Path:
        return self.root / "build"

    def tree(self, pin: Pin) -> Path:
        """The applied tree: build/<release>, a git repository."""
        return self.build / pin.release

    def patches(self, pin: Pin) -> Path:
        return self.root / "patches" / pin.release

    @property
    def submodule(self) -> Path:
        return self.root / "vllm"

    @property
    def cache(self) -> Path:
        """Archives and check results; safe to delete at any time."""
        named = Path(os.environ.get("XDG_CACHE_HOME") or "")
        try:
            home = named if named.is_absolute() else Path.home() / ".cache"
        except RuntimeError as error:  # a user without a name and without HOME
            raise StackError(
                "there is no home directory to keep the cache in",
                mend="set XDG_CACHE_HOME to the absolute path of a folder",
            ) from error
        return home / "vllm-mi300x"


def find_project(start: Path) -> Project:
    """The project that ``start`` lies in.

    Raises:
        StackError: if no directory from ``start`` up holds a stack.toml.
    """
    start = start.absolute()
    for folder in (start, *start.parents):
        if (folder / "stack.toml").is_file():
            return load(folder)
    raise StackError(
        f"no stack.toml in {start} or above it",
        mend="run this inside a vllm-mi300x checkout, or name one with -C DIR",
        code=USAGE,
    )


def load(root: Path) -> Project:
    """Read and check stack.toml.

    Raises:
        StackError: naming the key that is missing, unknown or malformed.
    """
    path = root / "stack.toml"
    return parse(root, path, path.read_bytes())


def parse(root: Path, path: Path, content: bytes) -> Project:
    """The project at ``root`` as ``content`` describes it; errors name ``path``.

    Raises:
        StackError: naming the key that is missing, unknown or malformed.
    """
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StackError(
            f"{path}: not valid TOML: {error}",
            mend=f"git -C {root} diff stack.toml",
            code=USAGE,
        ) from error
    table = _Table(path, "", data)
    default = table.text("default")
    releases = table.table("release")
    pins = {name: _pin(name, releases.table(name)) for name in releases.keys()}
    table.done()
    if default not in pins:
        raise table.error(f"default is {default!r}, which has no [release] table")
    return Project(root, default, pins)


def _pin(release: str, table: _Table) -> Pin:
    sdist = table.table("sdist") if "sdist" in table.data else None
    toolchain = table.table("toolchain")
    pin = Pin(
        release=release,
        tag=table.text("tag"),
        url=table.text("url"),
        commit=table.text("commit"),
        tree=table.text("tree"),
        sdist=Sdist(
            name=sdist.text("name"),
            sha256=sdist.text("sha256"),
            generated=sdist.texts("generated"),
        )
        if sdist
        else None,
        toolchain=Toolchain(
            **{key: toolchain.text(key) for key in Toolchain.__dataclass_fields__}
        ),
    )
    for part in filter(None, (sdist, toolchain, table)):
        part.done()
    if pin.tag != release:
        raise table.error(f"tag is {pin.tag!r}, not the release's name {release!r}")
    return pin


class _Table:
    """One TOML table; every key must be asked for, and none may be left over."""

    def __init__(self, path: Path, name: str, data: Mapping[str, Any]):
        self.path, self.name, self.data = path, name, data
        self.left = set(data)

    def error(self, what: str) -> StackError:
        where = f"{self.path}: [{self.name}] " if self.name else f"{self.path}: "
        return StackError(
            where + what,
            mend="git diff stack.toml shows what was changed; git checkout stack.toml "
            "takes it back",
            code=USAGE,
        )

    def keys(self) -> tuple[str, ...]:
        return tuple(self.data)

    def _take(self, key: str, kind: type) -> Any:
        if key not in self.data:
            raise self.error(f"lacks the key {key!r}")
        value = self.data[key]
        self.left.discard(key)
        if not isinstance(value, kind):
            raise self.error(f"{key} must be a {kind.__name__}, not {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self._take(key, str)
        width = _HEX.get(key)
        if key == "commit" and value == UNKNOWN:
            return value
        if width and not re.fullmatch(f"[0-9a-f]{{{width}}}", value):
            count = width.replace(",", " to ")
            raise self.error(f"{key} must be {count} hexadecimal digits, not {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._take(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.error(f"{key} must be a list of strings")
        return tuple(values)

    def table(self, key: str) -> _Table:
        name = f"{self.name}.{key}" if self.name else key
        return _Table(self.path, name, self._take(key, dict))

    def done(self) -> None:
        if self.left:
            raise self.error(f"has unknown keys: {', '.join(sorted(self.left))}")

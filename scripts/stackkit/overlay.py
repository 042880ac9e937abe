"""A Python-only overlay: some of the patches on a published image, without a build.

Which patches can be in it follows from the patches themselves: one that changes what
is compiled cannot, and neither can one that depends on it.  A concern is whole or
absent, because a cache that one patch writes and another reads in the new dialect is
worse than one that both leave alone.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import apply, git, trailers, worktree
from .errors import StackError
from .patchfile import Patch
from .report import Step

MANIFEST = "MANIFEST.json"
PACKAGE = "vllm/"
# Neither compiled nor part of the package.
_ASIDE = ("tests/", "docs/", "benchmarks/", "examples/")
_SCHEMA = 1


@dataclass(frozen=True)
class Overlay:
    """A part of the stack as files of the installed package."""

    patches: tuple[Patch, ...]
    left_out: dict[str, str]  # name of a patch, and why
    tree: str
    # Content before and after, None where there is no file.
    files: dict[str, tuple[bytes | None, bytes | None]]


def compiled(patch: Patch) -> list[str]:
    """What a patch changes that only a build brings into an installation."""
    paths = [change.path for change in patch.files]
    return [path for path in paths if not path.startswith((PACKAGE, *_ASIDE))]


def left_out(patches: list[Patch]) -> dict[str, str]:
    """The patches that cannot be in an overlay, and why."""
    why = {}
    for patch in patches:
        paths = compiled(patch)
        if paths:
            why[patch.name] = f"changes {', '.join(paths)}, which takes a build"
    while True:
        more = _follow(patches, why)
        if not more:
            return why
        why |= more


def _follow(patches: list[Patch], why: dict[str, str]) -> dict[str, str]:
    """What cannot be in it because of those that cannot."""
    broken = {p.trailer("Concern"): p.name for p in reversed(patches) if p.name in why}
    more = {}
    for patch in patches:
        if patch.name in why:
            continue
        needed = [x for x in trailers.depends_on(patch.trailers) if x in why]
        concern = patch.trailer("Concern")
        if needed:
            more[patch.name] = f"depends on {', '.join(needed)}"
        elif concern in broken:
            more[patch.name] = f"is half of {concern}, as {broken[concern]} is left out"
    return more


def choose(patches: list[Patch], names: tuple[str, ...]) -> list[Patch]:
    """The patches of an overlay: those named, or all that can be in one.

    Raises:
        StackError: if one that is named cannot be in it, or one is missing without
            which the others are half of something.
    """
    why = left_out(patches)
    if not names:
        return [patch for patch in patches if patch.name not in why]
    wanted = {name.removesuffix(".patch") for name in names}
    unknown = wanted - {patch.name for patch in patches}
    if unknown:
        raise StackError(
            f"no patch {', '.join(sorted(unknown))} in the series",
            mend="scripts/stack status lists them",
        )
    cannot = [f"{name}: {why[name]}" for name in why if name in wanted]
    if cannot:
        raise StackError(
            f"{len(cannot)} patches cannot be laid over an installed vLLM",
            mend="scripts/stack build makes a wheel with all patches",
            details=tuple(cannot),
        )
    missing = []
    concerns = {p.trailer("Concern") for p in patches if p.name in wanted}
    for patch in patches:
        if patch.name in wanted:
            for needed in trailers.depends_on(patch.trailers):
                if needed not in wanted:
                    missing.append(f"{needed}: {patch.name} depends on it")
        elif patch.trailer("Concern") in concerns:
            missing.append(f"{patch.name}: is half of {patch.trailer('Concern')}")
    if missing:
        raise StackError(
            "the overlay would be half of something",
            mend="name these, too, or none, for all that can be in an overlay",
            details=tuple(dict.fromkeys(missing)),
        )
    return [patch for patch in patches if patch.name in wanted]


def make(
    tree: worktree.Tree,
    commits: list[apply.Applied],
    names: tuple[str, ...],
    step: Step,
) -> Overlay:
    """Put the chosen patches on the base, as objects, and read what they change.

    Raises:
        StackError: as :func:`choose`; or if they do not merge without the others.
    """
    repository = tree.repository
    everything = [applied.patch for applied in commits]
    chosen = {patch.name for patch in choose(everything, names)}
    tip = repository.resolve(worktree.BASE)
    if tip is None:
        tip = repository.commit(commits[0].commit).parents[0]
    tip = apply.chosen_tip(
        repository,
        commits,
        chosen,
        tip,
        step,
        why="conflicts without the patches that are left out",
        mend="leave it out, too, or declare it with Depends-On",
    )
    tree_id = repository.commit(tip).tree
    files = {
        path: (_content(repository, old), _content(repository, new))
        for path, (old, new) in repository.changed(tree.pin.tree, tree_id).items()
        if path.startswith(PACKAGE)
    }
    kept = tuple(patch for patch in everything if patch.name in chosen)
    why = left_out(everything)
    out = {p.name: why.get(p.name, "not named") for p in everything if p not in kept}
    return Overlay(kept, out, tree_id, files)


def _content(repository: git.Repository, entry: git.Entry) -> bytes | None:
    return None if entry.blob == git.NO_BLOB else repository.read(entry.blob)


def manifest(overlay: Overlay, version: str, tag: str, commit: str) -> dict[str, Any]:
    """What the installer checks the image against, and leaves in it."""
    return {
        "schema": _SCHEMA,
        "version": version,
        "vllm": {"tag": tag, "commit": commit},
        "tree": overlay.tree,
        "patches": [
            {"name": patch.name, "sha256": patch.sha256} for patch in overlay.patches
        ],
        "left_out": overlay.left_out,
        "files": {
            path: {"before": _hash(old), "after": _hash(new)}
            for path, (old, new) in sorted(overlay.files.items())
        },
    }


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def write(overlay: Overlay, told: dict[str, Any], path: Path) -> None:
    """Write it as an archive: the same bytes on every machine."""
    members = {MANIFEST: json.dumps(told, indent=1).encode() + b"\n"}
    members |= {
        name: new for name, (_, new) in overlay.files.items() if new is not None
    }
    write_tar(members.items(), path)


def write_tar(members: Iterable[tuple[str, bytes]], path: Path) -> None:
    """A compressed archive whose bytes depend on names and contents alone."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted(members):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    path.write_bytes(compress(plain.getvalue()))


def compress(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)

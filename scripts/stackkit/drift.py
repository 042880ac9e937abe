"""How the stack would fare on another release; nothing of it is kept."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from . import apply, base, carry, patchfile, target
from .carry import CONFLICT, DROPPING, Outcome
from .errors import USAGE, StackError
from .pins import Pin, Project
from .report import Progress, Step
from .worktree import Tree, source_id


@dataclass(frozen=True)
class Drift:
    """The verdict of each patch on one target."""

    target: target.Target
    outcomes: tuple[Outcome, ...]

    def having(self, *verdicts: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.verdict in verdicts]


def drift(
    project: Project,
    pin: Pin,
    text: str,
    *,
    directory: Path,
    progress: Progress,
    step: Step,
) -> Drift:
    """Carry every patch to ``text``, leaving no trace but a downloaded archive.

    A patch that conflicts is settled for the patch (see ``git.Merging.settle``), so
    that the ones after it are judged by what they themselves change; those that build
    on it say so.

    Args:
        project, pin: The stack.
        text: See :func:`target.resolve`.
        directory: What a relative path is relative to.
        progress: Told of download progress.
        step: Told what is being done.

    Raises:
        StackError: if the stack does not apply, or the target cannot be had.
    """
    patches = patchfile.load(project.patches(pin))
    tree = Tree(project, pin)
    step(f"base {pin.tag}")
    with tree.rehearsal(None, progress):
        repository = tree.repository
        stack = apply.known_commits(tree, patches)
        step(text)
        found = target.resolve(repository, project, pin, text, directory, progress)
        with repository.merging() as merging:
            carrier = carry.Carrier(repository, merging, stack, pin.tree, found)
            outcomes = _carry(carrier, step)
    return Drift(found, tuple(outcomes))


def _carry(carrier: carry.Carrier, step: Step) -> list[Outcome]:
    repository = carrier.repository
    tip = base.commit(repository, carrier.target.pin)
    patches = [applied.patch for applied in carrier.stack]
    broken: dict[str, set[str]] = {}  # files of the conflicts so far, by patch
    outcomes = []
    for applied in carrier.stack:
        name = applied.patch.name
        step(name)
        outcome = carrier.judge(applied, tip)
        files = {change.path for change in applied.patch.files}
        needs = carry.needed(patches, name)
        rests_on = [
            other for other, paths in broken.items() if other in needs or paths & files
        ]
        outcomes.append(dataclasses.replace(outcome, rests_on=tuple(rests_on)))
        merged = outcome.tree
        if outcome.verdict == CONFLICT:
            broken[name] = {conflict.path for conflict in outcome.conflicts}
            merged = carrier.merging.settle(applied.commit, tip)
        if outcome.verdict not in DROPPING and merged is not None:
            tip = apply.moved_commit(repository, applied.commit, merged, tip)
    return outcomes


# -- the record in docs/drift.md ---------------------------------------------------

_MEANINGS = {
    carry.CLEAN: "every file is as the patch knew it; the same diff by construction",
    carry.MERGED: "merged three ways, and nothing speaks against it",
    carry.CONFLICT: "both sides changed the same lines",
    carry.EMPTY: "the merge leaves nothing of it",
    carry.ABSORBED: "an upstream commit makes the same change",
    carry.SUSPECT: "merged, but a person has to look first, for the reason given",
}
# What stands below this line is a person's, and stays.
BY_HAND = "<!-- by hand -->"


def page(project: Project) -> Path:
    return project.root / "docs" / "drift.md"


def recorded(project: Project) -> tuple[str, ...]:
    """The releases that docs/drift.md records.

    Raises:
        StackError: if there is no such page, or it records none.
    """
    path = page(project)
    text = path.read_text("utf-8") if path.is_file() else ""
    found = tuple(re.findall(r"^## (v\d\S*)$", text.split(BY_HAND)[0], re.MULTILINE))
    if not found:
        raise StackError(
            f"{path} records no release",
            mend="scripts/stack drift --to RELEASE [--update]",
            code=USAGE,
        )
    return found


def stack_id(project: Project, pin: Pin) -> str:
    """An id of the series and patch files, as the page names it."""
    patches = patchfile.load(project.patches(pin))
    return source_id(patches, apply.series_bytes(Tree(project, pin)))


def render(project: Project, pin: Pin, found: list[Drift]) -> str:
    """The page; what a person wrote below the generated part is kept."""
    path = page(project)
    text = path.read_text("utf-8") if path.is_file() else ""
    _, mark, by_hand = text.partition(BY_HAND)
    command = "scripts/stack drift --update " + " ".join(
        f"--to {one.target.release}" for one in found
    )
    lines = [
        "# Drift",
        "",
        f"How the stack on {pin.release} fares on other vLLM releases. Written by",
        "",
        f"    {command}",
        "",
        "`scripts/stack drift --check` says whether it is still so. Each patch is merged",
        "three ways, with the tree it was made on as the base of the merge. A patch that",
        "conflicts is settled for the patch, so that the ones after it are judged by what",
        "they change themselves; those that build on it say so. A verdict is about text:",
        "whether the new release still has the defect, `scripts/stack prove` tells after",
        "a rebase.",
        "",
        "| verdict | meaning |",
        "|---|---|",
        *(f"| {verdict} | {_MEANINGS[verdict]} |" for verdict in carry.VERDICTS),
        "",
        f"Stack {stack_id(project, pin)}, {len(found[0].outcomes)} patches:",
        "",
        "| patch | " + " | ".join(one.target.release for one in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    for row in zip(*(one.outcomes for one in found), strict=True):
        cells = [one.verdict + ("*" if one.rests_on else "") for one in row]
        lines.append(f"| {row[0].patch} | {' | '.join(cells)} |")
    lines += ["", "\\* builds on a patch that conflicts there.", ""]
    for one in found:
        lines += _section(one)
    generated = "\n".join(lines).rstrip("\n") + "\n"
    return generated + (f"\n{mark}{by_hand}" if mark else "")


def _section(one: Drift) -> list[str]:
    pin = one.target.pin
    counts = [f"{len(one.having(v))} {v}" for v in carry.VERDICTS if one.having(v)]
    lines = [
        f"## {one.target.release}",
        "",
        f"Tree {pin.tree}, "
        + ("as pinned" if one.target.pinned else f"not pinned: {one.target.proof}")
        + f". {', '.join(counts)}.",
        "",
    ]
    for outcome in one.having(*carry.STOPPING):
        builds = (
            f" (builds on {', '.join(outcome.rests_on)})" if outcome.rests_on else ""
        )
        lines.append(f"- **{outcome.patch}**: {outcome.verdict}{builds}")
        lines += [f"  - {_code(reason)}" for reason in outcome.reasons]
        for conflict in outcome.conflicts:
            places = dict.fromkeys(hunk.place or "top level" for hunk in conflict.hunks)
            where = (
                f", in {', '.join(f'`{place}`' for place in places)}" if places else ""
            )
            gone = dict.fromkeys(x for hunk in conflict.hunks for x in hunk.now_in)
            where += f"; now in {', '.join(f'`{x}`' for x in gone)}" if gone else ""
            lines.append(f"  - `{conflict.path}`: {conflict.kind}{where}")
    return [*lines, ""]


def _code(reason: str) -> str:
    path, mark, rest = reason.partition(": ")
    return f"`{path}`: {rest}" if mark and "/" in path and " " not in path else reason


def write(project: Project, pin: Pin, found: list[Drift]) -> Path:
    path = page(project)
    text = render(project, pin, found)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)
    return path

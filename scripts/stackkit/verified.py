"""What was shown where: a table of the patches' own trailers."""

from __future__ import annotations

from pathlib import Path

from .errors import StackError
from .patchfile import Patch
from .pins import Project
from .trailers import VERIFIED_ON

BEGIN, END = "<!-- made by: scripts/stack verified --update -->", "<!-- end -->"


def page(project: Project) -> Path:
    return project.root / "docs" / "verification.md"


def layers(patch: Patch) -> list[str]:
    """Where a patch was shown, of :data:`trailers.VERIFIED_ON`."""
    return [part.strip() for part in patch.trailer("Verified-On").split(",")]


def table(patches: list[Patch]) -> str:
    """One row for each patch, in Markdown."""
    lines = [
        f"| patch | {' | '.join(VERIFIED_ON)} | not run by anybody |",
        f"|---|{'---|' * len(VERIFIED_ON)}---|",
    ]
    for patch in patches:
        marks = ["yes" if x in layers(patch) else "" for x in VERIFIED_ON]
        link = f"[`{patch.name}`](concerns/{patch.trailer('Concern')}.md)"
        unverified = patch.trailer("Unverified").replace("|", "\\|")
        lines.append(f"| {link} | {' | '.join(marks)} | {unverified} |")
    return "\n".join(lines) + "\n"


def renewed(text: str, patches: list[Patch]) -> str:
    """The page with the table of now.

    Raises:
        StackError: if it has no place for the table.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise StackError(
            "docs/verification.md has no place for the table",
            mend=f"put {BEGIN!r} and {END!r} in it",
        )
    return f"{head}{BEGIN}\n{table(patches)}{END}{tail}"

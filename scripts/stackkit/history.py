"""Upstream's own commits between two releases, where a clone has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import git


@dataclass(frozen=True)
class Change:
    """One upstream commit."""

    id: str
    subject: str

    @property
    def pull_requests(self) -> tuple[int, ...]:
        """The pull requests that the subject names; its own, from a squash, is last."""
        return tuple(int(number) for number in re.findall(r"#(\d+)", self.subject))

    def __str__(self) -> str:
        return f"{self.id[:12]} {self.subject}"


@dataclass(frozen=True)
class History:
    """The commits after ``old`` up to ``new``."""

    repository: git.Repository
    old: str
    new: str

    @property
    def _range(self) -> str:
        return f"{self.old}..{self.new}"

    def changes(self, *paths: str) -> list[Change]:
        """Commits (that touch one of ``paths``), newest first."""
        return [Change(*x) for x in self.repository.log(self._range, paths=paths)]

    def naming(self, pull_request: int) -> list[Change]:
        """Commits whose subject names a pull request."""
        return [x for x in self.changes() if pull_request in x.pull_requests]

    def has(self, commit: str) -> bool:
        return any(change.id == commit for change in self.changes())

    def touching(self, path: str, first: int, last: int) -> list[Change]:
        """Commits that touched lines of a file of ``new``, newest first."""
        found = self.repository.lines_log(path, first, last, self._range)
        return [Change(*x) for x in found]

    def patch_ids(
        self, paths: Iterable[str], reverse: bool = False
    ) -> dict[str, Change]:
        """Commits that touch one of ``paths``, by what they change (patch id).

        Args:
            paths: Files.
            reverse: By what they undo.
        """
        # -R swaps the prefixes, too, which a patch id knows.
        options = ("-R", "--src-prefix=b/", "--dst-prefix=a/") if reverse else ()
        ids = self.repository.patch_ids(*options, self._range, paths=paths)
        subjects = dict(self.repository.log(self._range, paths=paths))
        return {key: Change(commit, subjects[commit]) for key, commit in ids.items()}


def between(repository: git.Repository, old: str, new: str) -> History | None:
    """The history of ``new`` since ``old``, if the repository has both in one line."""
    before = repository.resolve(old + "^{commit}")
    after = repository.resolve(new + "^{commit}")
    if before is None or after is None:
        return None
    if repository.start("merge-base", before, after).returncode:
        return None
    return History(repository, before, after)

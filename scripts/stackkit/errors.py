"""Errors are a sentence that says what is wrong, where, and what mends it."""

from __future__ import annotations

FOUND_PROBLEMS = 1
USAGE = 2
CONFLICT = 3
REFUSED = 4


class StackError(Exception):
    """A failure that a user can act on.

    Args:
        message: What is wrong, naming the file, patch or line.
        mend: The command or action that mends it; empty if the message says it.
        code: The exit code (1 found problems, 2 usage, 3 conflict, 4 refused to
            protect work).
        details: One line per item concerned (files, commits), shown below.
    """

    def __init__(
        self,
        message: str,
        *,
        mend: str = "",
        code: int = FOUND_PROBLEMS,
        details: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.message = message
        self.mend = mend
        self.code = code
        self.details = details

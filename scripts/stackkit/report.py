"""How long work tells what it is doing; only the command layer prints it."""

from collections.abc import Callable

# Told of bytes done and bytes in all (0 if unknown).
Progress = Callable[[int, int], None]

# Told, in a few words, what is being done now.
Step = Callable[[str], None]

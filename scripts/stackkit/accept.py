"""accept: whether a server answers as well as the model can.

Two questions, because neither sees what the other does.  Below 2048 tokens every
compressed key is selected whatever its score, so GSM8K cannot see a wrong indexer;
needles in long texts do.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

from . import prompts
from .base import hash_file
from .client import Completion, Model, Server
from .errors import USAGE, StackError
from .report import Step

# A score below FAIL ends with an error, one below EXPECTED with a warning. Public
# runs of this model, 5 and 8 shots, gave 0.94 to 0.955.
EXPECTED, FAIL = 0.93, 0.92
SHOTS = 5
# Reasoning is short here: it is as long as that of the examples.
ANSWER_TOKENS = 512

LENGTHS = (2048, 6144, 10240, 102400)
DEPTHS = (0.1, 0.5, 0.9)
_NEEDLE_TOKENS = 24
_QUESTION = "\n\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"  # noqa: E501
_NAMES = ("Lisbon", "Nairobi", "Quito", "Hanoi", "Oslo", "Perth", "Dakar", "Turin",
          "Lima", "Kyoto", "Riga", "Accra")  # fmt: skip


# -- GSM8K -----------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A question of GSM8K, its worked answer, and the number that it ends with."""

    question: str
    answer: str
    number: str


@dataclass(frozen=True)
class Score:
    """How many answers were right."""

    right: int
    asked: int
    in_file: int
    cut: int  # answers that ran into the limit of tokens
    wrong: tuple[str, ...]  # the first of them, one line each
    sha256: str

    @property
    def value(self) -> float:
        return self.right / self.asked

    @property
    def error(self) -> float:
        """One standard error of the score."""
        return math.sqrt(self.value * (1 - self.value) / self.asked)

    @property
    def ok(self) -> bool:
        return self.value >= FAIL


def read_problems(path: Path) -> list[Problem]:
    """GSM8K as its authors publish it: a JSON object on each line, with ``question``
    and ``answer``; the answer ends with ``####`` and a number.

    Raises:
        StackError: naming the line that is not that.
    """
    found = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise StackError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}",
            mend="docs/serving.md says where GSM8K's test.jsonl comes from; nothing is "
            "downloaded",
            code=USAGE,
        ) from error
    except UnicodeDecodeError as error:
        raise StackError(f"{path}: is not UTF-8 text", code=USAGE) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            question, answer = told["question"], told["answer"]
            wanted = _strict(answer)
        except (ValueError, KeyError, TypeError):
            wanted = None
        if wanted is None:
            raise StackError(
                f"{path}:{number}: is not a JSON object with a question, and an answer "
                "that ends with #### and a number",
                mend="take GSM8K's own test.jsonl",
                code=USAGE,
            )
        found.append(Problem(question, answer, wanted))
    return found


def _strict(text: str) -> str | None:
    """The number behind ####, as 1234 or -3.5."""
    found = re.search(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return _plain(found[1]) if found else None


def _plain(number: str) -> str:
    number = number.replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    digits = number.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits


def gsm8k(
    server: Server,
    model: Model,
    path: Path,
    *,
    shots: Path | None,
    limit: int | None,
    jobs: int,
    step: Step,
) -> Score:
    """Ask the questions of a file; an answer counts if its number is exactly right.

    Args:
        server, model: Whom.
        path: The questions.
        shots: A file whose first questions are shown with their answers; if None,
            those of ``path`` are, and are not asked.
        limit: How many to ask at most.
        jobs: How many at once.
        step: Told how far it is.

    Raises:
        StackError: if a file is not one, or the server fails to answer.
    """
    problems = read_problems(path)
    in_file = len(problems)
    examples = read_problems(shots) if shots else problems
    if len(examples) < SHOTS:
        raise StackError(
            f"{shots or path}: {len(examples)} questions, {SHOTS} are shown as examples",
            code=USAGE,
        )
    asked = problems if shots else problems[SHOTS:]
    asked = asked[:limit]
    if not asked:
        raise StackError(f"{path}: no question is left to ask", code=USAGE)
    head = "".join(
        f"Question: {x.question}\nAnswer: {x.answer}\n\n" for x in examples[:SHOTS]
    )

    def ask(problem: Problem) -> Completion:
        prompt = f"{head}Question: {problem.question}\nAnswer:"
        return server.complete(
            model.name, prompt, ANSWER_TOKENS, stop=("Question:", "\n\n\n")
        )

    right, cut, wrong = 0, 0, []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(ask, problem) for problem in asked]
        try:
            for number, future in enumerate(futures):
                found, problem = future.result(), asked[number]
                got = _strict(found.text)
                right += got == problem.number
                cut += found.finish == "length"
                if got != problem.number:
                    wrong.append(
                        f"{problem.question[:60]!r}: {got or 'no number'}, not "
                        f"{problem.number}"
                    )
                step(f"GSM8K: {number + 1} of {len(asked)}, {right} right")
        finally:
            for future in futures:
                future.cancel()
    return Score(right, len(asked), in_file, cut, tuple(wrong[:5]), hash_file(path))


# -- needles ---------------------------------------------------------------------


@dataclass(frozen=True)
class Needle:
    """One number hidden in a text, and whether it was found."""

    length: int  # tokens that were aimed at
    tokens: int | None  # as the server counted them
    depth: float
    wanted: str
    found: str  # what the server said

    @property
    def ok(self) -> bool:
        numbers = re.findall(r"\d+", self.found)
        return bool(numbers) and numbers[0] == self.wanted


def haystack(seed: int, words: int, depth: float) -> tuple[str, str, str]:
    """A text with a needle in it.

    Args:
        seed: Chooses everything.
        words: About how many.
        depth: Where the needle is, as a part of the text.

    Returns:
        The text with its question, the name asked for, and the number.
    """
    random_ = random.Random(f"needle {seed}")
    name, decoy = random_.sample(_NAMES, 2)
    wanted, other = (str(random_.randrange(10**6, 10**7)) for _ in range(2))
    source, before, after, count = prompts.sentences(seed), [], [], 0
    while count < words:
        sentence = source()
        (before if count < depth * words else after).append(sentence)
        count += sentence.count(" ") + 1
    needle = f"The secret number of {name} is {wanted}."
    # A second number of the same form, so that it takes the right key and not any.
    after.insert(len(after) // 2, f"The secret number of {decoy} is {other}.")
    body = " ".join([*before, needle, *after])
    return body + _QUESTION.format(name=name), name, wanted


def needles(
    server: Server,
    model: Model,
    *,
    lengths: tuple[int, ...],
    seed: int,
    step: Step,
) -> list[Needle]:
    """Hide numbers at several depths of texts of several lengths, and ask for them.

    Args:
        server, model: Whom.
        lengths: In tokens.
        seed: Chooses texts and numbers.
        step: Told which.

    Raises:
        StackError: if the server takes fewer tokens, or fails to answer.
    """
    longest = max(lengths) + _NEEDLE_TOKENS
    if model.max_len is not None and model.max_len < longest:
        raise StackError(
            f"the server takes {model.max_len} tokens, the longest needle needs "
            f"{longest}",
            mend="serve with a larger --max-model-len, or choose with --lengths",
            code=USAGE,
        )
    found = []
    for length in lengths:
        for number, depth in enumerate(DEPTHS):
            step(f"needle in {length} tokens, at {depth:.0%}")
            text, wanted, count = _sized(server, model, seed + number, length, depth)
            said = server.complete(model.name, text, _NEEDLE_TOKENS, stop=("\n",))
            tokens = said.prompt_tokens or count
            found.append(Needle(length, tokens, depth, wanted, said.text.strip()))
    return found


def _sized(
    server: Server, model: Model, seed: int, length: int, depth: float
) -> tuple[str, str, int | None]:
    """A text of at most ``length`` tokens, and not much fewer; the number; its tokens.

    If the server does not count tokens, a word is taken for 1.3 of them.
    """
    words = int(length / 1.3)
    for _ in range(8):
        text, _, wanted = haystack(seed, words, depth)
        numbers = server.tokenize(model.name, text)
        if numbers is None:
            return text, wanted, None
        count = len(numbers)
        if 0.98 * length <= count <= length:
            break
        words = max(1, int(words * 0.99 * length / count))
    return text, wanted, count

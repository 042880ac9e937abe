"""bench: the throughput of a server whose answers are right, by a fixed protocol.

The measuring is vLLM's own, ``vllm bench serve``.  What is added: the protocol, the
repetitions with a spread, and that a server which failed smoke, before or after, gets
no figure.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import process, serving
from .client import Model
from .errors import StackError
from .report import Step

REPEATS = 3
CONCURRENCY = 1024
LENGTH = 512  # tokens in, and tokens out
PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "itl", "e2el")
_RESULT = "result.json"


@dataclass(frozen=True)
class Protocol:
    """What is measured, and how."""

    concurrency: int = CONCURRENCY
    input_length: int = LENGTH
    output_length: int = LENGTH
    repeats: int = REPEATS

    @property
    def prompts(self) -> int:
        return 10 * self.concurrency

    @property
    def warmups(self) -> int:
        return 2 * self.concurrency


@dataclass(frozen=True)
class Run:
    """One repetition: tokens per second, and milliseconds by name and percentile."""

    seed: int
    throughput: float
    seconds: float
    times: dict[str, float]


@dataclass(frozen=True)
class Result:
    """All repetitions."""

    runs: tuple[Run, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(run.throughput for run in self.runs)

    @property
    def spread(self) -> float:
        """The largest distance from the mean, as a part of it."""
        return max(abs(run.throughput - self.mean) for run in self.runs) / self.mean

    def time(self, name: str) -> float:
        """The mean of one time over the repetitions."""
        return statistics.mean(run.times[name] for run in self.runs)


def command(
    protocol: Protocol,
    url: str,
    model: str,
    *,
    tokenizer: str | None,
    seed: int,
    folder: Path,
) -> tuple[str, ...]:
    """One repetition.

    Each has a seed of its own: the prompts of the same seed would be found in the
    prefix cache the second time.
    """
    flags: dict[str, Any] = {
        "backend": "vllm",
        "base-url": url,
        "model": model,
        "tokenizer": tokenizer or model,
        "tokenizer-mode": "deepseek_v4",
        "dataset-name": "random",
        "random-input-len": protocol.input_length,
        "random-output-len": protocol.output_length,
        "random-range-ratio": 0,
        "num-prompts": protocol.prompts,
        "max-concurrency": protocol.concurrency,
        "num-warmups": protocol.warmups,
        "request-rate": "inf",
        "percentile-metrics": ",".join(TIMES),
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        "seed": seed,
        "result-dir": folder,
        "result-filename": _RESULT,
    }
    pairs = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    switches = ("--ignore-eos", "--trust-remote-code", "--save-result")
    return ("vllm", "bench", "serve", *pairs, *switches)


def bench(
    protocol: Protocol,
    url: str,
    model: Model,
    *,
    tokenizer: str | None,
    smoke: Callable[[str], None],
    step: Step,
) -> Result:
    """Measure a server.

    Args:
        protocol: How.
        url, model: The server.
        tokenizer: Where the model's tokenizer is, if the server's name for the model
            does not say so.
        smoke: Raises if the server's answers cannot be right; called with the words
            ``before`` and ``after``.
        step: Told what is being done.

    Raises:
        StackError: if vLLM is not installed, a request failed, an answer was cut
            short, or the server fails smoke. There is no figure then.
    """
    serving.program()
    smoke("before")
    runs = []
    for seed in range(protocol.repeats):
        step(f"repetition {seed + 1} of {protocol.repeats}")
        with tempfile.TemporaryDirectory(prefix="stack-bench-") as folder:
            line = command(
                protocol, url, model.name,
                tokenizer=tokenizer, seed=seed, folder=Path(folder),
            )  # fmt: skip
            done = process.run([serving.program(), *line[1:]])
            if done.returncode:
                raise StackError(
                    f"vllm bench serve ended with {done.returncode}",
                    mend=" ".join(line),
                    details=process.tail(done.stderr or done.stdout, 5),
                )
            runs.append(_read(Path(folder) / _RESULT, protocol, seed))
    smoke("after")
    return Result(tuple(runs))


def _read(path: Path, protocol: Protocol, seed: int) -> Run:
    """The figures of one repetition.

    Raises:
        StackError: if they are not those of a whole run.
    """
    try:
        told = json.loads(path.read_text("utf-8"))
        completed, failed = int(told["completed"]), int(told.get("failed", 0))
        tokens = int(told["total_output_tokens"])
        throughput = float(told["output_throughput"])
        times = {
            f"p{p}_{name}_ms": float(told[f"p{p}_{name}_ms"])
            for name in TIMES
            for p in PERCENTILES
        }
        seconds = float(told["duration"])
    except FileNotFoundError as error:
        raise StackError("vllm bench serve wrote no result") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise StackError(
            f"the result of vllm bench serve lacks or has a damaged {error}",
            mend="is it another release's vllm? scripts/stack status names ours",
        ) from error
    if completed != protocol.prompts or failed:
        raise StackError(
            f"{protocol.prompts - completed} of {protocol.prompts} requests failed; "
            "there is no figure",
            mend="look at the server's log",
        )
    wanted = protocol.prompts * protocol.output_length
    if tokens != wanted:
        raise StackError(
            f"{tokens} of {wanted} tokens came: answers were cut short; there is no "
            "figure",
            mend="look at the server's log",
        )
    if not math.isfinite(throughput) or throughput <= 0:
        raise StackError(f"the throughput is {throughput}; there is no figure")
    for name, value in times.items():
        if not math.isfinite(value) or value < 0:
            raise StackError(f"{name} is {value}; there is no figure")
    return Run(seed, throughput, seconds, times)

"""A small OpenAI-compatible server that behaves, or misbehaves on demand.

It is also a stand-in for the ``vllm`` program: ``vllm serve`` starts it, and ``vllm
bench serve`` measures nothing and writes the result it is told to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODEL = "deepseek-ai/DeepSeek-V4-Flash"
WORDS = ("river", "stone", "lamp", "cloud", "paper", "glass", "horse", "wheat")
KNOWN = {"17 + 25": "42", "17 * 23": "391", "capital of France": "Paris"}

# Answers that no server should send, and what each does to a good one.
MALFORMED = {
    "text-number": lambda choice: choice.update(text=42),
    "logprobs-list": lambda choice: choice.update(logprobs=[1]),
    "logprobs-number": lambda choice: choice["logprobs"].update(token_logprobs=3),
    "huge": lambda choice: choice["logprobs"]["token_logprobs"].append(10**400),
    "top-text": lambda choice: choice["logprobs"].update(top_logprobs=["x"]),
    "top-nan": lambda choice: choice["logprobs"]["top_logprobs"][3].update(
        {" OTHER": float("nan")}
    ),
}

FAULTS = (
    "unhealthy", "nan", "infinite", "clamped", "null", "certain", "one-token",
    "same-logprob", "no-logprobs", "short", "500", "500-once", "html", "array",
    "hang", "cut-body", "dropped-stream", "no-done", "stream-error", "wrong-answer",
    "wrong-needle", "decoy-needle", "no-tokenize", "no-version", "other-version",
    "no-models", "two-models", "dies", "late-nan", "batch-nan", "small", "key",
    "other-tokens", "tie", "wrong-math", "long-nan", "stream-short",
    "stream-one-token", "stream-nan", "stream-null", "endless-stream", "drip",
    "truncates", "few-tokens", "no-tokens", "bare-models", "deep", "steers",
    "slow-first", "redirect", *MALFORMED,
)  # fmt: skip


class Behavior:
    """What a server does; ``faults`` are some of :data:`FAULTS`."""

    def __init__(self, *faults: str, version: str = "1.2.0", model: str = MODEL):
        assert set(faults) <= set(FAULTS), faults
        self.faults = set(faults)
        self.version, self.model = version, model
        self.completions = 0
        self.running = 0
        self.dead = False
        self.paths: list[str] = []
        self.lock = threading.Lock()

    def has(self, fault: str) -> bool:
        return fault in self.faults


def tokens_of(text: str) -> list[int]:
    """A token for each word or sign."""
    parts = re.findall(r"\w+|[^\w\s]", text)
    return [int(hashlib.sha256(p.encode()).hexdigest()[:4], 16) for p in parts]


def continuation(prompt: object, count: int, behavior: Behavior) -> list[str]:
    """The words that a healthy server says to a prompt."""
    if isinstance(prompt, str):
        for question, answer in KNOWN.items():
            if f"{question} =" in prompt or f"{question} is" in prompt:
                return [" seven" if behavior.has("wrong-answer") else f" {answer}"]
        asked = re.search(r"secret number of (\w+)\?", prompt)
        if asked:
            return [f" {_needle(prompt, asked[1], behavior)}", "."]
        if prompt.endswith("Answer:") and "####" in prompt:
            return _math(prompt, behavior)
    seed = hashlib.sha256(repr(prompt).encode()).digest()
    return [f" {WORDS[seed[i % 32] % len(WORDS)]}" for i in range(count)]


def _needle(prompt: str, name: str, behavior: Behavior) -> str:
    found = dict(re.findall(r"secret number of (\w+) is (\d+)", prompt))
    if behavior.has("decoy-needle"):
        return next(v for k, v in found.items() if k != name)
    if behavior.has("wrong-needle") and len(prompt) > 20000:
        return "1234567"
    return found[name]


def _math(prompt: str, behavior: Behavior) -> list[str]:
    """Answers ``What is A plus B?``; one of four wrongly, if it should."""
    question = prompt.rsplit("Question:", 1)[1]
    a, b = map(int, re.findall(r"\d+", question)[:2])
    wrong = behavior.has("wrong-math") and a % 4 == 0
    return [f" It is {a} + {b}.\n#### {a + b + wrong:,}"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behavior: Behavior

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, told: object, kind: str = "application/json") -> None:
        content = told if isinstance(told, str) else json.dumps(told)
        data = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        length = len(data) + (50 if self.behavior.has("cut-body") else 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)
        if self.behavior.has("cut-body"):
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True

    def do_GET(self) -> None:
        is_ = self.behavior.has
        self.behavior.paths.append(self.path)
        if self.path == "/health":
            bad = is_("unhealthy") or self.behavior.dead
            self.send_response(503 if bad else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif is_("key") and self.headers.get("Authorization") != "Bearer secret":
            self.send(401, {"error": "Unauthorized"})
        elif self.path == "/version" and not is_("no-version"):
            other = "0.22.0+rocm722"
            version = other if is_("other-version") else self.behavior.version
            self.send(200, {"version": version})
        elif self.path == "/v1/models":
            names = [self.behavior.model, "other"][: 2 if is_("two-models") else 1]
            length = 4000 if is_("small") else 131072
            cards = [{"id": name, "max_model_len": length} for name in names]
            if is_("bare-models"):
                cards = names
            self.send(200, {"data": [] if is_("no-models") else cards})
        else:
            self.send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        self.behavior.paths.append(self.path)
        if self.path == "/tokenize" and not self.behavior.has("no-tokenize"):
            tokens = tokens_of(body["prompt"])
            if self.behavior.has("few-tokens") or self.behavior.has("no-tokens"):
                tokens = tokens[: self.behavior.has("few-tokens")]
            self.send(200, {"tokens": tokens, "count": len(tokens)})
        elif self.path == "/v1/completions":
            with self.behavior.lock:
                self.behavior.completions += 1
                self.behavior.running += 1
                number, running = self.behavior.completions, self.behavior.running
            try:
                self.complete(body, number, running)
            finally:
                with self.behavior.lock:
                    self.behavior.running -= 1
        else:
            self.send(404, {"detail": "Not Found"})

    def complete(self, body: dict, number: int, running: int) -> None:
        is_ = self.behavior.has
        if is_("dies") and number > 3:
            self.behavior.dead = True
            self.connection.close()
            self.close_connection = True
            return
        if is_("500") or is_("500-once") and number == 2:
            message = "EngineCore encountered an issue."
            self.send(500, {"error": {"message": message, "code": 500}})
            return
        if is_("html"):
            self.send(200, "<html>a proxy</html>", "text/html")
            return
        if is_("array"):
            self.send(200, [1])
            return
        if is_("deep"):
            self.send(200, "[" * 100_000)
            return
        if is_("steers"):
            self.send(500, {"error": "\x1b[2J\n[/red]gone"})
            return
        if is_("redirect"):
            self.send_response(307)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if is_("drip") or is_("endless-stream") and body.get("stream"):
            self.drip()
            return
        if is_("slow-first") and number <= 4:
            time.sleep(0.8)
        if is_("hang"):
            time.sleep(30)
            return
        prompt, count = body["prompt"], body["max_tokens"]
        if is_("batch-nan"):
            time.sleep(0.02)  # so that requests meet
        words = continuation(prompt, count, self.behavior)
        if is_("one-token"):
            words = [" the"] * len(words)
        if is_("short"):
            words = words[: len(words) // 2]
        if is_("other-tokens") or is_("tie"):
            words = [*words[:5], " OTHER", *words[6:]]
        choice = {
            "index": 0,
            "text": "".join(words),
            "finish_reason": "stop",
            "logprobs": None,
        }
        if is_("stream-short") and body.get("stream"):
            words = words[:4]
        size = len(prompt) if isinstance(prompt, list) else len(tokens_of(prompt))
        if body.get("logprobs") is not None and not is_("no-logprobs"):
            values = [-0.25 - i % 7 / 8 for i in range(len(words))]
            choice["logprobs"] = {
                "tokens": words,
                "token_logprobs": self.spoil(values, size, running),
                "top_logprobs": self.alternatives(prompt, count, words, values),
            }
        if body.get("stream"):
            self.stream(words, choice["logprobs"])
            return
        shape = MALFORMED.get(next(iter(self.behavior.faults), ""))
        if shape:
            shape(choice)
        if is_("truncates"):
            size = min(size, 2000)
        usage = {"prompt_tokens": size, "completion_tokens": len(words)}
        self.send(200, {"choices": [choice], "usage": usage})

    def drip(self) -> None:
        """One byte now and then, for ever: no read ever takes long."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100):
                self.wfile.write(b":\n")
                time.sleep(0.1)
        self.close_connection = True

    def spoil(self, values: list, size: int, running: int) -> list:
        is_ = self.behavior.has
        bad = {"nan": float("nan"), "infinite": float("-inf"), "clamped": -9999.0,
               "null": None, "certain": 0.5}  # fmt: skip
        for fault, value in bad.items():
            if is_(fault):
                return [*values[:-1], value]
        if is_("same-logprob"):
            return [-11.77] * len(values)
        if (
            is_("late-nan") and self.behavior.completions > 41  # a whole smoke
            or is_("long-nan") and size > 2048
            or is_("batch-nan") and running > 1
        ):  # fmt: skip
            return [float("nan")] * len(values)
        return values

    def alternatives(
        self, prompt: object, count: int, words: list, values: list
    ) -> list[dict]:
        """The word itself, and what the other kind of server says, near or far."""
        healthy = continuation(prompt, count, Behavior())
        gap = 0.05 if self.behavior.has("tie") else 2.0
        found = []
        for i, (word, value) in enumerate(zip(words, values, strict=True)):
            top = {word: value, " OTHER": value - gap}
            if i < len(healthy) and healthy[i] != word:
                top = {word: value, healthy[i]: value - gap}
            found.append(top)
        return found

    def stream(self, words: list[str], logprobs: dict | None) -> None:
        is_ = self.behavior.has
        if is_("stream-one-token"):
            words = [" the"] * len(words)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def chunk(text: str) -> None:
            data = f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        for number, word in enumerate(words):
            if is_("dropped-stream") and number == 3:
                self.connection.close()
                self.close_connection = True
                return
            if is_("stream-error") and number == 3:
                chunk(json.dumps({"error": {"message": "EngineDeadError"}}))
                break
            last = number == len(words) - 1
            reason = "length" if last else None
            told = {"index": 0, "text": word, "finish_reason": reason}
            if logprobs:
                told["logprobs"] = {
                    k: v[number : number + 1] for k, v in logprobs.items()
                }
                told["logprobs"]["tokens"] = [word]
            if is_("stream-nan") and last:
                told["logprobs"]["token_logprobs"] = [None]  # as pydantic writes NaN
            if is_("stream-null"):
                told = None
            chunk(json.dumps({"choices": [told]}))
        if not is_("no-done"):
            chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # all that are asked at once


@contextlib.contextmanager
def serving(behavior: Behavior, port: int = 0) -> Iterator[str]:
    """A server on a free port; gives its URL."""
    handler = type("Bound", (Handler,), {"behavior": behavior})
    with Server(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# -- as a program ----------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """``vllm serve`` and ``vllm bench serve``, as FAKE_VLLM says."""
    told = json.loads(os.environ["FAKE_VLLM"])
    with open(told["calls"], "a", encoding="utf-8") as stream:
        shown = {k: v for k, v in os.environ.items() if k.startswith("VLLM_")}
        stream.write(json.dumps({"arguments": arguments, "environment": shown}) + "\n")
    options = dict(zip(arguments, arguments[1:], strict=False))
    if arguments[:2] == ["bench", "serve"]:
        _bench(told["bench"], options)
        return
    assert arguments[0] == "serve", arguments
    for line in told.get("log", []):
        print(line, flush=True)
    if told.get("exit") is not None:
        print("RuntimeError: Engine core initialization failed.", file=sys.stderr)
        sys.exit(told["exit"])
    eager = "--enforce-eager" in arguments
    faults = told["eager_faults"] if eager else told["faults"]
    behavior = Behavior(*faults, version=told["version"])
    with serving(behavior, int(options["--port"])):
        while True:
            time.sleep(1)


def _bench(told: dict, options: dict[str, str]) -> None:
    if told.get("exit"):
        print("ValueError: Initial test run failed", file=sys.stderr)
        sys.exit(told["exit"])
    prompts = int(options["--num-prompts"])
    result = {
        "completed": prompts,
        "failed": 0,
        "duration": 12.5,
        "total_output_tokens": prompts * int(options["--random-output-len"]),
        "output_throughput": 1000.0 + 10 * int(options["--seed"]),
        **{f"p{p}_{name}_ms": float(p) for p in (50, 90, 99)
           for name in ("ttft", "tpot", "itl", "e2el")},
        **told.get("result", {}),
    }  # fmt: skip
    for key in told.get("without", []):
        del result[key]
    if not told.get("silent"):
        target = Path(options["--result-dir"]) / options["--result-filename"]
        target.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])

"""A client of an OpenAI-compatible server, whose errors are sentences."""

from __future__ import annotations

import json
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from .errors import USAGE, StackError
from .report import Step

API_KEY = "VLLM_API_KEY"  # vLLM's own name for it
_MEND = "look at the server's log, and start it again: scripts/stack serve"

Prompt = str | list[int]


class Silence(StackError):
    """The server does not answer any more: asking on would only take time."""


@dataclass(frozen=True)
class Model:
    """The model that a server serves."""

    name: str
    max_len: int | None  # tokens of prompt and answer together, if it tells


@dataclass(frozen=True)
class Completion:
    """One answer. What a server did not send is empty."""

    text: str
    finish: str | None
    tokens: tuple[str, ...]
    # As they came: a number that is not finite, or None, is the caller's to judge.
    logprobs: tuple[float | None, ...]
    top: tuple[dict[str, float], ...]
    prompt_tokens: int | None


class Server:
    """A server at ``url`` (without /v1).

    Args:
        url: Where it is.
        timeout: Seconds of silence after which a request is given up.
        first_timeout: The same for the first completion, which may compile kernels.
    """

    def __init__(self, url: str, *, timeout: float, first_timeout: float):
        self.url = _checked(url)
        self.timeout = timeout
        self._next_timeout = first_timeout
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A proxy is for other machines than the one that serves.
        self._http = httpx2.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            trust_env=False,
            # Shorter than the 5 s after which vLLM closes an idle connection.
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=2),
        )

    # -- what it is ----------------------------------------------------------

    def healthy(self) -> bool:
        """Whether /health says so; False if nobody listens."""
        try:
            return self._http.get("/health", timeout=10).status_code == 200
        except httpx2.HTTPError:
            return False

    def wait(
        self, seconds: float, step: Step, alive: Callable[[], None] | None = None
    ) -> None:
        """Wait until /health answers 200.

        Args:
            seconds: How long at most; 0 asks once.
            step: Told that we wait.
            alive: Raises if waiting has become pointless.

        Raises:
            StackError: if it does not in time.
        """
        end = time.monotonic() + seconds
        while not self.healthy():
            if alive:
                alive()
            if time.monotonic() >= end:
                raise StackError(
                    f"{self.url} is not there or not ready (asked /health for "
                    f"{seconds:.0f} s)",
                    mend="start a server: scripts/stack serve; a cold start takes "
                    "many minutes: --wait 1800",
                )
            step(f"waiting for {self.url}")
            time.sleep(min(1.0, max(0.05, seconds / 100)))

    def model(self, name: str | None = None) -> Model:
        """The model called ``name``, or the only one.

        Raises:
            StackError: if it serves another one, or several.
        """
        told = self._json("GET", "/v1/models")
        cards = told.get("data")
        if not isinstance(cards, list) or not cards:
            raise StackError(f"{self.url}/v1/models lists no model", mend=_MEND)
        names = [str(card.get("id")) for card in cards]
        if name is None and len(cards) > 1 or name is not None and name not in names:
            asked = f"no model {name!r}" if name else "several models"
            raise StackError(
                f"{self.url} serves {asked}",
                mend=f"--model: one of {', '.join(names)}",
                code=USAGE,
            )
        card = cards[names.index(name) if name else 0]
        length = card.get("max_model_len")
        found = str(card.get("id"))
        return Model(found, length if isinstance(length, int) else None)

    def version(self) -> str | None:
        """What /version says; None if there is no such place."""
        answer = self._request("GET", "/version")
        if answer.status_code == 404:
            return None
        told = self._decode(answer, "/version").get("version")
        return None if told is None else str(told)

    def tokenize(self, model: str, text: str) -> list[int] | None:
        """The tokens of ``text``; None if the server does not tell."""
        body = {"model": model, "prompt": text}
        answer = self._request("POST", "/tokenize", body)
        if answer.status_code in (404, 405):
            return None
        tokens = self._decode(answer, "/tokenize").get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(x, int) for x in tokens):
            raise StackError(f"{self.url}/tokenize sends no list of numbers")
        return tokens

    # -- what it says --------------------------------------------------------

    def complete(
        self,
        model: str,
        prompt: Prompt,
        tokens: int,
        *,
        logprobs: int | None = None,
        stop: tuple[str, ...] = (),
        whole: bool = False,
    ) -> Completion:
        """The greedy continuation of a prompt.

        Args:
            model: As the server names it.
            prompt: Text, or token numbers.
            tokens: How many at most.
            logprobs: How many alternatives of each token are wanted.
            stop: Texts that end it.
            whole: Whether to go on after the end-of-text token.

        Raises:
            StackError: if no whole answer comes.
        """
        body = _body(model, prompt, tokens, stop, whole)
        if logprobs is not None:
            body["logprobs"] = logprobs
        told = self._json("POST", "/v1/completions", body, self._patience())
        choices = told.get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise StackError(f"{self.url}/v1/completions sends no answer", mend=_MEND)
        return _completion(choices[0], told.get("usage"))

    def stream(self, model: str, prompt: Prompt, tokens: int) -> Completion:
        """As :meth:`complete`, streamed.

        Raises:
            StackError: if the stream ends before it says so.
        """
        body = {**_body(model, prompt, tokens, (), True), "stream": True}
        text, count, finish, ended = "", 0, None, False
        for event in self._events("/v1/completions", body):
            if event == "[DONE]":
                ended = True
                break
            told = _loads(event, f"{self.url}/v1/completions")
            if "error" in told:
                raise StackError(
                    f"{self.url}: the stream ends with an error: {_why(told)}",
                    mend=_MEND,
                )
            for choice in told.get("choices", []):
                text += choice.get("text") or ""
                count += 1
                finish = choice.get("finish_reason") or finish
        if not ended or finish is None:
            raise StackError(
                f"{self.url}: the stream was cut off after {count} pieces",
                mend=_MEND,
            )
        return Completion(text, finish, (), (), (), None)

    # -- how -----------------------------------------------------------------

    def _patience(self) -> float:
        patience, self._next_timeout = self._next_timeout, self.timeout
        return patience

    def _json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        return self._decode(self._request(method, path, body, timeout), path)

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> httpx2.Response:
        wait = timeout or self.timeout
        try:
            return self._http.request(method, path, json=body, timeout=wait)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._failed(path, error, wait) from error

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """The data of server-sent events."""
        wait = self._patience()
        try:
            with self._http.stream("POST", path, json=body, timeout=wait) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._decode(answer, path)
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        yield line.removeprefix("data:").strip()
        except httpx2.HTTPError as error:
            raise self._failed(path, error, wait) from error

    def _failed(self, path: str, error: Exception, wait: float) -> StackError:
        kind = StackError
        if isinstance(error, httpx2.ConnectError):
            kind, what = Silence, "cannot be reached"
        elif isinstance(error, httpx2.TimeoutException):
            kind, what = Silence, f"did not answer for {wait:g} s"
        elif isinstance(error, httpx2.RemoteProtocolError):
            what = "broke off its answer"
        else:
            what = f"does not answer: {type(error).__name__}"
        detail = str(error)
        return kind(
            f"{self.url}{path} {what}", mend=_MEND, details=(detail,) if detail else ()
        )

    def _decode(self, answer: httpx2.Response, path: str) -> dict[str, Any]:
        where = f"{self.url}{path}"
        if answer.status_code == 401:
            raise StackError(
                f"{where} wants another API key", mend=f"set {API_KEY}", code=USAGE
            )
        if answer.status_code != 200:
            try:
                why = _why(json.loads(answer.text))
            except (ValueError, TypeError):
                why = answer.text.strip()[:200]
            words = f": {why}" if why else ""
            raise StackError(f"{where} answers {answer.status_code}{words}", mend=_MEND)
        return _loads(answer.text, where)


def _checked(url: str) -> str:
    """``url`` without /v1 and a slash at its end.

    Raises:
        StackError: if it is not one.
    """
    try:
        parsed = urllib.parse.urlsplit(url)
        parsed.port  # noqa: B018  (raises if it is not a number)
    except ValueError as error:
        raise _no_url(url) from error
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise _no_url(url)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _no_url(url: str) -> StackError:
    return StackError(
        f"{url!r} is not a URL of a server",
        mend="give it as http://127.0.0.1:8000",
        code=USAGE,
    )


def _body(
    model: str, prompt: Prompt, tokens: int, stop: tuple[str, ...], whole: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
    }
    if stop:
        body["stop"] = list(stop)
    if whole:
        body["ignore_eos"] = True  # vLLM's own, and others ignore it
    return body


def _loads(text: str, where: str) -> dict[str, Any]:
    try:
        told = json.loads(text)  # takes NaN, too
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise StackError(
            f"{where} does not send a JSON object, but {text.strip()[:80]!r}",
            mend=_MEND,
        )
    return told


def _why(told: Any) -> str:
    """The words of an error, in either of the forms that servers use."""
    error = told.get("error", told.get("message", told))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error).strip()[:200]


def _completion(choice: dict[str, Any], usage: Any) -> Completion:
    found = choice.get("logprobs") or {}
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Completion(
        text=choice.get("text") or "",
        finish=choice.get("finish_reason"),
        tokens=tuple(map(str, found.get("tokens") or ())),
        logprobs=tuple(found.get("token_logprobs") or ()),
        top=tuple(x or {} for x in found.get("top_logprobs") or ()),
        prompt_tokens=counted,
    )

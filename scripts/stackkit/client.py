"""A client of an OpenAI-compatible server, whose errors are sentences."""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from .errors import USAGE, StackError
from .report import Step

API_KEY = "VLLM_API_KEY"  # vLLM's own name for it
_COMPLETIONS = "/v1/completions"
_MEND = "look at the server's log, and start it again: scripts/stack serve"

Prompt = str | list[int]
_T = TypeVar("_T")


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
        timeout: Seconds after which an answer that is not whole is given up.
        first_timeout: The same until one has come: the server may compile kernels.

    Raises:
        StackError: if ``url`` is none, or the API key cannot be sent.
    """

    def __init__(self, url: str, *, timeout: float, first_timeout: float):
        self.url = _checked(url)
        self.timeout = timeout
        self.first_timeout = first_timeout
        self._answered = False
        self._unhealthy = ""  # why it is not, if that is known
        key = os.environ.get(API_KEY)
        if key and not (key.isascii() and key.isprintable()):
            raise StackError(
                f"{API_KEY} has a character that cannot be sent",
                mend=f"set {API_KEY} to the key that the server was started with",
                code=USAGE,
            )
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
            status = _within(
                10, lambda: self._http.get("/health", timeout=10).status_code
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            self._unhealthy = _clean(str(error)) or type(error).__name__
            return False
        self._unhealthy = f"/health answers {status}"
        return status == 200

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
                    details=(self._unhealthy,),
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
        if not all(isinstance(card, dict) and card.get("id") for card in cards):
            raise self._malformed("/v1/models", "a model without a name")
        names = [_clean(str(card["id"])) for card in cards]
        if name is None and len(cards) > 1 or name is not None and name not in names:
            asked = f"no model {name!r}" if name else "several models"
            raise StackError(
                f"{self.url} serves {asked}",
                mend=f"--model: one of {', '.join(names)}",
                code=USAGE,
            )
        card = cards[names.index(name) if name else 0]
        length = card.get("max_model_len")
        return Model(str(card["id"]), length if isinstance(length, int) else None)

    def version(self) -> str | None:
        """What /version says; None if there is no such place."""
        answer = self._request("GET", "/version")
        if answer.status_code == 404:
            return None
        told = self._decode(answer, "/version").get("version")
        return None if told is None else _clean(str(told))

    def tokenize(self, model: str, text: str) -> list[int] | None:
        """The tokens of ``text``; None if the server does not tell."""
        body = {"model": model, "prompt": text}
        answer = self._request("POST", "/tokenize", body)
        if answer.status_code in (404, 405):
            return None
        tokens = self._decode(answer, "/tokenize").get("tokens")
        if not isinstance(tokens, list) or not all(type(x) is int for x in tokens):
            raise self._malformed("/tokenize", "no list of numbers")
        words = text.count(" ") + 1
        if len(tokens) < words / 2:
            raise self._malformed(
                "/tokenize", f"{len(tokens)} tokens for {words} words"
            )
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
        told = self._json("POST", _COMPLETIONS, body, self._patience)
        choices = told.get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise StackError(f"{self.url}{_COMPLETIONS} sends no answer", mend=_MEND)
        self._answered = True
        return self._completion(choices[0], told.get("usage"))

    def stream(
        self, model: str, prompt: Prompt, tokens: int, *, logprobs: int
    ) -> Completion:
        """As :meth:`complete`, streamed and to the last token.

        Raises:
            StackError: if the stream ends before it says so.
        """
        body = _body(model, prompt, tokens, (), True)
        body |= {"stream": True, "logprobs": logprobs}
        pieces, ended = [], False
        for event in self._events(_COMPLETIONS, body):
            if event == "[DONE]":
                ended = True
                break
            told = _loads(event, f"{self.url}{_COMPLETIONS}")
            if "error" in told:
                raise StackError(
                    f"{self.url}: the stream ends with an error: {_why(told)}",
                    mend=_MEND,
                )
            choices = told.get("choices", [])
            if not isinstance(choices, list):
                raise self._malformed(_COMPLETIONS, "choices that are no list")
            pieces += [self._completion(choice, None) for choice in choices]
        finish = [piece.finish for piece in pieces if piece.finish]
        if not ended or not finish:
            raise StackError(
                f"{self.url}: the stream was cut off after {len(pieces)} pieces",
                mend=_MEND,
            )
        self._answered = True
        return Completion(
            "".join(piece.text for piece in pieces),
            finish[-1],
            tuple(x for piece in pieces for x in piece.tokens),
            tuple(x for piece in pieces for x in piece.logprobs),
            tuple(x for piece in pieces for x in piece.top),
            None,
        )

    # -- how -----------------------------------------------------------------

    @property
    def _patience(self) -> float:
        return self.timeout if self._answered else self.first_timeout

    def _malformed(self, path: str, what: str) -> StackError:
        return StackError(f"{self.url}{path} sends {what}", mend=_MEND)

    def _completion(self, choice: Any, usage: Any) -> Completion:
        """One choice of an answer.

        Raises:
            StackError: if it is not of the form that a server's should be.
        """
        try:
            return _completion(choice, usage)
        except (AttributeError, TypeError) as error:
            words = f"an answer that is of no known form: {choice!r}"
            raise self._malformed(_COMPLETIONS, _clean(words)) from error

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
            return _within(
                wait,
                lambda: self._http.request(method, path, json=body, timeout=wait),
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._failed(path, error, wait) from error

    def _events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of server-sent events, as many as came."""
        wait = self._patience

        def read() -> list[str]:
            found: list[str] = []
            with self._http.stream("POST", path, json=body, timeout=wait) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._decode(answer, path)
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        found.append(line.removeprefix("data:").strip())
                        if found[-1] == "[DONE]":
                            break
            return found

        try:
            return _within(wait, read)
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
        detail = _clean(str(error))
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
            except (ValueError, TypeError, AttributeError, RecursionError):
                why = _clean(answer.text)
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
    if parsed.query or parsed.fragment or not url.isprintable() or " " in url:
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
    except (ValueError, RecursionError):
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
    return _clean(str(error))


def _clean(text: str) -> str:
    """What a server says, for a terminal: one line, nothing that steers it."""
    kept = "".join(x if x.isprintable() else " " for x in text)
    return " ".join(kept.split())[:200]


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """What ``call`` returns or raises.

    A timeout of the HTTP client begins anew with each byte, so that a server which
    sends one now and then would never be given up.

    Raises:
        httpx2.ReadTimeout: if it takes longer; its thread is left to itself.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        raise httpx2.ReadTimeout("what it sends comes to no end") from None


def _completion(choice: Any, usage: Any) -> Completion:
    """As :meth:`Server._completion`.

    Raises:
        AttributeError, TypeError: if it is of another form.
    """
    text, told = choice.get("text") or "", choice.get("logprobs") or {}
    lists = [told.get(x) or [] for x in ("tokens", "token_logprobs", "top_logprobs")]
    tops = [x or {} for x in lists[2]]
    if not (
        isinstance(text, str)
        and all(isinstance(x, list) for x in lists)
        and all(isinstance(x, dict) for x in tops)
    ):
        raise TypeError
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Completion(
        text=text,
        finish=choice.get("finish_reason"),
        tokens=tuple(map(str, lists[0])),
        logprobs=tuple(lists[1]),
        top=tuple(tops),
        prompt_tokens=counted if isinstance(counted, int) else None,
    )

"""smoke sees what is wrong with a server that says that it is healthy."""

from __future__ import annotations

import json
import socket
import time

import pytest
from fake_server import MODEL, Behavior, serving
from lab import mentions
from stackkit import prompts, smoke

FAST = ("--timeout", "0.4", "--first-timeout", "0.4")


@pytest.fixture
def version(lab):
    return lab.ok("version", "--json").json["version"]


def ask(lab, version, *faults, options=(), env=None):
    with serving(Behavior(*faults, version=version)) as url:
        return lab.run("smoke", url, *options, env=env)


def test_a_good_server_passes(lab, version):
    behavior = Behavior(version=version)
    with serving(behavior) as url:
        found = lab.ok("smoke", url + "/v1/", "--json").json
    assert (found["ok"], found["model"], found["version"]) == (True, MODEL, version)
    states = {item["what"]: item["state"] for item in found["findings"]}
    assert states.pop("agreement") == "not run"
    assert set(states.values()) == {"ok"}
    assert {f"{n} tokens" for n in smoke.LENGTHS} < set(states)
    assert {"stream", "version", "batch 1 of 8", "What is 17 + 25?"} < set(states)


def test_prompts_have_exactly_the_lengths_where_paths_change(lab, version):
    from stackkit.client import Model, Server

    with serving(Behavior()) as url:
        server = Server(url, timeout=5, first_timeout=5)
        for length in smoke.LENGTHS:
            numbers = prompts.of_length(server, Model(MODEL, None), 1, length)
            assert isinstance(numbers, list) and len(numbers) == length
    assert {3, 4, 5, 127, 128, 129, 2047, 2048, 2049} < set(smoke.LENGTHS)


def test_batches_shrink_to_one_and_grow_again():
    low = smoke.BATCHES.index(1)
    down, up = smoke.BATCHES[: low + 1], smoke.BATCHES[low:]
    assert len(down) > 2 and len(up) > 2
    assert list(down) == sorted(down, reverse=True) and list(up) == sorted(up)


BROKEN = {
    "nan": ("129 tokens", "1 of 16 logprobs are not finite: nan"),
    "infinite": ("1 of 16 logprobs are not finite: -inf",),
    "clamped": ("logprobs are not finite: -9999.0",),
    "null": ("logprobs are not finite: None",),
    "certain": ("a logprob is 0.5",),
    "one-token": ("16 times the same token, ' the'", "different tokens", "1 in all"),
    "same-logprob": ("every token has the same logprob, -11.77",),
    "no-logprobs": ("the server sends no logprobs",),
    "short": ("8 of 16 tokens came",),
    "500": ("/v1/completions answers 500: EngineCore encountered an issue.",),
    "500-once": ("answers 500: EngineCore",),
    "html": ("does not send a JSON object, but '<html>a proxy</html>'",),
    "array": ("does not send a JSON object, but '[1]'",),
    "cut-body": ("/v1/models broke off its answer",),
    "dropped-stream": ("stream", "broke off its answer"),
    "no-done": ("the stream was cut off after 16 pieces",),
    "stream-error": ("the stream ends with an error: EngineDeadError",),
    "wrong-answer": ("What is 17 * 23?", "'seven', not 391"),
    "no-version": ("does not tell its version", "--any-version"),
    "other-version": ("the server is 0.22.0+rocm722, this checkout builds",),
    "no-models": ("/v1/models lists no model",),
    "dies": ("broke off its answer", "afterwards", "the server is not healthy"),
    "batch-nan": ("batch 1 of 8", "not finite: nan"),
    "small": ("4097 tokens", "the server takes 4000 tokens", "--max-model-len"),
    "unhealthy": ("is not there or not ready", "/health answers 503", "--wait"),
    "stream-short": ("stream", "4 of 16 tokens came"),
    "stream-one-token": ("stream", "16 times the same token, ' the'"),
    "stream-nan": ("stream", "1 of 16 logprobs are not finite: None"),
    "stream-null": ("stream", "an answer that is of no known form: None"),
    "text-number": ("an answer that is of no known form", "'text': 42"),
    "logprobs-list": ("an answer that is of no known form", "'logprobs': [1]"),
    "logprobs-number": ("an answer that is of no known form",),
    "top-text": ("an answer that is of no known form",),
    "huge": ("1 of 17 logprobs are not finite: 1000",),
    "top-nan": ("129 tokens", "the logprob of an alternative is nan"),
    "truncates": ("4097 tokens", "the server read 2000 of them"),
    "few-tokens": ("/tokenize sends 1 tokens for",),
    "no-tokens": ("/tokenize sends 0 tokens for",),
    "bare-models": ("/v1/models sends a model without a name",),
    "deep": ("does not send a JSON object, but '[[[[",),
    "redirect": ("/v1/completions answers 307",),
    "steers": ("answers 500: [2J [/red]gone",),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_server_is_found_out(lab, version, fault):
    result = ask(lab, version, fault)
    assert result.code == 1
    mentions(result, *BROKEN[fault])


@pytest.mark.parametrize("fault", ["drip", "endless-stream"])
def test_an_answer_that_comes_to_no_end_is_given_up(lab, version, fault):
    options = ("--timeout", "0.7", "--first-timeout", "0.7")
    start = time.monotonic()
    result = ask(lab, version, fault, options=options)
    assert result.code == 1 and time.monotonic() - start < 8
    mentions(result, "did not answer for 0.7 s", "comes to no end")


def test_health_200_does_not_save_a_server_whose_logits_are_nan(lab, version):
    behavior = Behavior("nan", version=version)
    with serving(behavior) as url:
        assert lab.run("smoke", url).code == 1
        assert behavior.paths.count("/health") == 2


def test_a_fault_of_long_prompts_is_seen_at_long_prompts_alone(lab, version):
    with serving(Behavior("long-nan", version=version)) as url:
        result = lab.run("smoke", url, "--json")
    bad = [x["what"] for x in result.json["findings"] if x["state"] == "problem"]
    assert (result.code, bad) == (1, ["2049 tokens", "4097 tokens"])


def test_a_server_that_hangs_is_given_up_and_not_asked_on(lab, version):
    behavior = Behavior("hang", version=version)
    with serving(behavior) as url:
        result = lab.run("smoke", url, *FAST)
    assert result.code == 1
    mentions(result, "did not answer for 0.4 s", "the server no longer answers")
    assert behavior.completions == 1


def test_an_unreachable_server_is_a_sentence(lab, version):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = lab.run("smoke", url)
    assert result.code == 1
    mentions(result, f"{url} is not there or not ready", "mend:")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://x",
        "http://",
        "",
        "http://[x",
        "http://x:y",
        "http://x?y",
        "http://x#y",
        "http://a b",
        "http://x\n",
    ],
)
def test_what_is_no_url_is_a_usage_error(lab, url):
    result = lab.run("smoke", url)
    assert result.code == 2
    mentions(result, "is not a URL of a server", "http://127.0.0.1:8000")


def test_no_server_at_all_is_a_usage_error(lab):
    result = lab.run("smoke")
    assert result.code == 2
    mentions(result, "name a server", "--recipe")
    result = lab.run("smoke", "http://127.0.0.1:9", "--recipe", "tp4")
    assert result.code == 2


def test_of_several_models_one_must_be_named(lab, version):
    result = ask(lab, version, "two-models")
    assert result.code == 2
    mentions(result, "serves several models", f"one of {MODEL}, other")
    assert ask(lab, version, "two-models", options=("--model", MODEL)).code == 0
    result = ask(lab, version, options=("--model", "another"))
    assert result.code == 2
    mentions(result, "no model 'another'")


def test_an_api_key_is_wanted_and_taken_from_the_environment(lab, version):
    result = ask(lab, version, "key")
    assert result.code == 2
    mentions(result, "wants another API key", "VLLM_API_KEY")
    assert ask(lab, version, "key", env={"VLLM_API_KEY": "secret"}).code == 0
    for key in ("a\nb", "clé"):
        result = ask(lab, version, "key", env={"VLLM_API_KEY": key})
        assert result.code == 2
        mentions(result, "VLLM_API_KEY has a character that cannot be sent")


@pytest.mark.parametrize("option", ["--timeout", "--first-timeout", "--wait"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_what_is_no_time_is_a_usage_error(lab, option, value):
    assert lab.run("smoke", "http://127.0.0.1:9", option, value).code == 2


@pytest.mark.parametrize("option", ["--save", "--log", "--against"])
def test_a_file_that_cannot_be_is_told_before_a_server_is_asked(lab, option):
    behavior = Behavior()
    with serving(behavior) as url:
        for path in (lab.folder, lab.folder / "none" / "x"):
            result = lab.run("smoke", url, option, str(path))
            assert result.code == 2
            mentions(result, str(path), "mend:")
    assert not behavior.paths


def test_a_server_without_tokenize_is_asked_in_words(lab, version):
    result = ask(lab, version, "no-tokenize")
    assert result.code == 0
    mentions(result, "lengths", "warning", "a word was taken for a token")


def test_another_version_passes_if_it_may(lab, version):
    assert ask(lab, version, "other-version", options=("--any-version",)).code == 0


def test_random_weights_need_not_know_answers(lab, version):
    assert ask(lab, version, "wrong-answer", options=("--no-answers",)).code == 0


# -- two servers -----------------------------------------------------------------


def save(lab, version, *faults):
    path = lab.folder / "eager.json"
    assert ask(lab, version, *faults, options=("--save", str(path))).code == 0
    return ("--against", str(path))


def test_two_servers_that_say_the_same_agree(lab, version):
    against = save(lab, version)
    result = ask(lab, version, options=against)
    assert result.code == 0
    mentions(result, "192 tokens are the same")


def test_two_servers_that_differ_do_not(lab, version):
    against = save(lab, version)
    result = ask(lab, version, "other-tokens", options=against)
    assert result.code == 1
    mentions(result, "1 tokens: token 6 is ' OTHER' here", "docs/troubleshooting.md")


def test_equally_good_tokens_may_differ(lab, version):
    against = save(lab, version, "tie")
    result = ask(lab, version, "tie", options=against)
    assert result.code == 0
    path = lab.folder / "eager.json"
    told = json.loads(path.read_text())
    for output in told["outputs"]:  # what an eager server could have said as well
        mine = output["tokens"][5]
        (other,) = (x for x in output["top"][5] if x != mine)
        output["tokens"][5] = other
    path.write_text(json.dumps(told))
    result = ask(lab, version, "tie", options=against)
    assert result.code == 0
    mentions(result, "60 tokens are the same; 12 answers part")
    assert smoke.TIE < 2.0
    # One that the other server held for much worse may not.
    for output in told["outputs"]:
        for token in output["top"][5]:
            output["top"][5][token] *= 3
    path.write_text(json.dumps(told))
    assert ask(lab, version, "tie", options=against).code == 1


def test_answers_of_another_version_or_model_are_not_compared(lab, version):
    against = save(lab, version)
    other = Behavior(version=version, model="another")
    with serving(other) as url:
        result = lab.run("smoke", url, *against)
    assert result.code == 1
    mentions(result, "the other answers are to other prompts, or of", MODEL)
    options = (*against, "--any-version")
    result = ask(lab, version, "other-version", options=options)
    assert result.code == 1
    mentions(result, f"the other server was {version}")


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"schema": 2}'])
def test_what_smoke_did_not_save_is_refused(lab, version, content):
    path = lab.folder / "eager.json"
    if content is not None:
        path.write_text(content)
    result = ask(lab, version, options=("--against", str(path)))
    assert result.code == 2
    mentions(result, str(path), "--save")


def test_answers_of_a_broken_server_are_not_kept(lab, version):
    path = lab.folder / "x.json"
    assert ask(lab, version, "500-once", options=("--save", str(path))).code == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    ["loss is NaN", "Memory access fault by GPU node-2", "Falling back to eager"],
)
def test_a_log_that_speaks_of_wrong_results_is_a_problem(lab, version, line):
    log = lab.folder / "server.log"
    log.write_text(f"INFO ready\n{line}\n")
    result = ask(lab, version, options=("--log", str(log)))
    assert result.code == 1
    mentions(result, f"line 2: {line}")
    log.write_text("INFO financial ready\n")
    assert ask(lab, version, options=("--log", str(log))).code == 0

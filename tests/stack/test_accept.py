"""accept: exact scores on GSM8K's form, and needles that must all be found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import Behavior, serving, tokens_of
from lab import mentions
from stackkit import accept

SHORT = ("--lengths", "2048,6144")


@pytest.fixture
def version(lab):
    return lab.ok("version", "--json").json["version"]


@pytest.fixture
def questions(lab):
    """A file in GSM8K's form, with 205 questions."""
    path = lab.folder / "test.jsonl"
    path.write_text("".join(line(i) for i in range(205)))
    return path


def line(number):
    a, b = number, 1000 * number + 7
    question = f"What is {a} plus {b}?"
    return json.dumps({"question": question, "answer": f"Add.\n#### {a + b:,}"}) + "\n"


def ask(lab, version, *options, faults=()):
    with serving(Behavior(*faults, version=version)) as url:
        return lab.run("accept", url, *options)


def test_a_good_server_is_accepted(lab, version, questions):
    result = ask(lab, version, "--gsm8k", str(questions), "--json")
    assert result.code == 0, result.text
    found = result.json
    assert (found["gsm8k"]["right"], found["gsm8k"]["asked"]) == (200, 200)
    assert len(found["needles"]) == 12
    for needle in found["needles"]:
        # As the server counts, and not much shorter than it says.
        assert 0.98 * needle["length"] <= needle["tokens"] <= needle["length"]
    lengths = {needle["length"] for needle in found["needles"]}
    assert lengths == {2048, 6144, 10240, 102400}


def test_a_low_score_is_not_accepted(lab, version, questions):
    faults = ["wrong-math"]
    options = ("--gsm8k", str(questions), "--only", "gsm8k")
    result = ask(lab, version, *options, faults=faults)
    assert result.code == 1
    mentions(result, "GSM8K: 0.7500 ± 0.0306, 150 of 200 right; 0.92 is wanted",
             "not accepted", "'What is 8 plus 8007?': 8016, not 8015")  # fmt: skip


def test_the_gate_is_at_its_figure_exactly(questions):
    def score(right):
        return accept.Score(right, 1000, 1005, 0, (), "")

    assert score(920).ok and not score(919).ok
    assert accept.FAIL < accept.EXPECTED == 0.93


def test_examples_can_come_from_another_file(lab, version, questions):
    shots = lab.folder / "train.jsonl"
    shots.write_text("".join(line(i) for i in range(300, 306)))
    options = ("--gsm8k", str(questions), "--only", "gsm8k", "--shots", str(shots))
    found = ask(lab, version, *options, "--json").json
    assert found["gsm8k"]["asked"] == 205
    result = ask(lab, version, *options, "--limit", "20")
    mentions(result, "20 of 20 right", "a part of the 205 questions")


@pytest.mark.parametrize(
    "text, number",
    [("#### 42", "42"), ("x\n#### 1,234", "1234"), ("####-3.50", "-3.5"),
     ("#### $12.00 each", "12"), ("#### 007", "7"), ("42", None), ("####", None),
     ("#### -0.0", "0")],
)  # fmt: skip
def test_numbers_are_compared_exactly(text, number):
    assert accept._strict(text) == number


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "does not exist"),
        (Path(), "is a folder"),
        ("not json\n", ":1: is not a JSON object"),
        ('{"question": "x"}\n', ":1: is not a JSON object"),
        ('{"question": "x", "answer": "no number"}\n', ":1: is not a JSON object"),
        ("[]\n", ":1: is not a JSON object"),
        (line(1) * 4, "4 questions, 5 are shown as examples"),
        (line(1) * 5, "no question is left to ask"),
    ],
)
def test_a_file_that_is_not_gsm8k_is_refused(lab, version, content, words):
    path = lab.folder / "bad.jsonl"
    if content == Path():
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    result = ask(lab, version, "--gsm8k", str(path), "--only", "gsm8k")
    assert result.code == 2
    mentions(result, str(path), words)


def test_without_a_file_it_says_where_from(lab, version):
    result = ask(lab, version)
    assert result.code == 2
    mentions(result, "--gsm8k FILE is missing", "docs/serving.md", "--only needles")


def test_a_wrong_needle_in_long_texts_is_found_out(lab, version, questions):
    # GSM8K alone sees nothing: its prompts are short.
    options = ("--gsm8k", str(questions), "--limit", "30")
    faults = ["wrong-needle"]
    gsm8k = ask(lab, version, *options, "--only", "gsm8k", faults=faults)
    assert gsm8k.code == 0
    result = ask(lab, version, *options, *SHORT, faults=faults)
    assert result.code == 1
    mentions(result, "'1234567.', not", "3 of 6 needles found; all are wanted",
             "not accepted")  # fmt: skip


def test_another_key_is_not_the_needle(lab, version):
    options = ("--only", "needles", *SHORT)
    result = ask(lab, version, *options, faults=["decoy-needle"])
    assert result.code == 1
    mentions(result, "0 of 6 needles found")


def test_needles_are_the_same_on_every_machine_and_differ_by_seed():
    text, name, wanted = accept.haystack(3, 500, 0.5)
    assert (text, name, wanted) == accept.haystack(3, 500, 0.5)
    assert accept.haystack(4, 500, 0.5)[2] != wanted
    assert text.count(wanted) == 1
    where = len(tokens_of(text.partition(wanted)[0])) / len(tokens_of(text))
    assert 0.4 < where < 0.6


def test_a_server_that_does_not_count_tokens_is_asked_all_the_same(lab, version):
    options = ("--only", "needles", *SHORT)
    assert ask(lab, version, *options, faults=["no-tokenize"]).code == 0


def test_a_server_for_shorter_texts_is_refused(lab, version):
    options = ("--only", "needles", *SHORT)
    result = ask(lab, version, *options, faults=["small"])
    assert result.code == 2
    mentions(result, "the server takes 4000 tokens, the longest needle needs 6168",
             "--max-model-len", "--lengths")  # fmt: skip


BROKEN = {
    "500": "answers 500: EngineCore encountered an issue.",
    "500-once": "answers 500: EngineCore",
    "html": "does not send a JSON object",
    "dies": "broke off its answer",
    "other-version": "the server is 0.22.0+rocm722, this checkout builds",
    "hang": "did not answer for 0.4 s",
    "drip": "comes to no end",
    "text-number": "an answer that is of no known form",
    "redirect": "answers 307",
}


def test_all_that_wait_for_the_first_answer_wait_as_long(lab, version, questions):
    options = ("--gsm8k", str(questions), "--limit", "8", "--only", "gsm8k")
    times = ("--timeout", "0.4", "--first-timeout", "20", "--jobs", "4")
    result = ask(lab, version, *options, *times, faults=["slow-first"])
    assert result.code == 0, result.text


@pytest.mark.parametrize("fault", ["few-tokens", "no-tokens"])
def test_a_server_that_cannot_count_is_a_sentence(lab, version, fault):
    options = ("--only", "needles", *SHORT)
    result = ask(lab, version, *options, faults=[fault])
    assert result.code == 1
    mentions(result, "/tokenize sends", "tokens for")


@pytest.mark.parametrize("part", ["gsm8k", "needles"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_server_is_a_sentence(lab, version, questions, fault, part):
    fast = ("--timeout", "0.4", "--first-timeout", "0.4", "--jobs", "2")
    options = (
        "--gsm8k",
        str(questions),
        "--limit",
        "20",
        "--only",
        part,
        *SHORT,
        *fast,
    )
    result = ask(lab, version, *options, faults=[fault])
    assert result.code == 1
    mentions(result, BROKEN[fault])
    assert "accepted" not in result.out


@pytest.mark.parametrize("text", ["x", "", "1", "2048,,", "2048,12"])
def test_lengths_that_are_none_are_a_usage_error(lab, text):
    result = lab.run("accept", "http://127.0.0.1:9", "--lengths", text)
    assert result.code == 2

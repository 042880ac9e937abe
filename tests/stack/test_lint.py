"""Every lint rule has a passing and a failing fixture; missing is not malformed."""

from __future__ import annotations

import pytest
from lab import (
    EDITS,
    RELEASE,
    change_id,
    format_patch,
    git,
    mentions,
    message,
    put,
    replace,
)
from stackkit import lint, trailers


def _reword(lab, name, text: str, **env):
    """Give a patch another message; text of its diff stays."""
    path = lab.patches / f"{name}.patch"
    work = lab.folder / "reword"
    if not work.exists():
        git(lab.folder, "clone", "-q", str(lab.folder / "work"), "reword")
    position = list(EDITS).index(name)
    commits = git(work, "rev-list", "--reverse", f"{RELEASE}..HEAD").split()
    git(work, "checkout", "-q", "--detach", commits[position])
    git(work, "commit", "-q", "--amend", "--cleanup=verbatim", "-F", "-",
        stdin=text.encode(), **env)  # fmt: skip
    path.write_bytes(format_patch(work, "HEAD"))


def _beta(lab, **words):
    _reword(lab, "core-beta", message("core-beta", **words))


def _diff(lab, name, old, new):
    replace(lab.patches / f"{name}.patch", old, new)


def _ungit(lab):
    git(lab.root, "update-index", "--force-remove", "vllm")


# Each entry breaks one rule of a project that lint accepts.
BROKEN = {
    "gitlink": [
        lambda lab: git(
            lab.root, "update-index", "--cacheinfo", f"160000,{'1' * 40},vllm"
        ),
        _ungit,
    ],
    "gitmodules": [
        lambda lab: replace(lab.root / ".gitmodules", "vllm.git", "fork.git"),
        lambda lab: replace(lab.root / ".gitmodules", "[submodule", "submodule"),
        lambda lab: (lab.root / ".gitmodules").unlink(),
    ],
    "listed": [
        lambda lab: put(lab.patches, "core-other.patch", "x\n"),
        lambda lab: put(lab.patches, "notes.txt", "x\n"),
        lambda lab: replace(lab.patches / "series", "core-more.patch\n", ""),
    ],
    "attributes": [
        lambda lab: put(lab.root, ".gitattributes", "* text=auto\n"),
        lambda lab: put(
            lab.root, ".gitattributes", "patches/** -text\n*.patch text eol=lf\n"
        ),
    ],
    "diff": [
        lambda lab: put(
            lab.patches,
            "core-beta.patch",
            (lab.patches / "core-beta.patch").read_bytes().split(b"diff --git")[0],
        ),
        lambda lab: _diff(lab, "core-beta", "\nindex ", "\nindex 1"),
    ],
    "leftovers": [
        lambda lab: _diff(lab, "core-beta", "+B20 = 2020", "+<<<<<<< ours"),
        lambda lab: _diff(lab, "core-beta", "+B20 = 2020", "+>>>>>>> theirs"),
        lambda lab: (
            _diff(lab, "misc-names", "a/tools/new.sh b/tools/new.sh",
                  "a/tools/new.rej b/tools/new.rej"),
        ),
    ],
    "whitespace": [
        lambda lab: _diff(lab, "core-beta", "+B20 = 2020", "+B20 = 2020 "),
        lambda lab: _diff(lab, "misc-names", "+#!/bin/sh", "+#!/bin/sh\r"),
    ],
    "author": [
        lambda lab: _reword(lab, "core-beta", message("core-beta")) or _diff(
            lab, "core-beta", "From: vllm-mi300x maintainers", "From: Somebody Else"
        ),
    ],
    "subject": [
        lambda lab: _beta(lab, subject="No tag here"),
        lambda lab: _beta(lab, subject="[Bugfix] Ends with a period."),
        lambda lab: _beta(lab, subject="[Bugfix]No space"),
        lambda lab: _beta(lab, subject="[Bugfix] " + "w" * 64),
    ],
    "message": [
        lambda lab: _reword(
            lab, "core-beta", message("core-beta").replace("It was wrong, and users "
            "saw it.\n\n", "")
        ),
        lambda lab: _beta(lab, body="w" * 73),
        lambda lab: _beta(lab, body="See /home/somebody/vllm/x.py."),
        lambda lab: _beta(lab, body=f"Why.\nFrom {'1' * 40} Mon Sep 17 00:00:00 2001"),
        lambda lab: _diff(lab, "core-beta", "It was wrong", "--- a/b\nIt was wrong"),
    ],
    "trailers": [
        lambda lab: _beta(lab, Risk=None),
        lambda lab: _beta(lab, Fixed_By="nobody"),
        lambda lab: _beta(lab, Verified_On="mi300x"),
    ],
    "concern": [lambda lab: _beta(lab, Concern="no-such-page")],
    "change-id": [
        lambda lab: _beta(lab, Change_Id=change_id("core-alpha")),
    ],
    "dependencies": [
        lambda lab: _beta(lab, depends="core-more"),
        lambda lab: _beta(lab, depends="core-nothing"),
        lambda lab: put(
            lab.patches, "series",
            "core-more.patch\n" + (lab.patches / "series").read_text().replace(
                "core-more.patch\n", ""
            ),
        ),
    ],
    "tests": [lambda lab: _beta(lab, tests=("tests/test_no.py::test_x",))],
    "ledger": [
        lambda lab: put(lab.root, "docs/concerns/lost.md", "# Lost\n"),
        lambda lab: put(lab.root, "docs/ledger.toml", "fate = 1\n"),
    ],
}  # fmt: skip


def _rules(result) -> set[str]:
    return {finding["rule"] for finding in result.json["findings"]}


def test_a_right_project_has_no_findings(fresh):
    result = fresh.ok("lint", "--json")
    assert result.json["findings"] == []
    assert set(result.json["rules"]) == set(lint.RULES)


def test_every_rule_has_a_failing_fixture():
    assert set(BROKEN) == set(lint.RULES)


@pytest.mark.parametrize(
    "rule, number", [(rule, i) for rule in BROKEN for i in range(len(BROKEN[rule]))]
)
def test_broken_rule_is_found_and_names_the_file(fresh, rule, number):
    BROKEN[rule][number](fresh)
    result = fresh.run("lint", "--json")
    assert result.code == 1
    assert rule in _rules(result), result.text
    places = {"gitlink": "stack.toml", "gitmodules": ".gitmodules",
              "ledger": "docs/ledger.toml"}  # fmt: skip
    where = [f["where"] for f in result.json["findings"] if f["rule"] == rule]
    assert all(places.get(rule, f"patches/{RELEASE}/") in place for place in where)


@pytest.mark.parametrize("rule", [r for r in BROKEN if r != "diff"])
def test_broken_rule_breaks_no_other(fresh, rule):
    """A finding that drags others along hides what is wrong."""
    BROKEN[rule][0](fresh)
    assert _rules(fresh.run("lint", "--json")) == {rule}


REQUIRED = [rule.key for rule in trailers.SCHEMA if rule.required]
MALFORMED = {
    "Concern": ["Two Words", "UPPER", ""],
    "Upstream-Status": ["Done", "Submitted", "Submitted #12", "Backport 123",
                        "Inappropriate", "Inappropriate []", "Absorbed vllm#1", ""],
    "Depends-On": ["core-alpha,docs-crlf", "Core", "core-alpha, ", ""],
    "Tests": ["none", "none:", "test_x.py::test_y", "tests/x.txt",
              "tests/test_x.py::test_y raises", "tests/test_x.py raises ImportError",
              "tests/test_x.py raises ModuleNotFoundError",
              "tests/test_x.py raises Exception", ""],
    "Verified-On": ["gpu", "cpu h200", "cpu, cpu", ""],
    "Unverified": [""],
    "Risk": [""],
    "Change-Id": ["I123", "i" + "0" * 40, "I" + "g" * 40, ""],
}  # fmt: skip
WELL_FORMED = {
    "Concern": ["fp8", "fp8-e8m0"],
    "Upstream-Status": ["Pending", "Submitted vllm-project/vllm#12",
                        "Backport " + "0a" * 20,
                        "Absorbed vllm-project/vllm#1, v0.23.0",
                        "Inappropriate [a reason]"],
    "Depends-On": ["core-alpha", "core-alpha, docs-crlf"],
    "Tests": ["none: docs only", "tests/test_x.py", "tests/a/test_x.py::test_y",
              "tests/test_x.py::TestA::test_y[a-1]",
              "tests/test_x.py::test_y raises KeyError"],
    "Verified-On": ["cpu", "cpu, h200, gfx942-codegen, gfx942"],
    "Unverified": ["all of it"],
    "Risk": ["low"],
    "Change-Id": ["I" + "0" * 40],
}  # fmt: skip


def _problems(**changes) -> list[str]:
    text = message("core-beta", **changes)
    return [what for _, what in trailers.problems(trailers.split(text)[1])]


def test_trailer_tables_cover_the_schema():
    assert set(MALFORMED) == set(WELL_FORMED) == set(trailers.KEYS)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_trailer_is_called_missing(key):
    name = "tests" if key == "Tests" else key.replace("-", "_")
    (problem,) = _problems(**{name: None})
    assert problem.startswith(f"missing trailer {key}: ")


def test_optional_trailer_may_be_missing():
    assert _problems(Depends_On=None) == []


@pytest.mark.parametrize(
    "key, value", [(k, v) for k in MALFORMED for v in MALFORMED[k]]
)
def test_malformed_trailer_is_called_malformed(key, value):
    name = "tests" if key == "Tests" else key.replace("-", "_")
    (problem,) = _problems(**{name: value})
    assert problem.startswith(f"malformed trailer {key}: {value!r}")


@pytest.mark.parametrize(
    "key, value", [(k, v) for k in WELL_FORMED for v in WELL_FORMED[k]]
)
def test_well_formed_trailer_is_accepted(key, value):
    name = "tests" if key == "Tests" else key.replace("-", "_")
    assert _problems(**{name: value}) == []


@pytest.mark.parametrize("key", [k for k in trailers.KEYS if k != "Tests"])
def test_trailer_given_twice_is_found(key):
    value = WELL_FORMED[key][0]
    assert _problems(**{key.replace("-", "_"): (value, value)}) == [
        f"trailer {key} is given twice"
    ]


def test_several_tests_are_allowed_but_not_beside_none():
    assert _problems(tests=("tests/test_a.py", "tests/test_b.py")) == []
    assert _problems(tests=("none: x", "tests/test_b.py")) == [
        "Tests says both 'none' and a pytest id"
    ]


def test_trailers_out_of_order_are_found():
    text = message("core-beta")
    lines = text.rstrip("\n").split("\n")
    lines[-1], lines[-2] = lines[-2], lines[-1]
    found = trailers.problems(trailers.split("\n".join(lines))[1])
    assert [what.split(";")[0] for _, what in found] == ["trailers out of order"]


def test_folded_trailer_is_one_value():
    text = message("core-beta", Unverified="a long\n sentence\n  over lines")
    assert trailers.values(trailers.split(text)[1], "Unverified") == [
        "a long sentence over lines"
    ]


def test_unknown_trailer_is_found_but_a_sign_off_is_not():
    assert _problems(Signed_off_by="A <a@b.example>") == []
    assert _problems(Acked_By="x")[0].startswith("unknown trailer Acked-By")


def test_finding_names_the_line_of_the_file(fresh):
    _beta(fresh, Verified_On="mi300x")
    path = fresh.patches / "core-beta.patch"
    lines = path.read_text().splitlines()
    number = lines.index("Verified-On: mi300x") + 1
    result = fresh.run("lint")
    mentions(result, f"patches/{RELEASE}/core-beta.patch:{number}: trailers")


@pytest.mark.parametrize(
    "text, words",
    [
        ("core-alpha.patch\ncore-alpha.patch\n", "twice"),
        ("core-nothing.patch\n", "which does not exist"),
        ("Core-Alpha.patch\n", "not a legal patch file name"),
        ("../core-alpha.patch\n", "not a legal patch file name"),
        ("core alpha.patch\n", "not a legal patch file name"),
        ("aux.patch\n", "not a legal patch file name"),
        ("core-alpha\n", "not a legal patch file name"),
        (b"core-\xff.patch\n", "is not UTF-8 text"),
    ],
)
@pytest.mark.parametrize("verb", ["lint", "apply", "status"])
def test_series_that_cannot_be_used_is_a_sentence(fresh, verb, text, words):
    put(fresh.patches, "series", text)
    result = fresh.run(verb)
    assert result.code == 1
    mentions(result, f"{fresh.patches}/series", words, "mend:")


def test_missing_series_is_a_usage_error(fresh):
    (fresh.patches / "series").unlink()
    result = fresh.run("lint")
    assert result.code == 2
    mentions(result, "series does not exist", "mend:")


@pytest.mark.parametrize(
    "old, new",
    [
        (b"From 0", b"Frum 0"),
        (b"From: ", b"Frim: "),
        (b"Date: ", b"Dote: "),
        (b"Subject: ", b"Sabject: "),
        (b"It was wrong", b"It was \xff\xfe"),
    ],
)
@pytest.mark.parametrize("verb", ["lint", "verify", "show"])
def test_patch_with_a_broken_head_is_never_a_traceback(lab, verb, old, new):
    replace(lab.patches / "core-beta.patch", old, new)
    names = ["core-beta"] if verb == "show" else []
    result = lab.run(verb, *names)
    assert result.code == 1 or verb == "show" or new[-1] > 0x7F
    if result.code:
        assert "core-beta" in result.text

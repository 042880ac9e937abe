"""pr: a branch, its texts and the target's checks; nothing leaves the machine."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from lab import (
    RELEASE,
    changes_nothing,
    git,
    make_sdist,
    mentions,
    put,
    release,
    replace,
    toml,
    upstream,
)
from stackkit import hooks, pins, prove, testenv, trailers, upstream as upstream_module

WHO = "Jane Doe"
MAIL = "jane@example.org"
SIGNED = f"Signed-off-by: {WHO} <{MAIL}>"

TEMPLATE = """<!-- markdownlint-disable -->
PLEASE FILL IN THE PR DESCRIPTION HERE.

## Purpose

## Test Plan

## Test Result

---
- [ ] The purpose of the PR
"""
LATER_TEMPLATE = """<!-- markdownlint-disable -->

## Overview

<!-- Summarize the change. -->

## Claims

## Validation

## Details

## Something new

---

- [ ] Checklist
"""
GUIDE = "Use one of:\n\n- `[Bugfix]` for bug fixes.\n- `[Misc]` for others.\n"
RULES = 'Run:\n\n```bash\ngh pr list --search "words"\n```\n'
CONFIG = """
default_stages: [pre-commit, manual]
exclude: 'third_party/.*'
repos:
- repo: https://github.com/astral-sh/ruff-pre-commit
  rev: v0.14.0
  hooks:
  - id: ruff-check
    args: [--fix]
  - id: ruff-format
- repo: https://github.com/DavidAnson/markdownlint-cli2
  rev: v0.21.0
  hooks:
  - id: markdownlint-cli2
- repo: https://github.com/nobody/knows
  rev: v1
  hooks:
  - id: knows
- repo: local
  hooks:
  - id: header
    name: Check headers
    entry: python tools/header.py
    language: python
    types: [python]
  - id: rewrite
    name: Rewrite
    entry: bash -c 'for f; do case $f in *beta.py) echo >>$f;; esac; done' --
    language: system
    types: [python]
  - id: names
    name: Names
    entry: bash
    args: [-c, 'git ls-files | grep " x" && exit 1 || exit 0']
    language: system
    always_run: true
    pass_filenames: false
  - id: sign
    name: Sign
    entry: bash -c true
    language: system
    stages: [commit-msg]
"""
HEADER = """import sys

for path in sys.argv[1:]:
    if "f5" in open(path).read() and "forbidden" in open(path).read():
        sys.exit(f"{path}: forbidden")
"""


@pytest.fixture
def sender(monkeypatch, tmp_path):
    """The person who sends it, as that person's own git configuration says."""
    put(tmp_path, "home/.gitconfig", f"[user]\n\tname = {WHO}\n\temail = {MAIL}\n")


@pytest.fixture
def target(lab, sender, monkeypatch):
    """A project whose release has rules like vLLM's; red and green are in the cache."""
    files = {
        ".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE,
        "docs/contributing/README.md": GUIDE,
        "AGENTS.md": RULES,
        ".pre-commit-config.yaml": CONFIG,
        "tools/header.py": HEADER,
    }
    for path, text in files.items():
        put(lab.clone, path, text)
    git(lab.clone, "add", "-A")
    git(lab.clone, "commit", "-q", "--amend", "--no-edit")
    git(lab.clone, "tag", "-f", RELEASE)
    make_sdist(lab.clone, lab.sdist)
    lab.cached.unlink(missing_ok=True)
    put(lab.root, "stack.toml", toml(lab.clone, lab.sdist))
    head = git(lab.clone, "rev-parse", "HEAD")
    git(lab.root, "update-index", "--cacheinfo", f"160000,{head},vllm")
    lab.ok("clean", "--discard")
    lab.ok("apply")
    monkeypatch.setattr(testenv, "digest", lambda project: "the same environment")
    monkeypatch.setattr(testenv, "ensure", None)  # nothing is to be installed
    evidence(lab)
    return lab


def evidence(lab, names=("core-alpha",)):
    """Put red and green into the cache, as prove does."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in lab.env.items():
            patch.setenv(key, value)
        project = pins.find_project(lab.root)
        pin = project.pin(None)
        tree = prove.worktree.Tree(project, pin)
        patches = prove.patchfile.load(project.patches(pin))
        plans = prove._plans(tree, prove.apply.known_commits(tree, patches))
        for name in names:
            plan = plans[name]
            tests = trailers.test_ids(plan.patch.trailers)
            rows = [
                {"node": x.node, "red": "1 of 1 failed (AssertionError)",
                 "green": "1 passed", "ok": True}
                for x in tests
            ]  # fmt: skip
            prove._write(prove._cache_file(project, plan, tests),
                         {"patch": name, "tests": rows})  # fmt: skip


def folder(lab, name):
    return lab.root / "build/pr" / name


def checks(result) -> dict[str, str]:
    return {check["name"]: check["state"] for check in result.json["checks"]}


def test_branch_holds_the_patch_and_none_of_our_trailers(target):
    result = target.ok("pr", "core-alpha", "--onto", RELEASE)
    tree = folder(target, "core-alpha") / "vllm"
    assert git(tree, "branch", "--show-current") == "core-alpha"
    assert git(tree, "status", "--porcelain") == ""
    who = git(tree, "log", "-1", "--format=%an <%ae> %cn <%ce>")
    assert who == f"{WHO} <{MAIL}> {WHO} <{MAIL}>"
    message = git(tree, "log", "-1", "--format=%B")
    assert message == f"[Bugfix] Alpha\n\nIt was wrong, and users saw it.\n\n{SIGNED}"
    assert git(tree, "rev-parse", "HEAD^") == git(tree, "rev-parse", "refs/stack/base")
    base_tree = git(target.clone, "rev-parse", "HEAD^{tree}")
    assert git(tree, "rev-parse", "HEAD^^{tree}") == base_tree
    assert "title: [Bugfix] Alpha" in result.out


def test_branch_applies_with_plain_git_am(target):
    target.ok("pr", "core-more", "--onto", RELEASE, "--without", "rewrite")
    other = target.folder / "am"
    git(target.folder, "clone", "-q", str(target.clone), "am")
    mails = sorted(folder(target, "core-more").glob("*.patch"))
    assert [mail.name for mail in mails] == [
        "0001-core-alpha.patch",
        "0002-core-more.patch",
    ]
    git(other, "am", "-q", *map(str, mails))
    made = git(other, "rev-parse", "HEAD^{tree}")
    assert made == git(folder(target, "core-more") / "vllm", "rev-parse", "HEAD^{tree}")
    for mail in mails:
        for key in trailers.KEYS:
            assert f"\n{key}: " not in mail.read_text()


def test_trailers_that_upstream_wants_stay(target):
    replace(target.patches / "core-alpha.patch", "Change-Id:",
            "Co-authored-by: A Tool <tool@example.org>\nChange-Id:")  # fmt: skip
    target.ok("apply")
    evidence(target)
    target.ok("pr", "core-alpha", "--onto", RELEASE)
    message = git(folder(target, "core-alpha") / "vllm", "log", "-1", "--format=%B")
    assert message.endswith(f"Co-authored-by: A Tool <tool@example.org>\n{SIGNED}")


def test_body_has_the_target_s_sections_and_the_evidence(target):
    target.ok("pr", "core-alpha", "--onto", RELEASE)
    body = (folder(target, "core-alpha") / "body.md").read_text()
    headings = re.findall(r"^## (.*)$", body, re.MULTILINE)
    assert headings == ["Purpose", "Test Plan", "Test Result",
                        "Why this is not a duplicate", "AI assistance"]  # fmt: skip
    row = (
        "| `tests/test_alpha.py::test_f3` | 1 of 1 failed (AssertionError) | 1 passed |"
    )
    assert f"| test | without | with |\n|---|---|---|\n{row}" in body
    assert body.count("TO FILL IN") == 2
    assert 'gh pr list --search "words"' in body
    assert "PLEASE FILL IN" not in body
    assert body.endswith("---\n- [ ] The purpose of the PR\n")
    assert "| markdownlint-cli2 |" not in body  # no Markdown file changed
    assert "| sign | not run | it is of the stage commit-msg |" in body


def test_body_of_a_target_with_another_template_and_title_rule(target):
    upstream(target, lambda tree: (
        put(tree, ".github/PULL_REQUEST_TEMPLATE.md", LATER_TEMPLATE),
        put(tree, ".github/workflows/pr-title.yml",
            "          pattern='^(\\[[^][]+\\])+ +[^[:space:]].*$'\n"),
    ))  # fmt: skip
    result = target.ok("pr", "core-alpha", "--onto", str(target.clone), "--json")
    body = (folder(target, "core-alpha") / "body.md").read_text()
    headings = re.findall(r"^## (.*)$", body, re.MULTILINE)
    assert headings[:5] == [
        "Overview",
        "Claims",
        "Validation",
        "Details",
        "Something new",
    ]
    assert "## Something new\n\n**TO FILL IN**" in body
    assert "Summarize" not in body
    assert "Not run again on g" in body
    title = next(c for c in result.json["checks"] if c["name"] == "title")
    assert (title["state"], "pr-title.yml" in title["detail"]) == ("passed", True)


def test_title_that_the_target_does_not_take_fails(target):
    result = target.run("pr", "core-beta", "--onto", RELEASE, "--without", "rewrite",
                        "--json")  # fmt: skip
    assert result.code == 1
    assert checks(result)["title"] == "failed"  # its first tag is ROCm


def test_checks_of_the_target_are_run_at_their_version(target):
    result = target.ok("pr", "core-alpha", "--onto", RELEASE, "--json")
    found = checks(result)
    assert found["header"] == found["names"] == found["rewrite"] == "passed"
    assert found["markdownlint-cli2"] == "no files"
    assert found["knows"] == "not run"
    assert found["sign"] == "not run"
    assert found["git am"] == "passed"
    assert found["sign-off"] == "passed"
    # No index here: what cannot be installed is not run, and says so.
    assert found["ruff-check"] == "not run"
    why = next(c for c in result.json["checks"] if c["name"] == "ruff-check")["detail"]
    assert "ruff==0.14.0 cannot be installed" in why


@pytest.mark.parametrize("right, wrong", [
    (b"-    return y\n", b"-    return z\n"),  # applies nowhere
    (b"+    return y + 1\n", b"+    return y + 2\n"),  # gives another tree
])  # fmt: skip
def test_mails_that_do_not_give_the_branch_fail(target, monkeypatch, right, wrong):
    mails_of = upstream_module._mails

    def damaged(*arguments):
        mails = mails_of(*arguments)
        whole = mails[-1].read_bytes()
        assert whole.count(right) == 1
        mails[-1].write_bytes(whole.replace(right, wrong))
        return mails

    monkeypatch.setattr(upstream_module, "_mails", damaged)
    result = target.run("pr", "core-alpha", "--onto", RELEASE, "--json")
    assert result.code == 1
    assert checks(result)["git am"] == "failed"


def test_check_that_fails_or_rewrites_is_a_failure(target):
    target.add_patch("core-bad", lambda tree: (
        replace(tree / "vllm/alpha.py", "def f5(x):", "def f5(x):  # forbidden"),
        replace(tree / "vllm/beta.py", "B3 = 3\n", "B3 = 33\n"),
    ), subject="[Bugfix] Bad")  # fmt: skip
    target.ok("apply")
    result = target.run("pr", "core-bad", "--onto", RELEASE, "--json")
    assert result.code == 1
    found = {check["name"]: check for check in result.json["checks"]}
    assert found["header"]["state"] == "failed"
    assert "vllm/alpha.py: forbidden" in found["header"]["detail"]
    assert found["rewrite"]["state"] == "failed"
    assert "rewrites vllm/beta.py" in found["rewrite"]["detail"]
    # The branch itself is not rewritten.
    assert git(folder(target, "core-bad") / "vllm", "status", "--porcelain") == ""
    kept = target.run("pr", "core-bad", "--onto", RELEASE, "--json", "--without", "header",
                      "--without", "rewrite")  # fmt: skip
    assert checks(kept)["header"] == "not run"
    assert kept.code == 0


def test_pin_by_commit_needs_the_version_in_a_comment():
    revision = "a" * 40
    text = f"  rev: {revision} # v0.11.0.1\n"
    assert hooks._version(text, revision) == "0.11.0.1"
    with pytest.raises(hooks._CannotRun, match="names no version"):
        hooks._version(f"  rev: {revision}\n", revision)


def test_onto_a_clone_starts_from_upstream_s_own_commit(target):
    commit = upstream(target, lambda tree: put(tree, "README.md", "Later\n"))
    target.ok("pr", "core-alpha", "--onto", str(target.clone))
    tree = folder(target, "core-alpha") / "vllm"
    assert git(tree, "rev-parse", "HEAD^") == commit
    assert git(tree, "rev-parse", "--is-shallow-repository") == "true"


def test_remote_clone_gets_the_branch_and_nothing_else(target):
    mine = target.folder / "mine"
    git(target.folder, "clone", "-q", str(target.clone), "mine")
    refs = git(mine, "for-each-ref").splitlines()
    target.ok("pr", "core-alpha", "--onto", str(target.clone), "--remote", str(mine))
    new = [ref for ref in git(mine, "for-each-ref").splitlines() if ref not in refs]
    assert [ref.split("\t")[1] for ref in new] == ["refs/heads/core-alpha"]
    assert git(mine, "rev-parse", "core-alpha^") == git(
        target.clone, "rev-parse", "HEAD"
    )
    assert git(mine, "log", "-1", "--format=%s", "core-alpha") == "[Bugfix] Alpha"
    assert git(mine, "status", "--porcelain") == ""
    # Again is no change; another branch of that name is not overwritten.
    target.ok("pr", "core-alpha", "--onto", str(target.clone), "--remote", str(mine))
    git(mine, "branch", "-f", "core-alpha", "HEAD")
    result = target.run(
        "pr", "core-alpha", "--onto", str(target.clone), "--remote", str(mine)
    )
    assert result.code == 4
    mentions(result, "has another branch core-alpha", "mend:")
    assert git(mine, "rev-parse", "core-alpha") == git(mine, "rev-parse", "HEAD")


def test_remote_that_is_not_on_this_machine_is_a_usage_error(target):
    result = target.run("pr", "core-alpha", "--onto", RELEASE, "--remote", "no/where")
    assert result.code == 2
    mentions(result, "not a git repository on this machine", "nothing is ever pushed")


def test_patch_that_conflicts_there_is_refused(target):
    upstream(
        target, lambda tree: replace(tree / "vllm/beta.py", "B20 = 20\n", "B20 = 0\n")
    )
    release(target)
    result = target.run("pr", "core-beta", "--onto", "1.3.0")
    assert result.code == 3
    mentions(result, "core-beta is conflict on v1.3.0", "vllm/beta.py",
             "mend: move the stack first: scripts/stack rebase --to v1.3.0")  # fmt: skip
    assert not folder(target, "core-beta").exists()


def test_nobody_s_sign_off_is_made_up(target, tmp_path):
    (tmp_path / "home/.gitconfig").unlink()
    result = target.run("pr", "core-alpha", "--onto", RELEASE)
    assert result.code == 1
    mentions(result, "does not say who you are", "mend: git config --global user.name")
    put(tmp_path, "home/.gitconfig", "[user]\n\tname = vllm-mi300x maintainers\n"
        "\temail = maintainers@vllm-mi300x.example\n")  # fmt: skip
    result = target.run("pr", "core-alpha", "--onto", RELEASE)
    assert result.code == 1
    mentions(result, "which is the project, not a person")


def test_what_a_person_wrote_is_not_overwritten(target):
    target.ok("pr", "core-alpha", "--onto", RELEASE)
    body = folder(target, "core-alpha") / "body.md"
    replace(body, "**TO FILL IN**", "Searched on Monday: none")
    with changes_nothing(target):
        result = target.run("pr", "core-alpha", "--onto", RELEASE)
    assert result.code == 4
    mentions(result, "was edited since it was prepared", "edited body.md", "mend:")
    result = target.run("clean")
    assert result.code == 4
    mentions(result, "was edited since it was prepared", "edited body.md")
    target.ok("pr", "core-alpha", "--onto", RELEASE, "--discard")
    assert "Searched" not in body.read_text()
    target.ok("clean")
    assert not (target.root / "build/pr").exists()


def test_commit_made_on_the_branch_is_not_overwritten(target):
    target.ok("pr", "core-alpha", "--onto", RELEASE)
    tree = folder(target, "core-alpha") / "vllm"
    put(tree, "README.md", "Mine\n")
    assert target.run("pr", "core-alpha", "--onto", RELEASE).code == 4
    git(tree, "commit", "-q", "-a", "-m", "Mine")
    assert target.run("pr", "core-alpha", "--onto", RELEASE).code == 4


def test_nothing_is_pushed(target):
    """Even the clone that the target comes from is as it was."""
    before = git(target.clone, "for-each-ref"), git(target.clone, "rev-parse", "HEAD")
    target.ok("pr", "core-alpha", "--onto", str(target.clone))
    assert (
        git(target.clone, "for-each-ref"),
        git(target.clone, "rev-parse", "HEAD"),
    ) == before
    assert git(folder(target, "core-alpha") / "vllm", "remote") == ""


def test_filter_leaves_a_body_that_only_looks_like_trailers():
    message = "Title\n\nNote: this\nRisk of nothing\n\nRisk: low\nChange-Id: x\n"
    done = upstream_module.filtered(message.encode(), f"{WHO} <{MAIL}>".encode())
    assert done.decode() == f"Title\n\nNote: this\nRisk of nothing\n\n{SIGNED}\n"


def test_user_settings_do_not_reach_the_branch(target, tmp_path):
    target.ok("pr", "core-alpha", "--onto", RELEASE)
    commit = git(folder(target, "core-alpha") / "vllm", "rev-parse", "HEAD")
    with open(tmp_path / "home/.gitconfig", "a") as stream:
        stream.write("[commit]\n\tgpgSign = true\n[core]\n\thooksPath = /nowhere\n"
                     "[format]\n\tsignOff = true\n")  # fmt: skip
    target.ok("pr", "core-alpha", "--onto", RELEASE)
    assert git(folder(target, "core-alpha") / "vllm", "rev-parse", "HEAD") == commit
    assert subprocess.run(["git", "--version"], env=os.environ).returncode == 0

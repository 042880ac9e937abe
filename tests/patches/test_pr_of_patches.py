"""Three patches of different kinds, prepared for vLLM's own rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stackkit import git, pins, trailers

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = pins.load(ROOT)
RELEASE = PROJECT.default_release
WHO = "Signed-off-by: Jane Doe <jane@example.org>"
# Minutes each; run it by hand before sending a patch.
MYPY = ("mypy-local", "mypy-3.10", "mypy-3.11", "mypy-3.12", "mypy-3.13")
KINDS = {
    "Python": ("fnuz-e8m0-weight-scales", ("ruff-check", "check-spdx-header")),
    "C++ after another patch": ("swa-kv-insert-fnuz", ("clang-format", "typos")),
    "Triton": ("moe-bitmatrix-padding-lanes", ("check-forbidden-imports",)),
}


@pytest.fixture(scope="module", params=KINDS)
def prepared(request, tmp_path_factory):
    """What ``pr`` says, and the checks that have to have run."""
    name, ran = KINDS[request.param]
    home = tmp_path_factory.mktemp("home")
    (home / ".gitconfig").write_text(
        "[user]\n\tname = Jane Doe\n\temail = jane@example.org\n"
    )
    # Another person, but the same packages and the same cache.
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_CONFIG_HOME": config,
        "XDG_CACHE_HOME": str(PROJECT.cache.parent),
    }
    left_out = [part for check in MYPY for part in ("--without", check)]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/stack", "pr", name, "--onto", RELEASE,
         "--discard", "--json", *left_out],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), ran


def test_target_s_checks_pass_and_what_was_not_run_says_so(prepared):
    found, ran = prepared
    states = {check["name"]: check["state"] for check in found["checks"]}
    for name in (*ran, "ruff-format", "git am", "title", "sign-off", "trailers"):
        assert states[name] == "passed", name
    assert "failed" not in states.values()
    for name in MYPY:
        assert states[name] in ("not run", "no files")


def test_branch_applies_with_plain_git_am_and_is_free_of_our_trailers(
    prepared, tmp_path
):
    found, _ = prepared
    plain = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", "clone", "-q", "--no-checkout", found["tree"], tmp_path],
                   check=True)  # fmt: skip
    subprocess.run([*plain, "checkout", "-q", found["base"]], check=True)
    subprocess.run([*plain, "am", "-q", *found["mails"]], check=True)
    made = git.Repository(tmp_path / ".git").text("rev-parse", "HEAD^{tree}")
    branch = git.Repository(Path(found["tree"]) / ".git")
    assert made == branch.text("rev-parse", "HEAD^{tree}")
    for commit in found["commits"]:
        message = branch.commit(commit).message.decode()
        keys = {trailer.key for trailer in trailers.split(message)[1]}
        assert not keys & set(trailers.KEYS)
        assert WHO in message.splitlines()


def test_body_has_the_red_and_green_table(prepared):
    found, _ = prepared
    body = Path(found["body"]).read_text()
    assert "| test | without | with |" in body
    rows = [test for proof in found["proofs"] for test in proof["tests"]]
    assert rows
    for row in rows:
        assert row["ok"]
        assert f"| `{row['node']}` | {row['red']} | {row['green']} |" in body
    assert "## Why this is not a duplicate" in body
    assert "## AI assistance" in body

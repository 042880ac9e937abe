"""new, drop, show, status, doctor, version, verify, clean; --json, --dry-run, pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib

import pytest
from lab import (
    STACK,
    changes_nothing,
    git,
    mentions,
    message,
    put,
    replace,
)
from packaging.version import Version

# -- new -------------------------------------------------------------------------


def test_new_commits_uncommitted_changes_with_the_trailers_to_fill_in(lab):
    put(lab.tree, "vllm/new.py", "x = 1\n")
    replace(lab.tree / "vllm/beta.py", "B1 = 1\n", "B1 = 11\n")
    head = lab.head()
    lab.ok("new", "core-new", "--subject", "[Bugfix] New")
    assert lab.git("rev-parse", "HEAD^") == head
    assert lab.git("status", "--porcelain") == ""
    assert lab.git("show", "HEAD:vllm/new.py") == "x = 1"
    body = lab.git("log", "-1", "--format=%B")
    filled = "Concern: core-new\nUpstream-Status: Pending\n"
    assert body.startswith(f"[Bugfix] New\n\n{filled}")
    assert lab.git("log", "-1", "--format=%an %cn") == " ".join(
        ["vllm-mi300x maintainers"] * 2
    )


def test_new_names_the_newest_commit(lab):
    put(lab.tree, "vllm/new.py", "x = 1\n")
    lab.commit("x", "[Bugfix] By hand\n\nWhy.\n")
    tree = lab.git("rev-parse", "HEAD^{tree}")
    lab.ok("new", "core-new")
    assert lab.git("rev-parse", "HEAD^{tree}") == tree
    body = lab.git("log", "-1", "--format=%B")
    assert body.startswith("[Bugfix] By hand\n\nWhy.\n\nConcern: core-new\n")
    lab.ok("export")
    assert lab.series()[-1] == "core-new.patch"


ILLEGAL = ["x", "Core-New", "core new", "../core-x", "core-", "-core", "core-x.patch/",
           "c\u00f6re-x", ""]  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_new_with_an_illegal_name_is_a_usage_error(lab, name):
    put(lab.tree, "vllm/new.py", "x = 1\n")
    result = lab.run("new", "--", name)
    assert result.code == 2
    mentions(result, "legal patch name", "mend:")


def test_new_with_a_taken_name_is_a_usage_error(lab):
    put(lab.tree, "vllm/new.py", "x = 1\n")
    result = lab.run("new", "core-beta")
    assert result.code == 2
    mentions(result, "there is a patch core-beta already", "mend:")
    assert lab.git("status", "--porcelain") == "?? vllm/new.py"


def test_name_of_a_dropped_patch_is_free_again(lab):
    lab.ok("drop", "core-beta")
    put(lab.tree, "vllm/new.py", "x = 1\n")
    lab.ok("new", "core-beta")
    lab.git("reset", "-q", "--hard", "HEAD^")  # and given up again
    put(lab.tree, "vllm/new.py", "x = 2\n")
    lab.ok("new", "core-beta")
    lab.ok("export")
    assert lab.series()[-1] == "core-beta.patch"


def test_new_without_a_change_says_so(lab):
    result = lab.run("new", "core-new")
    assert result.code == 1
    mentions(result, "no uncommitted change", "mend:")


# -- drop ------------------------------------------------------------------------


def test_drop_merges_the_later_patches_over_the_gap(lab):
    names = lab.series()
    before = lab.patch_files()
    lab.ok("drop", "core-beta")
    assert lab.series() == [n for n in names if n != "core-beta.patch"]
    text = (lab.tree / "vllm/beta.py").read_bytes()
    assert b"B20 = 20\n" in text
    assert b"B38 = 3838\n" in text  # of a later patch to the same file
    after = lab.patch_files()
    assert after["docs-crlf.patch"] == before["docs-crlf.patch"]
    assert not (lab.patches / "core-beta.patch").exists()
    assert lab.git("status", "--porcelain") == ""
    with changes_nothing(lab):
        lab.ok("apply")
    lab.ok("verify")


def test_drop_of_the_last_and_of_every_patch(two):
    two.ok("drop", "core-beta")
    two.ok("drop", "core-alpha.patch")
    assert two.series() == []
    assert two.git("rev-parse", "HEAD") == two.git("rev-parse", "refs/stack/base")


def test_drop_of_what_others_depend_on_is_refused(lab):
    with changes_nothing(lab):
        result = lab.run("drop", "core-alpha")
    assert result.code == 1
    mentions(result, "core-more", "depend on core-alpha", "mend:")


def test_drop_that_conflicts_changes_nothing(lab):
    path = lab.patches / "core-more.patch"
    replace(path, "Depends-On: core-alpha\n", "")
    lab.ok("apply")
    wanted = (lab.head(), lab.files(), lab.patch_files())
    refs = lab.git("for-each-ref")
    for options in (["--dry-run"], []):
        result = lab.run("drop", "core-alpha", *options)
        assert result.code == 3
        mentions(result, "core-more conflicts", "vllm/alpha.py", "mend:")
        assert (lab.head(), lab.files(), lab.patch_files()) == wanted
        assert lab.git("for-each-ref") == refs
    assert lab.git("worktree", "list").count("\n") == 0


def test_drop_refuses_unexported_work(lab):
    put(lab.tree, "vllm/beta.py", "edited\n")
    with changes_nothing(lab):
        result = lab.run("drop", "docs-crlf")
    assert result.code == 4
    mentions(result, "uncommitted vllm/beta.py", "mend:")


def test_drop_refuses_hand_edited_patches(lab):
    replace(lab.patches / "core-beta.patch", "It was wrong", "It was WRONG")
    with changes_nothing(lab):
        result = lab.run("drop", "docs-crlf")
    assert result.code == 4
    mentions(result, "do not agree", "mend:")


def test_drop_of_an_unknown_patch_is_a_usage_error(lab):
    result = lab.run("drop", "core-nothing")
    assert result.code == 2
    mentions(result, "no patch 'core-nothing'", "core-alpha, docs-crlf")


# -- show, status, doctor, version, verify ----------------------------------------


def test_show_tells_message_trailers_files_and_commit(lab):
    found = lab.ok("show", "core-alpha", "--json").json["patch"]
    assert found["subject"] == "[Bugfix] Alpha"
    assert found["body"] == "It was wrong, and users saw it."
    assert ["Tests", "tests/test_alpha.py::test_f3"] in found["trailers"]
    assert found["files"] == ["tests/test_alpha.py", "vllm/alpha.py"]
    assert found["commit"] == lab.git("rev-parse", "HEAD~4")
    assert (found["added"], found["removed"]) == (6, 1)
    text = lab.ok("show", "core-alpha.patch").out
    assert "Risk: low" in text
    assert lab.head() not in text


def test_show_before_an_apply_has_no_commit(fresh):
    assert fresh.ok("show", "core-beta", "--json").json["patch"]["commit"] is None


def test_show_of_an_unknown_patch_is_a_usage_error(lab):
    assert lab.run("show", "core-nothing").code == 2


def test_status_tells_what_is_applied(lab):
    found = lab.ok("status", "--json").json
    assert [p["name"] for p in found["patches"]] == [
        n.removesuffix(".patch") for n in lab.series()
    ]
    assert all(p["applied"] for p in found["patches"])
    assert (found["work"], found["drift"], found["problem"]) == ([], [], "")
    assert found["tree"] == lab.git("rev-parse", "HEAD^{tree}")


@pytest.mark.parametrize(
    "fill, words",
    [("index", "the package index"), ("cache", "the cached archive"),
     ("submodule", "the submodule")],
)  # fmt: skip
def test_status_tells_where_the_base_would_come_from(fresh, fill, words):
    if fill == "index":
        shutil.rmtree(fresh.cache)
    if fill == "submodule":
        (fresh.root / "vllm").rmdir()
        git(fresh.root, "clone", "-q", str(fresh.clone), "vllm")
    result = fresh.ok("status")
    assert f"base: {words}" in result.out
    assert "not applied" in result.out


def test_status_tells_work_and_drift(lab):
    put(lab.tree, "docs/with space.md", "amended\n")
    lab.git("commit", "-q", "-a", "--amend", "--no-edit")
    put(lab.tree, "vllm/notes.py", "mine\n")
    found = lab.ok("status", "--json").json
    assert {w.split()[0] for w in found["work"]} == {"commit", "removed", "uncommitted"}
    assert found["drift"] == [{"name": "core-more", "what": "changed"}]
    mentions(lab.ok("status"), "unexported work", "uncommitted vllm/notes.py",
             "core-more: changed")  # fmt: skip


def test_status_tells_which_patches_are_not_applied(lab):
    put(lab.patches, "series", "core-alpha.patch\ncore-beta.patch\n")
    found = lab.run("status", "--json").json
    assert [p["applied"] for p in found["patches"]] == [True, False]


def test_status_with_a_patch_that_does_not_apply_tells_the_problem(lab):
    replace(lab.patches / "core-beta.patch", "index ", "index 0")
    result = lab.run("status")
    assert result.code == 1
    mentions(result, "core-beta.patch", "no full index line")


DOCTOR = {
    "edited submodule": (
        lambda lab: (
            git(lab.root, "clone", "-q", str(lab.clone), "vllm2"),
            (lab.root / "vllm").rmdir(),
            (lab.root / "vllm2").rename(lab.root / "vllm"),
            put(lab.root, "vllm/README.md", "edited\n"),
        ),
        "vllm/ was edited",
    ),
    "moved gitlink": (
        lambda lab: git(
            lab.root, "update-index", "--cacheinfo", f"160000,{'1' * 40},vllm"
        ),
        "submodule entry",
    ),
    "unfinished merge": (
        lambda lab: put(lab.tree, ".git/MERGE_HEAD", lab.head() + "\n"),
        "unfinished merge",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DOCTOR)
def test_doctor_finds_the_problem_and_says_the_mend(lab, kind):
    assert lab.run("doctor").code == 0
    make, words = DOCTOR[kind]
    make(lab)
    result = lab.run("doctor")
    assert result.code == 1
    mentions(result, words, "mend:")


def test_doctor_without_git_is_a_sentence(lab, tmp_path):
    (tmp_path / "empty").mkdir()
    result = lab.spawn("doctor", env={"PATH": str(tmp_path / "empty")})
    assert result.code == 1
    mentions(result, "git is not installed", "apt-get install git")


def test_old_git_is_a_sentence(lab, tmp_path):
    put(tmp_path, "bin/git", "#!/bin/sh\necho git version 2.33.1\n", "100755")
    result = lab.spawn("apply", env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    assert result.code == 1
    mentions(result, "git 2.33.1 is too old", "mend: install git 2.34")


def test_version_is_of_pep_440_and_names_the_tree(lab):
    text = lab.ok("version").out.strip()
    tree = lab.git("rev-parse", "HEAD^{tree}")
    assert text == f"1.2.0+rocm722.mi300x.5.g{tree[:8]}"
    assert str(Version(text)) == text
    assert Version(text) > Version("1.2.0")


def test_version_is_the_same_before_an_apply_and_with_work_in_the_tree(lab, fresh):
    wanted = lab.ok("version").out
    assert fresh.ok("version").out == wanted
    put(lab.tree, "vllm/beta.py", "edited\n")
    assert lab.ok("version").out == wanted


def test_version_needs_no_tree_and_makes_none(fresh):
    with changes_nothing(fresh):
        fresh.ok("version")


def test_verify_proves_a_right_project(lab):
    checks = lab.ok("verify", "--json").json["checks"]
    assert all(check["ok"] for check in checks)
    assert {c["name"] for c in checks} >= {
        "submodule entry", "submodule is pristine", "archive", "base tree",
        "patches apply exactly", "every prefix parses",
        "patches are as export writes them", "git am gives the same commits",
        "applied tree",
    }  # fmt: skip


VERIFY = {
    "submodule entry": lambda lab: git(
        lab.root, "update-index", "--cacheinfo", f"160000,{'1' * 40},vllm"
    ),
    "submodule is pristine": DOCTOR["edited submodule"][0],
    "archive": lambda lab: replace(lab.cached, b"\x1f\x8b", b"\x1f\x8c"),
    "patches apply exactly": lambda lab: replace(
        lab.patches / "core-beta.patch", "+B20 = 2020", "+B20 = 2021"
    ),
    "patches are as export writes them": lambda lab: replace(
        lab.patches / "core-beta.patch", "@@ B16 = 16", "@@ B15 = 16"
    ),
    "applied tree": lambda lab: put(lab.tree, "vllm/beta.py", "edited\n"),
}


@pytest.mark.parametrize("name", VERIFY)
def test_verify_finds_what_is_wrong(lab, name):
    VERIFY[name](lab)
    result = lab.run("verify", "--json")
    assert result.code == 1
    failed = [c["name"] for c in result.json["checks"] if not c["ok"]]
    assert name in failed


@pytest.mark.parametrize("text", ["def broken(:\n", "x = 1\0\n"])
def test_verify_finds_a_patch_that_does_not_parse(lab, text):
    put(lab.tree, "vllm/bad.py", text)
    lab.commit("core-bad", message("core-bad"))
    lab.ok("new", "core-bad")
    lab.ok("export")
    result = lab.run("verify", "--json")
    assert result.code == 1
    failed = [c["name"] for c in result.json["checks"] if not c["ok"]]
    assert failed == ["every prefix parses"]


def test_verify_finds_a_damaged_object(lab):
    blob = lab.git("rev-parse", "refs/stack/base:vllm/beta.py")
    path = lab.tree / ".git/objects" / blob[:2] / blob[2:]
    path.chmod(0o644)
    path.write_bytes(zlib.compress(zlib.decompress(path.read_bytes()) + b"# more\n"))
    assert lab.run("verify").code == 1


# -- clean -------------------------------------------------------------------------


def test_clean_removes_what_the_tool_made_and_nothing_else(lab):
    put(lab.root, "build/mine.txt", "mine\n")
    put(lab.root, "build/wheels/mine.whl", "mine\n")
    lab.ok("clean")
    left = sorted(p.name for p in (lab.root / "build").iterdir())
    assert left == [".lock", "mine.txt", "wheels"]
    assert lab.cached.is_file()
    lab.ok("clean", "--cache")
    assert not lab.cache.exists()


def _stash(lab):
    put(lab.tree, "vllm/beta.py", "edited\n")
    lab.git("stash", "-q")


def _branch(lab):
    lab.git("checkout", "-q", "-b", "mine")
    put(lab.tree, "vllm/x.py", "x\n")
    lab.commit("core-x")
    lab.git("checkout", "-q", "stack")


def _detached(lab):
    lab.git("checkout", "-q", "--detach")
    put(lab.tree, "vllm/x.py", "x\n")
    lab.commit("core-x")


def _backup(lab):
    put(lab.tree, "vllm/beta.py", "edited\n")
    lab.ok("apply", "--discard")


def _old_release(lab):
    put(lab.tree, "vllm/beta.py", "edited\n")
    lab.tree.rename(lab.tree.with_name("v1.1.0"))


@pytest.mark.parametrize("work", [_stash, _branch, _detached, _backup, _old_release])
def test_clean_refuses_work_wherever_it_is(lab, work):
    work(lab)
    for options in (["--dry-run"], []):
        with changes_nothing(lab):
            result = lab.run("clean", *options)
        assert result.code == 4
        mentions(result, "holds work that no patch file has", "mend:")
    lab.ok("clean", "--discard")
    assert not lab.tree.exists()


def test_clean_of_nothing(fresh):
    assert fresh.ok("clean", "--json").json["removed"] == []


# -- every verb --------------------------------------------------------------------

# The keys of each answer: removing one is a new schema number.
KEYS = {
    "doctor": {"findings"},
    "apply": {"path", "changed", "dry_run", "base", "source", "backup", "tree",
              "patches"},
    "status": {"pin", "base", "patches", "tree", "work", "drift", "problem"},
    "lint": {"rules", "findings"},
    "verify": {"checks"},
    "export": {"dry_run", "changes", "uncommitted"},
    "new": {"name", "commit", "dry_run"},
    "drop": {"dry_run", "changes"},
    "show": {"patch"},
    "version": {"version", "tree"},
    "clean": {"removed", "dry_run"},
}  # fmt: skip
ARGUMENTS = {"new": ["core-new"], "drop": ["core-beta"], "show": ["core-beta"]}
ITEMS = {
    ("doctor", "findings"): {"what", "state", "detail", "mend"},
    ("apply", "patches"): {"name", "commit", "tree"},
    ("status", "patches"): {"name", "concern", "upstream", "added", "removed",
                            "applied"},
    ("verify", "checks"): {"name", "ok", "detail"},
    ("export", "changes"): {"name", "what"},
    ("drop", "changes"): {"name", "what"},
}  # fmt: skip


@pytest.mark.parametrize("verb", KEYS)
def test_json_answer_has_its_keys(lab, verb):
    if verb == "new":
        put(lab.tree, "vllm/new.py", "x = 1\n")
    answer = lab.ok(verb, *ARGUMENTS.get(verb, []), "--json").json
    assert set(answer) - {"schema", "command", "ok"} == KEYS[verb]
    assert (answer["schema"], answer["command"], answer["ok"]) == (1, verb, True)
    for (owner, key), wanted in ITEMS.items():
        if owner == verb:
            assert answer[key], key
            assert all(set(item) == wanted for item in answer[key])


@pytest.mark.parametrize("verb", KEYS)
def test_json_error_has_its_keys(lab, verb):
    put(lab.root, "stack.toml", "default = 1\n")
    result = lab.run(verb, *ARGUMENTS.get(verb, []), "--json")
    assert result.code == 2
    assert set(result.json) == {"schema", "command", "ok", "error"}
    assert set(result.json["error"]) == {"message", "mend", "details", "exit"}
    assert result.json["error"]["exit"] == 2
    assert result.err == ""


def _changed_series(lab):
    replace(lab.patches / "series", "docs-crlf.patch\n", "")


def _amended(lab):
    put(lab.tree, "docs/with space.md", "amended\n")
    lab.git("commit", "-q", "-a", "--amend", "--no-edit")


DRY = {
    "first apply": (None, ["apply"]),
    "apply": (_changed_series, ["apply"]),
    "discard": (lambda lab: put(lab.tree, "x.py", "x\n"), ["apply", "--discard"]),
    "other base": (_changed_series, ["apply", "--base", "../upstream"]),
    "export": (_amended, ["export"]),
    "new": (lambda lab: put(lab.tree, "x.py", "x\n"), ["new", "core-new"]),
    "drop": (lambda lab: None, ["drop", "core-beta"]),
    "clean": (lambda lab: None, ["clean", "--cache"]),
}


@pytest.mark.parametrize("kind", DRY)
def test_dry_run_changes_nothing_and_says_what_it_would_do(request, kind):
    prepare, arguments = DRY[kind]
    lab = request.getfixturevalue("fresh" if prepare is None else "lab")
    if prepare:
        prepare(lab)
    with changes_nothing(lab):
        dry = lab.ok(*arguments, "--dry-run", "--json").json
    done = lab.ok(*arguments, "--json").json
    ignored = {"dry_run", "backup", "commit", "source"}
    assert {k: v for k, v in dry.items() if k not in ignored} == {
        k: v for k, v in done.items() if k not in ignored
    }
    assert dry["dry_run"] and not done["dry_run"]


@pytest.mark.parametrize("verb", ["status", "show", "doctor", "lint", "version"])
def test_reading_verbs_change_nothing_and_need_no_writable_checkout(lab, verb):
    _changed_series(lab)
    shutil.rmtree(lab.cache)
    subprocess.run(["chmod", "-R", "a-w", lab.root], check=True)
    try:
        with changes_nothing(lab):
            # Root may write anywhere unless it gives that up.
            result = lab.spawn(verb, *ARGUMENTS.get(verb, []), prefix=_unprivileged())
        assert result.code == (1 if verb in ("doctor", "lint") else 0), result.text
    finally:
        subprocess.run(["chmod", "-R", "u+w", lab.root], check=True)


def _unprivileged() -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ()
    caps = "-dac_override,-dac_read_search,-fowner"
    return ("setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}", "--")


@pytest.mark.parametrize("place", ["checkout", "cache", "temporary folder"])
def test_place_that_cannot_be_written_is_a_sentence(fresh, place):
    folders = {"checkout": fresh.root, "cache": fresh.folder / "cache",
               "temporary folder": fresh.folder / "tmp"}  # fmt: skip
    shutil.rmtree(fresh.cache)
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    subprocess.run(["chmod", "-R", "a-w", folders[place]], check=True)
    env = {"TMPDIR": str(fresh.folder / "tmp")}
    try:
        result = fresh.spawn("apply", env=env, prefix=_unprivileged())
    finally:
        subprocess.run(["chmod", "-R", "u+w", folders[place]], check=True)
    if place == "temporary folder":  # there is another one
        assert result.code == 0
    else:
        assert result.code == 1
        mentions(result, str(folders[place]), "permission denied", "mend:")


def test_git_that_runs_out_of_room_is_a_sentence(fresh):
    def limit():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    result = fresh.spawn("apply", preexec_fn=limit)
    assert result.code == 1
    mentions(result, "error: git")
    fresh.ok("apply")


@pytest.mark.parametrize("verb", ["status", "apply", "lint", "show", "version"])
def test_piped_output_is_plain_whole_and_quiet(lab, verb):
    result = lab.spawn(verb, *ARGUMENTS.get(verb, []), env={"COLUMNS": "30"})
    assert result.code == 0
    assert result.err == ""
    assert "\x1b" not in result.out
    if verb == "status":
        assert "core-alpha" in result.out
        assert "\u2026" not in result.out


def test_closed_pipe_is_no_traceback(lab):
    command = [sys.executable, STACK, "status", "-C", str(lab.root)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE,
                          env={**os.environ, **lab.env})  # fmt: skip
    os.close(writer)
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [(["nonsense"], "No such command"), (["apply", "--nonsense"], "No such option"),
     (["show"], "Missing argument"), (["prove", "--jobs", "0"], "--jobs")],
)  # fmt: skip
def test_wrong_command_line_is_a_usage_error(lab, arguments, words):
    result = lab.run(*arguments)
    assert result.code == 2
    mentions(result, words)


def test_help_of_every_verb(lab):
    from stackkit import cli

    assert set(cli.main.commands) >= {*KEYS, "prove", "test"}
    for verb in cli.main.commands:
        assert "--json" in lab.run(verb, "--help").out


@pytest.mark.parametrize("verb", KEYS)
def test_wrong_directory_is_a_usage_error(tmp_path, lab, verb):
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    result = lab.run(verb, *ARGUMENTS.get(verb, []), "-C", str(lonely))
    assert result.code == 2
    mentions(result, "no stack.toml", "mend:", "-C DIR")


def test_works_from_a_directory_below_the_project(lab):
    result = lab.spawn("status", "--json", cwd=lab.tree / "vllm")
    assert json.loads(result.out)["tree"] == lab.git("rev-parse", "HEAD^{tree}")


def test_path_with_spaces_quotes_and_non_ascii(_made, tmp_path):
    from lab import Lab

    folder = tmp_path / "a b \u00e9\u6f22 'q' \"d\" $x;y:z"
    shutil.copytree(_made / "whole", folder, symlinks=True)
    lab = Lab(folder)
    lab.fill_cache()
    for verb in ("apply", "status", "export", "verify", "lint"):
        result = lab.spawn(verb)
        assert result.code == 0, result.text
    lab.ok("drop", "core-beta", "--dry-run")
    lab.ok("drop", "core-beta")


def test_file_name_that_is_not_utf_8_is_shown_and_not_a_traceback(lab):
    name = os.fsencode(lab.tree) + b"/vllm/bad\xff.py"
    with open(name, "wb") as stream:
        stream.write(b"x = 1\n")
    for verb in ("apply", "status", "export"):
        for options in ((), ("--json",)):
            result = lab.spawn(verb, *options)
            assert result.code == (4 if verb == "apply" else 0)
            assert "bad" in result.text


def test_exported_tree_without_git_works(fresh):
    """A project unpacked from an archive has no .git."""
    shutil.rmtree(fresh.root / ".git")
    fresh.ok("apply")
    fresh.ok("lint")
    fresh.ok("doctor")


def test_empty_home_on_first_use_makes_the_environment_or_says_why(tmp_path):
    """scripts/stack beside no .venv, with an index that is not there."""
    root = tmp_path / "clone"
    shutil.copytree(STACK.parent, root / "scripts",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    done = subprocess.run(
        [sys.executable, root / "scripts/stack", "status"], capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_RETRIES": "0",
             "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert b"error: the packages of scripts/requirements.txt" in done.stderr
    assert b"mend: check the network" in done.stderr
    assert b"Traceback" not in done.stderr.split(b"error: the packages")[-1]
    assert not (root / ".venv/stack.stamp").exists()

"""The same commits and the same bytes under any user's settings and environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from lab import EMAIL, STACK, git, message, put

FAIL = "#!/bin/sh\necho no >&2\nexit 1\n"
HOOKS = (
    "applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "commit-msg",
    "prepare-commit-msg", "post-commit", "post-checkout", "post-merge",
    "post-index-change", "pre-rebase", "reference-transaction", "fsmonitor-watchman",
)  # fmt: skip

CONFIG = {
    "gpgsign": "[commit]\n\tgpgSign = true\n[tag]\n\tgpgSign = true\n"
    "[gpg]\n\tprogram = /bin/false\n[user]\n\tsigningKey = X\n",
    "autocrlf": "[core]\n\tautocrlf = true\n\tsafecrlf = true\n",
    "eol": "[core]\n\teol = crlf\n",
    "noprefix": "[diff]\n\tnoprefix = true\n[format]\n\tnoprefix = true\n",
    "mnemonicPrefix": "[diff]\n\tmnemonicPrefix = true\n",
    "srcPrefix": "[diff]\n\tsrcPrefix = x/\n\tdstPrefix = y/\n",
    "algorithm": "[diff]\n\talgorithm = histogram\n\tindentHeuristic = false\n",
    "renames": "[diff]\n\trenames = copies\n[status]\n\trenames = copies\n",
    "context": "[diff]\n\tcontext = 9\n\tinterHunkContext = 9\n",
    "suppressBlankEmpty": "[diff]\n\tsuppressBlankEmpty = true\n",
    "orderFile": "[diff]\n\torderFile = {folder}/order\n",
    "external": "[diff]\n\texternal = /bin/false\n",
    "submodule": "[diff]\n\tsubmodule = log\n\tignoreSubmodules = all\n",
    "color": "[color]\n\tui = always\n\tdiff = always\n[core]\n\tpager = false\n",
    "quotePath": "[core]\n\tquotePath = true\n",
    "abbrev": "[core]\n\tabbrev = 5\n",
    "encoding": "[i18n]\n\tcommitEncoding = ISO-8859-1\n"
    "\tlogOutputEncoding = ISO-8859-1\n",
    "whitespace": "[core]\n\twhitespace = trailing-space,cr-at-eol,tab-in-indent\n"
    "[apply]\n\twhitespace = fix\n\tignoreWhitespace = change\n",
    "format": "[format]\n\tattach = x\n\tthread = true\n\tsignOff = true\n"
    "\theaders = X-Mine: yes\\n\n\tto = a@b.example\n\tfrom = true\n"
    "\tcoverLetter = true\n\tsubjectPrefix = MINE\n\tnumbered = true\n"
    "\tsignature = mine\n\tencodeEmailHeaders = false\n\tsuffix = .mine\n"
    "\toutputDirectory = /nonexistent\n\tuseAutoBase = true\n\tnotes = true\n",
    "am": "[am]\n\tkeepcr = false\n\tthreeWay = true\n[mailinfo]\n\tscissors = true\n"
    "\tquotedCr = strip\n",
    "merge": "[merge]\n\tff = only\n\trenames = false\n\tconflictStyle = diff3\n"
    "[rerere]\n\tenabled = true\n\tautoupdate = true\n",
    "fileMode": "[core]\n\tfileMode = false\n\tsymlinks = false\n",
    "ignoreCase": "[core]\n\tprecomposeUnicode = true\n\tprotectNTFS = true\n",
    "sparse": "[core]\n\tsparseCheckout = true\n\tsparseCheckoutCone = true\n",
    "index": "[core]\n\tsplitIndex = true\n\tuntrackedCache = true\n"
    "\tfsmonitor = true\n[index]\n\tversion = 4\n\tsparse = true\n"
    "[feature]\n\tmanyFiles = true\n",
    "bigFile": "[core]\n\tbigFileThreshold = 1\n\tcompression = 0\n",
    "excludes": "[core]\n\texcludesFile = {folder}/ignore\n"
    "\tattributesFile = {folder}/attributes\n[status]\n\tshowUntrackedFiles = no\n"
    "\tshort = true\n\tbranch = true\n",
    "hooks": "[core]\n\thooksPath = {folder}/hooks\n[init]\n\ttemplateDir = "
    "{folder}/template\n\tdefaultBranch = odd\n\tdefaultObjectFormat = sha256\n",
    "logs": "[core]\n\tlogAllRefUpdates = always\n[log]\n\tshowSignature = true\n"
    "\tmailmap = true\n\tdate = relative\n[gc]\n\tauto = 1\n"
    "[maintenance]\n\tauto = true\n",
    "safe": "[safe]\n\tdirectory = \n\tbareRepository = explicit\n"
    "[protocol]\n\tallow = never\n[user]\n\tuseConfigOnly = true\n",
    "filter": '[filter "x"]\n\tclean = /bin/false\n\tsmudge = /bin/false\n'
    "\trequired = true\n",
}  # fmt: skip

ENVIRONMENT = {
    "git": {
        "GIT_DIR": "/nonexistent/.git",
        "GIT_WORK_TREE": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent/index",
        "GIT_OBJECT_DIRECTORY": "/nonexistent",
        "GIT_COMMON_DIR": "/nonexistent",
        "GIT_NAMESPACE": "mine",
        "GIT_AUTHOR_NAME": "other <x> 1",
        "GIT_AUTHOR_DATE": "2001-01-01T00:00:00",
        "GIT_COMMITTER_EMAIL": "other",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00",
        "EMAIL": "other@other.example",
        "GIT_DIFF_OPTS": "--unified=9",
        "GIT_EXTERNAL_DIFF": "/bin/false",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_PARAMETERS": "'diff.noprefix'='true'",
        "GIT_GLOB_PATHSPECS": "1",
        "GIT_ICASE_PATHSPECS": "1",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_TRACE": "1",
        "GIT_PAGER": "false",
    },
    "place": {"TZ": "Pacific/Chatham", "LANG": "tr_TR.UTF-8", "LC_ALL": "C",
              "TMPDIR": "/nonexistent", "POSIXLY_CORRECT": "1", "CDPATH": "/",
              "TAR_OPTIONS": "--version", "GZIP": "-9", "COLUMNS": "20"},
    "ascii": {"LANG": "C", "LC_ALL": "POSIX", "PYTHONUTF8": "0",
              "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    "nothing": {"HOME": None, "XDG_CONFIG_HOME": None, "USER": None, "LANG": None,
                "TERM": "dumb", "PYTHONOPTIMIZE": "2", "PYTHONPATH": "/nonexistent"},
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path):
    """A folder with what the settings above point to."""
    folder = tmp_path / "hostile"
    for name in HOOKS:
        put(folder, f"hooks/{name}", FAIL, "100755")
        put(folder, f"template/hooks/{name}", FAIL, "100755")
    put(folder, "template/info/attributes", "* text eol=crlf -diff\n")
    put(folder, "order", "*.md\nvllm/*\n")
    put(folder, "ignore", "*.py\n*.md\n")
    put(folder, "attributes", "* text eol=crlf -diff filter=x ident\n")
    return folder


def _around(lab, head, patches, env):
    """Apply, change, export, check, with the tool as its own process."""
    done = lab.spawn("apply", "--json", env=env)
    assert done.code == 0, done.text
    assert lab.head() == head
    done = lab.spawn("export", "--json", env=env)
    assert done.code == 0, done.text
    assert {c["what"] for c in done.json["changes"]} == {"unchanged"}
    assert lab.patch_files() == patches
    assert lab.head() == head


def _undisturbed(lab):
    lab.ok("apply")
    return lab.head(), lab.patch_files()


@pytest.fixture(scope="module")
def expected(_made):
    from lab import Lab

    made = Lab(_made / "whole-applied")
    return made.head(), made.patch_files(), made.files()


# Each run gets a few settings: a failure names a handful to look at.
GROUPS = [tuple(CONFIG)[i::6] for i in range(6)]


def _settings(group, folder) -> str:
    return "".join(CONFIG[name].replace("{folder}", str(folder)) for name in group)


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_global_settings_change_nothing(fresh, hostile, expected, group):
    head, patches, files = expected
    put(hostile, "gitconfig", _settings(group, hostile))
    env = {"GIT_CONFIG_GLOBAL": str(hostile / "gitconfig"), "GIT_CONFIG_NOSYSTEM": None,
           "GIT_CONFIG_SYSTEM": str(hostile / "gitconfig"),
           "GIT_TEMPLATE_DIR": str(hostile / "template")}  # fmt: skip
    _around(fresh, head, patches, env)
    assert fresh.files() == files


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_settings_of_the_tree_itself_change_no_commit_and_no_patch(
    lab, hostile, expected, group
):
    head, patches, files = expected
    with open(lab.tree / ".git/config", "a") as stream:
        stream.write(_settings(group, hostile))
    for hook in HOOKS:
        put(lab.tree, f".git/hooks/{hook}", FAIL, "100755")
    names = lab.series()
    shorter = [n for n in names if n not in ("misc-names.patch", "docs-crlf.patch")]
    put(lab.patches, "series", "".join(f"{n}\n" for n in shorter))
    lab.ok("apply")
    put(lab.patches, "series", "".join(f"{n}\n" for n in names))
    lab.ok("apply")
    assert lab.head() == head
    assert lab.files() == files
    done = lab.ok("export", "--json")
    assert {c["what"] for c in done.json["changes"]} == {"unchanged"}
    assert lab.patch_files() == patches
    lab.ok("drop", "docs-crlf")
    assert lab.series() == [n for n in names if n != "docs-crlf.patch"]


@pytest.mark.parametrize(
    "line",
    ["*.py -diff merge=ours", "* binary", "* text=auto whitespace=trailing-space"],
)
def test_attributes_of_the_tree_itself_change_no_patch(lab, expected, line):
    head, patches, _ = expected
    put(lab.tree, ".git/info/attributes", line + "\n")
    put(lab.tree, "vllm/beta.py", (lab.tree / "vllm/beta.py").read_bytes() + b"# x \n")
    lab.commit("core-x", message("core-x"))
    lab.ok("new", "core-x")
    lab.ok("export")
    assert b"+# x \n" in lab.patch_files()["core-x.patch"]
    lab.ok("drop", "core-x")
    assert lab.patch_files() == patches
    assert lab.head() == head


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment_changes_nothing(fresh, expected, name):
    head, patches, files = expected
    _around(fresh, head, patches, ENVIRONMENT[name])
    assert fresh.files() == files
    for verb in ("status", "lint", "version"):
        done = fresh.spawn(verb, env=ENVIRONMENT[name])
        assert done.code == 0, done.text
        assert done.err == ""


def test_umask_changes_no_mode_in_the_commits(fresh, expected):
    head, patches, files = expected
    done = fresh.spawn("apply", preexec_fn=lambda: os.umask(0o077) and None)
    assert done.code == 0, done.text
    assert (fresh.head(), fresh.files()) == (head, files)


def test_home_without_a_name_is_a_sentence(fresh, monkeypatch):
    """A container's nameless user id with no HOME has no home at all."""
    from pathlib import Path

    def nameless(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nameless)
    result = fresh.run("apply", env={"XDG_CACHE_HOME": None})
    assert result.code == 1
    assert "XDG_CACHE_HOME" in result.err


def test_optimized_python_keeps_every_lint_rule(lab):
    """An assert is gone under PYTHONOPTIMIZE; a gate must not be one."""
    path = lab.patches / "core-beta.patch"
    text = path.read_bytes()
    put(lab.patches, "core-beta.patch", text[: text.index(b"diff --git")])
    done = lab.spawn("lint", "--json", env={"PYTHONOPTIMIZE": "2"})
    assert done.code == 1
    assert "diff" in {finding["rule"] for finding in done.json["findings"]}


def test_runs_from_a_hook_of_a_linked_worktree_of_the_project(fresh, expected):
    """git exports GIT_DIR and GIT_INDEX_FILE to hooks; -C does not undo that."""
    head, _, _ = expected
    other = fresh.folder / "linked"
    git(fresh.root, "worktree", "add", "-q", str(other))
    command = f"{sys.executable} {STACK} apply && {sys.executable} {STACK} lint"
    hook = f"#!/bin/sh\nset -e\n{command}\n"
    put(fresh.root, ".git/hooks/pre-commit", hook, "100755")
    put(other, "docs/more.md", "more\n")
    git(other, "add", "docs/more.md")
    refs = git(fresh.root, "for-each-ref", "--format=%(refname)")
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", "commit", "-q", "-m", "More"], cwd=other, capture_output=True,
        env={**env, **fresh.env, "GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": EMAIL,
             "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": EMAIL},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    built = other / "build" / fresh.tree.name
    assert git(built, "rev-parse", "refs/heads/stack") == head
    assert git(fresh.root, "for-each-ref", "--format=%(refname)") == refs
    changed = git(other, "show", "--name-only", "--format=", "HEAD")
    assert changed == "docs/more.md"
    assert git(other, "status", "--porcelain") == ""

"""Every command of README and docs is run by a test, or needs what a test has not.

A command that nobody listed fails here; so does an entry that no page has any more,
and a test that is named and does not exist.  Commands of the tool are parsed, too:
make is asked what it would call, and the options must be the verb's.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from lab import ROOT
from markdown_it import MarkdownIt
from stackkit import cli, patchfile, pins, suite, verified

PAGES = ("README.md", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
))  # fmt: skip

# Run by this test, as it stands or with the names of a made-up project; by this part
# of the suite, on the real one; or by CI.
TESTED = {
    "make apply": "test_apply.py::test_makes_the_commits_that_git_am_makes",
    "make verify": "test_verbs.py::test_verify_proves_a_right_project",
    "make test": ".ci/run",
    "make build PLAN=1": "test_build.py::test_a_plan_prints_every_step_and_does_nothing",
    "make build": "test_build.py::test_where_rocm_is_a_wheel_is_made",
    "make build ARGS=--install": "test_build.py::test_the_wheel_is_installed_alone",
    'make build ARGS="--no-hip"':
        "test_build.py::test_without_rocm_an_archive_and_an_overlay_are_made",
    "make image PLAN=1": "test_image.py::test_a_plan_prints_the_command_and_writes_nothing",
    'make image ARGS="--target export"':
        "test_image.py::test_the_wheel_alone_goes_where_build_puts_it",
    "scripts/stack apply --base PATH": "test_base.py::test_base_option_gives_the_pinned_tree",
    "scripts/stack export": "test_export.py::test_writes_what_plain_git_writes",
    "scripts/stack lint": "test_lint.py::test_a_right_project_has_no_findings",
    "scripts/stack prove fnuz-e8m0-weight-scales": "part prove",
    "scripts/stack prove --jobs 4 mhc-tilelang-gfx942": "part prove",
    'scripts/stack new attention-what --subject "[Bugfix][ROCm] Say what it does"':
        "test_verbs.py::test_new_commits_uncommitted_changes_with_the_trailers_to_fill_in",
    "scripts/stack drop attention-what":
        "test_verbs.py::test_drop_merges_the_later_patches_over_the_gap",
    "scripts/stack test lint prove": "part lint",
    "scripts/stack codegen": "part codegen",
    "scripts/stack hipgate": "part hip",
    "scripts/stack clean":
        "test_verbs.py::test_clean_removes_what_the_tool_made_and_nothing_else",
    "scripts/stack clean --cache":
        "test_verbs.py::test_clean_removes_what_the_tool_made_and_nothing_else",
    "scripts/stack serve --list": "test_docs.py::test_recipes_of_the_page_are_the_recipes",
    "make serve RECIPE=tp4 PLAN=1":
        "test_docs.py::test_a_plan_of_serving_prints_environment_and_command",
    "make bench PLAN=1": "test_bench.py::test_a_dry_run_prints_the_command_and_needs_nothing",
    "make drift TO=newest": "test_rebase.py::test_drift_and_dry_run_change_nothing",
    "scripts/stack drift --update --to v0.22.1 --to v0.23.0 --to v0.26.0 --to v0.33.0":
        "test_rebase.py::test_drift_page_is_written_and_checked",
    "make rebase TO=0.33.0": "test_rebase.py::test_rebase_without_a_stop",
    "scripts/stack range-diff v0.22.0 v0.33.0":
        "test_graph.py::test_range_diff_between_two_releases",
    "scripts/stack rebase --continue":
        "test_rebase.py::test_continue_takes_the_files_as_they_are",
    'scripts/stack rebase --skip --fate "absorbed vllm-project/vllm#1234, v0.33.0"':
        "test_rebase.py::test_skip_with_a_fate",
    "scripts/stack rebase --abort": "test_rebase.py::test_abort_restores_everything",
    "scripts/stack graph": "test_graph.py::test_graph_finds_what_a_patch_is_built_on",
    "scripts/stack bisect run -- CMD": "test_graph.py::test_bisect_finds_the_patch",
    "scripts/stack pr fnuz-e8m0-weight-scales --onto ../vllm":
        "test_pr.py::test_branch_holds_the_patch_and_none_of_our_trailers",
    "scripts/stack doctor --serve": "test_preflight.py::test_the_command_fails_where_nothing_is",
}  # fmt: skip

# A prefix of a command, and what it needs. The clients among them are tested against
# a stand-in for the server.
NEEDS = {
    "docker run": "an MI300X",
    "scripts/stack doctor --serve --gpus 8": "an MI300X",
    "stat -c %g /dev/kfd": "an MI300X",
    'make serve RECIPE=tp8-ep ARGS="--model': "an MI300X",
    "curl http://127.0.0.1:8000": "an MI300X",
    "make smoke": "an MI300X",
    "make accept": "an MI300X",
    "make bench URL": "an MI300X",
    "vllm serve": "an MI300X",
    "vllm bench": "an MI300X",
    "python -m pytest": "an MI300X",
    "python3 -m pytest": "an MI300X",
    "pytest -q tests": "an MI300X",
    "python3 -m pip install --no-deps": "ROCm and a wheel",
    "python3 bench/": "a GPU",
    ".venv/bin/python bench/instructions.py run": "v0.33.0's archive",
    ".venv/bin/python bench/ogs_tiles.py run": "a wheel of vLLM",
    "pip download --no-deps vllm": "the package index",
    "python3 FOLDER/": "a GPU",
    "make image ARGS=\"--target overlay\"": "docker",
    "make image": "docker",
    "make image ARGS=--stand-in": "root, buildah and debootstrap",
    "scripts/stack codegen --update": "a person",
    "git pull": "a remote",
    "git rebase -i": "a person",
    "git -C build/v0.22.0 commit --amend": "a person",
    "cd ": "a shell",
    "mkdir -p .github && ln -s": "a checkout",
}  # fmt: skip


def blocks(page: str) -> Iterator[str]:
    tokens = MarkdownIt().parse((ROOT / page).read_text("utf-8"))
    for token in tokens:
        if token.type in ("code_block", "fence"):
            yield token.content


@functools.cache
def commands() -> dict[str, str]:
    """Every command of the pages, without comments, and the page it is on."""
    found = {}
    for page in PAGES:
        for block in blocks(page):
            # A line goes on after a backslash, or inside of quotes.
            text = re.sub(r"\\\n\s*", "", block)
            text = re.sub(r"('[^'\n]*)\n\s*([^'\n]*')", r"\1 \2", text)
            for line in text.splitlines():
                line = re.sub(r"\s{2,}#.*", "", line).strip()
                # Else it is the content of a file, or in words what a person does.
                program = without_assignments(line).split(" ")[0]
                if re.fullmatch(r"[A-Za-z./][\w./-]*", program):
                    found.setdefault(line, page)
    return found


def without_assignments(command: str) -> str:
    return re.sub(r"^(\w+=[\w$./-]+ )+", "", command)


def needed(command: str) -> str | None:
    command = without_assignments(command)
    fitting = [key for key in NEEDS if command.startswith(key)]
    return NEEDS[max(fitting, key=len)] if fitting else None


def test_every_command_is_tested_or_says_what_it_needs():
    for command, page in commands().items():
        tested, needs = command in TESTED, needed(command)
        assert tested or needs, f"{page}: {command!r} is in neither table"


def test_no_entry_is_left_over():
    everything = list(commands())
    assert set(TESTED) <= set(everything)
    for prefix in NEEDS:
        plain = (without_assignments(x) for x in everything if x not in TESTED)
        used = [x for x in plain if x.startswith(prefix)]
        assert used, prefix


@pytest.mark.parametrize("command", TESTED)
def test_the_test_that_runs_a_command_is_there(command):
    where = TESTED[command]
    if where.startswith("part "):
        assert where.removeprefix("part ") in suite.PARTS
        return
    if where == ".ci/run":
        assert f"exec {command}\n" in (ROOT / where).read_text()
        return
    file, name = where.split("::")
    source = (Path(__file__).parent / file).resolve().read_text()
    assert re.search(rf"^def {name}", source, re.MULTILINE), TESTED[command]
    verb = re.search(r"(?:make|scripts/stack) (\w+)", command)
    # It is called in the file, by its name or as a function of its module.
    assert verb and re.search(rf"\b{verb[1]}\b", source)


@functools.cache
def calls(command: str) -> tuple[str, ...]:
    """What make would call for a command of the docs."""
    if command.startswith("scripts/stack "):
        return (command,)
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return tuple(re.sub(r"\\\n\s*", "", done.stdout).strip().splitlines())


def inline() -> Iterator[tuple[str, str]]:
    """Commands of the tool inside of sentences."""
    for page in PAGES:
        for token in MarkdownIt().enable("table").parse((ROOT / page).read_text()):
            for child in token.children or ():
                text = " ".join(child.content.split())
                words = ("make ", "scripts/stack ")
                if "VERB" in text:  # stands for all of them
                    continue
                if child.type == "code_inline" and text.startswith(words):
                    yield page, text


def tool_commands() -> list[str]:
    found = [x for x in commands() if x.startswith(("make ", "scripts/stack "))]
    found += [text for _, text in inline()]
    return sorted(set(found))


@pytest.mark.parametrize("command", tool_commands())
def test_make_and_the_tool_know_every_option(command):
    for line in calls(command):
        program, verb, *rest = shlex.split(line)
        assert program == "scripts/stack"
        if verb in ("--help", "-h"):
            continue
        known = cli.main.commands.get(verb)
        assert known, f"there is no verb {verb}"
        known.make_context(verb, list(rest), resilient_parsing=False)


def test_an_option_that_is_none_would_be_seen():
    with pytest.raises(click.UsageError):
        test_make_and_the_tool_know_every_option("make build ARGS=--instal")
    with pytest.raises(AssertionError):
        test_make_and_the_tool_know_every_option("scripts/stack biuld")
    with pytest.raises(AssertionError):
        test_make_and_the_tool_know_every_option("make biuld")


def test_make_calls_the_tool():
    assert calls("make test") == ("scripts/stack test",)
    assert calls("make build PLAN=1") == ("scripts/stack build --dry-run",)
    (line,) = calls("make accept URL=http://127.0.0.1:8000 GSM8K=test.jsonl")
    assert shlex.split(line) == [
        "scripts/stack", "accept", "http://127.0.0.1:8000", "--gsm8k", "test.jsonl",
    ]  # fmt: skip
    (line,) = calls('make smoke RECIPE=tp8-ep ARGS="--checkpoint /models/flash"')
    assert line.split()[1:4] == ["smoke", "--recipe", "tp8-ep"]


def run(*arguments: str) -> str:
    """The tool on this project; only what reads."""
    command = [ROOT / "scripts" / "stack", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_recipes_of_the_page_are_the_recipes():
    listed = dict(re.findall(r"^([\w-]+): (\d) GPUs", run("serve", "--list"), re.M))
    page = (ROOT / "docs" / "serving.md").read_text()
    assert dict(re.findall(r"^\| `([\w-]+)` \| (\d) \|", page, re.M)) == listed


def test_a_plan_of_serving_prints_environment_and_command():
    line = run("serve", "tp4", "--dry-run")
    assert line.startswith("VLLM_ROCM_USE_AITER=1 ")
    assert "vllm serve --config" in line and line.endswith("tp4.yaml --port 8000\n")
    line = run("serve", "tp4", "--dry-run", "--", "--max-num-seqs", "64")
    assert "--max-num-seqs 64" in line
    line = run("serve", "tp4", "--dry-run", "--model", "/models/flash", "--eager")
    assert "vllm serve /models/flash --config" in line and "--enforce-eager" in line


def test_links_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#\s]+)\)", text):
            if "://" not in target:
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


# -- what is verified where -------------------------------------------------------

PROJECT = pins.load(ROOT)
PATCHES = patchfile.load(PROJECT.patches(PROJECT.pin(None)))


def test_the_table_of_verification_is_that_of_the_trailers():
    text = verified.page(PROJECT).read_text()
    assert verified.renewed(text, PATCHES) == text, "scripts/stack verified --update"
    for patch in PATCHES:
        assert f"[`{patch.name}`]" in text


def test_verified_fails_if_the_page_is_stale(lab):
    page = lab.root / "docs" / "verification.md"
    page.write_text(f"# Head\n\n{verified.BEGIN}\n{verified.END}\n\nTail.\n")
    result = lab.run("verified")
    assert result.code == 1
    assert "verified --update" in result.text
    lab.ok("verified", "--update")
    text = page.read_text()
    assert text.startswith("# Head\n") and text.endswith("\n\nTail.\n")
    assert "[`core-alpha`](concerns/small.md) | yes |" in text
    lab.ok("verified")
    page.write_text("# Head\n")
    result = lab.run("verified")
    assert result.code == 1 and "has no place for the table" in result.text


def test_nothing_is_claimed_to_have_run_on_an_mi300x():
    """As long as no patch says so, no page does."""
    assert all("gfx942" not in verified.layers(patch) for patch in PATCHES)
    for page in ("README.md", "docs/verification.md", "docs/serving.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert re.search(r"[Nn]othing (here|on this page)? ?has (yet )?run on", text)


# -- public CI -------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / "ci" / "workflows").glob("*.yml"))


def jobs() -> Iterator[tuple[str, str, dict]]:
    import yaml

    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield path.name, name, job


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_keep_githubs_schema(path):
    check = ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"]
    program = Path(sysconfig.get_path("scripts")) / check[0]
    done = subprocess.run([program, *check[1:], path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_workflow_with_a_wrong_key_would_be_seen(tmp_path):
    path = tmp_path / "x.yml"
    path.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:", 1))
    with pytest.raises(AssertionError):
        test_workflows_keep_githubs_schema(path)


def test_each_job_is_one_make_target():
    for file, name, job in jobs():
        lines = [step["run"] for step in job["steps"] if "run" in step]
        assert len(lines) == 1, (file, name)
        words = shlex.split(lines[0])
        assert words[0] == "make" and "\n" not in lines[0].strip(), (file, name)
        # Options of make have a =, and nothing comes after them.
        targets = [word for word in words[1:] if not re.match(r"[A-Z0-9]+=", word)]
        assert len(targets) == 1 and re.fullmatch(r"[\w-]+", targets[0]), (file, name)


@pytest.mark.parametrize(
    "file, name, job", [pytest.param(*x, id=f"{x[0]}-{x[1]}") for x in jobs()]
)
def test_targets_and_options_of_jobs_exist(file, name, job):
    (line,) = (step["run"] for step in job["steps"] if "run" in step)
    line = re.sub(r"\$\{\{ matrix.release \}\}", "v0.22.0", line)
    line = line.replace("$CHECKPOINT", "/models/flash")
    verb = line.split()[1]
    if file == "mi300x.yml" and verb != "build":
        line += " RECIPE=tp8-ep" + (" GSM8K=x" if verb == "accept" else "")
    test_make_and_the_tool_know_every_option(line)


def test_every_release_is_in_every_matrix():
    releases = list(PROJECT.pins)
    for file, name, job in jobs():
        if file in ("no-gpu.yml", "release.yml"):
            assert job["strategy"]["matrix"]["release"] == releases, name

"""Prepares a patch for a vLLM pull request; a person reviews, pushes and opens it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import (
    apply,
    base,
    carry,
    git,
    hooks,
    patchfile,
    prove,
    target,
    testenv,
    trailers,
    worktree,
)
from .errors import CONFLICT, REFUSED, USAGE, StackError
from .hooks import FAILED, NOT_RUN, PASSED, Check
from .patchfile import SUFFIX, Patch
from .pins import Pin, Project
from .report import Progress, Step
from .worktree import BRANCH, HALF_MADE, Tree

FOLDER = "pr"
PREPARED = "refs/stack/pr"  # what was prepared: the branch's tip
BODY, TITLE = "body.md", "title.txt"
_TO_FILL = "**TO FILL IN**"
_LARGE = 500


@dataclass(frozen=True)
class Prepared:
    """A branch and its texts, ready to be looked at."""

    folder: Path
    tree: Path
    branch: str
    base: str
    commits: tuple[str, ...]
    title: str
    body: Path
    mails: tuple[Path, ...]
    target: target.Target
    proofs: list[prove.Proof]
    checks: list[Check]
    remote: str  # the clone that has the branch now; empty if none

    @property
    def ok(self) -> bool:
        return not any(check.state == FAILED for check in self.checks)


def prepare(
    project: Project,
    pin: Pin,
    name: str,
    *,
    onto: str,
    remote: Path | None,
    left_out: tuple[str, ...],
    discard: bool,
    jobs: int,
    directory: Path,
    progress: Progress,
    step: Step,
) -> Prepared:
    """Make build/pr/<patch>: a branch of the patch and its prerequisites, and texts.

    Nothing leaves the machine.  The caller holds no lock.

    Args:
        project, pin: The stack.
        name: The patch.
        onto: See :func:`target.resolve`.
        remote: A local clone of vLLM that is to have the branch, too, on its own
            commit of the target.
        left_out: Hooks that are not to run.
        discard: Whether a prepared branch that was edited may be replaced.
        jobs: For ``prove``.
        directory: What a relative path is relative to.
        progress: Told of download progress.
        step: Told what is being done.

    Raises:
        StackError: if the patch does not go onto the target by itself, the submitter
            is unknown, or an edited branch would be replaced.
    """
    patches = patchfile.load(project.patches(pin))
    patch = patchfile.find(patches, name)
    wanted = [*carry.needed(patches, patch.name), patch.name]
    clone = _clone(remote)
    who = _submitter(clone)
    place = project.build / FOLDER / patch.name
    with worktree.lock(project, lambda: step("waiting for another run")):
        tree = Tree(project, pin)
        tree.sweep()
        if not discard:
            _require_unedited(place)
        with tree.rehearsal(None, progress):
            repository = tree.repository
            stack = apply.known_commits(tree, patches)
            step(onto)
            found = target.resolve(repository, project, pin, onto, directory, progress)
            chosen = [applied for applied in stack if applied.patch.name in wanted]
            trees = _merge(repository, stack, chosen, pin, found, step)
            commits = _make(
                project, repository, place, trees, found, clone or found.clone, who
            )
    step(f"{patch.name}: red and green")
    proofs = _proofs(project, pin, patch, jobs, progress, step)
    work = git.Repository(place / "vllm" / ".git", place / "vllm")
    start = work.resolve(worktree.BASE)
    assert start is not None
    checks = [
        *_own_checks(work, start, commits, who),
        *_hook_checks(project, work, start, left_out, step),
    ]
    mails = _mails(work, place, commits, wanted)
    checks.append(_am_check(work, start, commits, mails))
    title = work.commit(commits[-1]).subject
    (place / TITLE).write_text(title + "\n", "utf-8")
    body = place / BODY
    body.write_text(
        _body(work, start, patch, wanted[:-1], pin, found, proofs, checks), "utf-8"
    )
    if clone is not None:
        _lend(clone, work, patch.name, commits[-1], discard)
    _note(work, place)
    return Prepared(
        place,
        place / "vllm",
        patch.name,
        start,
        tuple(commits),
        title,
        body,
        tuple(mails),
        found,
        proofs,
        checks,
        str(remote) if clone is not None else "",
    )


# -- who, where ------------------------------------------------------------------


def _clone(remote: Path | None) -> git.Repository | None:
    if remote is None:
        return None
    found = base.open_repository(remote)
    if found is None:
        raise StackError(
            f"--remote {remote}: is not a git repository on this machine",
            mend="name a local clone of vLLM; nothing is ever pushed",
            code=USAGE,
        )
    return found


def _submitter(clone: git.Repository | None) -> git.Identity:
    """The person who sends it, from that person's own git configuration."""
    name, email = git.configured_identity(clone)
    if not name or not email:
        raise StackError(
            "your git configuration does not say who you are, and a pull request is "
            "signed off by the person who sends it",
            mend="git config --global user.name 'Your Name' && "
            "git config --global user.email you@example.org",
        )
    if email == base.IDENTITY.email:
        raise StackError(
            f"your git configuration says {name} <{email}>, which is the project, not "
            "a person who can sign off",
            mend="git config --global user.email you@example.org",
        )
    return git.Identity(name, email, "")


def edited(place: Path) -> tuple[str, ...]:
    """What a person changed in a prepared branch, one line each."""
    work = git.Repository(place / "vllm" / ".git", place / "vllm")
    if not (place / "vllm" / ".git").is_dir():
        return ()
    noted = work.resolve(PREPARED)
    if noted is None:
        return ()
    record = work.commit(noted)
    lines = [f"uncommitted {path}" for path in work.dirty()]
    if work.resolve("HEAD") != record.parents[0]:
        lines.append(f"commit {work.resolve('HEAD')}")
    for name, entry in work.entries(tree=record.tree).items():
        path = place / name
        if path.is_file() and git.blob_id(path.read_bytes()) != entry.blob:
            lines.append(f"edited {path.name}")
    return tuple(lines)


def _require_unedited(place: Path) -> None:
    lines = edited(place)
    if lines:
        raise StackError(
            f"{place} was edited since it was prepared",
            mend=f"mv {place} {place}.mine, or scripts/stack pr --discard",
            details=lines,
            code=REFUSED,
        )


def _note(work: git.Repository, place: Path) -> None:
    """Remember what was prepared, so that an edit of a person is seen."""
    tip = work.resolve("HEAD")
    assert tip is not None
    files = [path for path in sorted(place.iterdir()) if path.is_file()]
    entries = {
        path.name: git.Entry("100644", work.write_blob(path.read_bytes()))
        for path in files
    }
    record = work.write_commit(
        work.make_tree(entries), [tip], b"As prepared\n", base.IDENTITY, base.IDENTITY
    )
    work.update_refs({PREPARED: record})


# -- the branch ------------------------------------------------------------------


def _merge(
    repository: git.Repository,
    stack: list[apply.Applied],
    chosen: list[apply.Applied],
    pin: Pin,
    found: target.Target,
    step: Step,
) -> list[tuple[apply.Applied, str]]:
    """Merge the chosen patches onto the target, one after the other: their trees."""
    tip = base.commit(repository, found.pin)
    trees = []
    with repository.merging() as merging:
        carrier = carry.Carrier(repository, merging, stack, pin.tree, found)
        for applied in chosen:
            step(applied.patch.name)
            outcome = carrier.judge(applied, tip)
            last = applied is chosen[-1]
            if outcome.verdict in carry.STOPPING or (
                last and outcome.verdict in carry.DROPPING
            ):
                details = [*outcome.reasons, *(x.path for x in outcome.conflicts)]
                raise StackError(
                    f"{applied.patch.name} is {outcome.verdict} on {found.release}"
                    + ("" if last else f", and {chosen[-1].patch.name} needs it"),
                    mend=f"move the stack first: scripts/stack rebase --to "
                    f"{found.release}, then scripts/stack pr --release {found.release}",
                    details=tuple(details),
                    code=CONFLICT,
                )
            if outcome.verdict not in carry.DROPPING:
                assert outcome.tree is not None
                tip = apply.moved_commit(repository, applied.commit, outcome.tree, tip)
                trees.append((applied, outcome.tree))
    return trees


def _make(
    project: Project,
    repository: git.Repository,
    place: Path,
    trees: list[tuple[apply.Applied, str]],
    found: target.Target,
    clone: git.Repository | None,
    who: git.Identity,
) -> list[str]:
    """Make the branch in a repository of its own; returns its commits."""
    folder = Path(tempfile.mkdtemp(prefix=HALF_MADE, dir=project.build))
    try:
        work = git.Repository.create(folder / "vllm" / ".git", folder / "vllm")
        work.run("config", "core.autocrlf", "false")
        work.run("config", "user.name", who.name)
        work.run("config", "user.email", who.email)
        work.copy_from(repository, found.pin.tree, *(tree for _, tree in trees))
        start = _start(work, found, clone)
        tip = start
        for applied, tree in trees:
            old = repository.commit(applied.commit)
            author = git.Identity(who.name, who.email, old.author.date)
            tip = work.write_commit(tree, [tip], old.message, author, author)
        name = trees[-1][0].patch.name
        branch = f"refs/heads/{name}"
        work.update_refs({worktree.BASE: start, branch: tip})
        work.run("symbolic-ref", "HEAD", branch)
        work.run("reset", "--hard", "--quiet")
        work.filter_messages(start, branch, f"{__package__}.upstream")
        commits = work.chain(start, branch)
        _require_clean(work, commits, trees, who)
        folder.chmod(0o755)
        place.parent.mkdir(exist_ok=True)
        if place.exists():
            shutil.rmtree(place)
        folder.rename(place)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return commits


def _start(
    work: git.Repository, found: target.Target, clone: git.Repository | None
) -> str:
    """The commit that the branch starts from: upstream's own, if a clone has it."""
    if clone is None:
        return base.commit(work, found.pin)
    commit = clone.resolve(found.pin.commit + "^{commit}")
    if commit is None or clone.commit(commit).tree != found.pin.tree:
        raise StackError(
            f"the clone does not have {found.release} ({found.pin.commit})",
            mend=f"git -C PATH fetch {found.pin.url} {found.pin.commit}",
        )
    work.copy_shallow_from(clone, commit)
    return commit


def filtered(message: bytes, signer: bytes) -> bytes:
    """A message as upstream wants it: none of our trailers, and a sign-off.

    ``git filter-repo`` calls this for each commit of the branch.
    """
    text = message.decode("utf-8", "surrogateescape")
    body, found = trailers.split(text)
    kept = [t for t in found if t.key in trailers.UPSTREAM_KEYS]
    lines = [f"{t.key}: {t.value}" for t in kept]
    sign_off = "Signed-off-by: " + signer.decode("utf-8", "surrogateescape")
    if sign_off not in lines:
        lines.append(sign_off)
    whole = body.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"
    return whole.encode("utf-8", "surrogateescape")


def _require_clean(
    work: git.Repository,
    commits: list[str],
    trees: list[tuple[apply.Applied, str]],
    who: git.Identity,
) -> None:
    """Require that the filter did what it should and nothing else."""
    signer = f"{who.name} <{who.email}>".encode()
    for commit, (applied, tree) in zip(commits, trees, strict=True):
        made = work.commit(commit)
        old = applied.patch.author_and_message[1]
        if made.tree != tree or made.message != filtered(old, signer):
            raise StackError(
                f"git filter-repo changed more than the trailers of {made}"
            )


def _lend(
    clone: git.Repository, work: git.Repository, name: str, tip: str, discard: bool
) -> None:
    """Put the branch into a local clone, which has its base."""
    ref = f"refs/heads/{name}"
    there = clone.resolve(ref)
    if there not in (None, tip) and not discard:
        raise StackError(
            f"{clone.git_dir} has another branch {name}",
            mend=f"git branch -m {name} {name}-old there, or --discard",
            code=REFUSED,
        )
    if clone.branch() == ref:
        raise StackError(
            f"{clone.git_dir} has {name} checked out",
            mend="git switch another branch there",
            code=REFUSED,
        )
    clone.copy_from(work, tip)
    clone.update_refs({ref: tip})


def _mails(
    work: git.Repository, place: Path, commits: list[str], names: list[str]
) -> list[Path]:
    mails = []
    names = names[len(names) - len(commits) :]
    with git.Repository.borrowing(work) as plain:
        for number, (commit, name) in enumerate(zip(commits, names, strict=True), 1):
            path = place / f"{number:04}-{name}{SUFFIX}"
            path.write_bytes(plain.format_patch(commit))
            mails.append(path)
    return mails


# -- evidence --------------------------------------------------------------------


def _proofs(
    project: Project,
    pin: Pin,
    patch: Patch,
    jobs: int,
    progress: Progress,
    step: Step,
) -> list[prove.Proof]:
    kept = prove.known(project, pin, patch.name, progress)
    if kept is not None:
        return [kept]
    testenv.ensure(project, step)
    return prove.prove(
        project, pin, (patch.name,), jobs=jobs, progress=progress, step=step
    )


def _own_checks(
    work: git.Repository, start: str, commits: list[str], who: git.Identity
) -> list[Check]:
    tree = work.commit(commits[-1]).tree
    title = work.commit(commits[-1]).subject
    messages = [
        work.commit(commit).message.decode("utf-8", "replace") for commit in commits
    ]
    checks = [_title_check(work, tree, title)]
    sign_off = f"Signed-off-by: {who.name} <{who.email}>"
    unsigned = [m for m in messages if sign_off not in m.splitlines()]
    checks.append(
        Check("sign-off", FAILED if unsigned else PASSED, f"{sign_off}, every commit")
    )
    ours = [
        found.key
        for message in messages
        for found in trailers.split(message)[1]
        if found.key in trailers.KEYS
    ]
    detail = ", ".join(ours) or "none of the stack's own"
    checks.append(Check("trailers", FAILED if ours else PASSED, detail))
    spaces = work.start("diff", "--check", start, commits[-1])
    checks.append(
        Check(
            "git diff --check",
            FAILED if spaces.returncode else PASSED,
            spaces.stdout.decode("utf-8", "replace").split("\n")[0]
            or "no bad white space",
        )
    )
    checks.append(_size_check(work, start, commits[-1]))
    return checks


def _title_check(work: git.Repository, tree: str, title: str) -> Check:
    """The title against the target's own rule: its workflow, else its guide's tags."""
    workflow = _read(work, tree, ".github/workflows/pr-title.yml")
    pattern = re.search(r"pattern='(.+)'", workflow)
    if pattern:
        source = pattern[1].replace("[[:space:]]", r"\s").replace("[:space:]", r"\s")
        good = re.fullmatch(source.replace("[^][]", r"[^\]\[]"), title) is not None
        detail = f"{title!r} against {pattern[1]} of pr-title.yml"
        return Check("title", PASSED if good else FAILED, detail)
    guide = _read(work, tree, "docs/contributing/README.md")
    tags = re.findall(r"^- `\[([^\]]+)\]", guide, re.MULTILINE)
    if not tags:
        return Check("title", NOT_RUN, "the target states no rule for titles")
    first = re.match(r"\[([^\]]+)\]", title)
    good = first is not None and first[1] in tags
    detail = f"{title!r}; the first tag has to be one of {', '.join(tags)}"
    return Check("title", PASSED if good else FAILED, detail)


def _size_check(work: git.Repository, start: str, tip: str) -> Check:
    listing = work.text("diff", "--numstat", "--no-renames", start, tip)
    lines = 0
    for row in listing.splitlines():
        added, removed, path = row.split("\t")
        code = path.endswith(".py") and not path.startswith("tests/")
        if code and "/ops/" not in path and "kernel" not in path:
            lines += int(added) + int(removed)
    detail = f"{lines} lines outside tests and kernels"
    if lines > _LARGE:
        return Check(
            "size", FAILED, f"{detail}: over {_LARGE}, an RFC issue comes first"
        )
    return Check("size", PASSED, detail)


def _hook_checks(
    project: Project,
    work: git.Repository,
    start: str,
    left_out: tuple[str, ...],
    step: Step,
) -> list[Check]:
    tip = work.resolve("HEAD")
    assert tip is not None
    changed = [
        path
        for path, (_, new) in work.changed(start, tip).items()
        if new.blob != git.NO_BLOB
    ]
    with tempfile.TemporaryDirectory(prefix="stack-hooks-") as name:
        folder = Path(name) / "vllm"
        checkout = git.Repository.create(folder / ".git", folder)
        checkout.borrow_from(work)
        checkout.update_refs({BRANCH: tip})
        checkout.run("reset", "--hard", "--quiet")
        return hooks.run(project, folder, changed, left_out, step)


def _am_check(
    work: git.Repository, start: str, commits: list[str], mails: list[Path]
) -> Check:
    """Whether plain ``git am`` makes the branch's tree of the target's."""
    with tempfile.TemporaryDirectory(prefix="stack-am-") as name:
        folder = Path(name) / "vllm"
        checkout = git.Repository.create(folder / ".git", folder)
        checkout.borrow_from(work)
        checkout.update_refs({BRANCH: start})
        checkout.run("reset", "--hard", "--quiet")
        author = work.commit(commits[-1]).author
        done = checkout.start(
            "am", *map(os.fspath, mails), env=author.environment("COMMITTER")
        )
        made = checkout.resolve("HEAD^{tree}")
    if done.returncode or made != work.commit(commits[-1]).tree:
        said = done.stderr.decode("utf-8", "replace").strip().split("\n")[0]
        return Check("git am", FAILED, said or "gives another tree")
    return Check("git am", PASSED, "the mails give the branch's tree")


# -- the text --------------------------------------------------------------------


def _read(work: git.Repository, tree: str, path: str) -> str:
    entry = work.entries([path], tree=tree).get(path)
    return work.read(entry.blob).decode("utf-8", "replace") if entry else ""


def _body(
    work: git.Repository,
    start: str,
    patch: Patch,
    needed: list[str],
    pin: Pin,
    found: target.Target,
    proofs: list[prove.Proof],
    checks: list[Check],
) -> str:
    """The description, in the sections of the target's own template."""
    tree = work.commit(start).tree
    template = _read(work, tree, ".github/PULL_REQUEST_TEMPLATE.md")
    template = re.sub(r"<!--(?! markdownlint).*?-->", "", template, flags=re.DOTALL)
    template = re.sub(
        r"^PLEASE FILL IN THE PR DESCRIPTION.*$", "", template, flags=re.M
    )
    form, rule, checklist = template.partition("\n---\n")
    headings = re.findall(r"^## (.+)$", form, re.MULTILINE)
    message = trailers.split(patch.message)[0].split("\n", 1)[1].strip()
    plan = _plan(patch, found, needed)
    result = _result(patch, pin, found, proofs, checks)
    first, _, rest = message.partition("\n\n")
    texts = {
        "Purpose": message,
        "Test Plan": plan,
        "Test Result": result,
        "Overview": _flow(first),
        "Claims": _claims(patch, proofs),
        "Validation": f"{plan}\n\n{result}",
        "Details": rest or first,
    }
    parts = [form.split("\n## ")[0].strip()] if headings else []
    for heading in headings or ("Purpose", "Test Plan", "Test Result"):
        parts.append(f"## {heading}\n\n{texts.get(heading.strip(), _TO_FILL)}")
    parts.append(_for_people(work, tree, patch))
    if rule:
        parts.append(f"---\n{checklist.strip()}")
    return "\n\n".join(part for part in parts if part.strip()) + "\n"


def _flow(text: str) -> str:
    return " ".join(text.split())


def _plan(patch: Patch, found: target.Target, needed: list[str]) -> str:
    nodes = [test.node for test in trailers.test_ids(patch.trailers)]
    lines = []
    if nodes:
        files = sorted({node.split("::")[0] for node in nodes})
        lines += ["```bash", f"pytest {' '.join(files)}", "```"]
    else:
        lines.append(f"No test: {patch.trailer('Tests').removeprefix('none: ')}.")
    if needed:
        lines += [
            "",
            f"The branch holds what this builds on first: {', '.join(needed)}.",
        ]
    return "\n".join(lines)


def _claims(patch: Patch, proofs: list[prove.Proof]) -> str:
    what = re.sub(r"^(\[[^\]]*\])+ *", "", patch.subject)
    tests = sum(len(proof.tests) for proof in proofs)
    lines = [f"- {what}."]
    if tests:
        lines.append(f"- {tests} tests fail without the change and pass with it.")
    lines.append(f"- Risk: {patch.trailer('Risk')}.")
    return "\n".join(lines)


def _result(
    patch: Patch,
    pin: Pin,
    found: target.Target,
    proofs: list[prove.Proof],
    checks: list[Check],
) -> str:
    lines = []
    rows = [test for proof in proofs for test in proof.tests]
    if rows:
        lines += [
            f"Without the change and with it, on vLLM {pin.release} (no GPU: Triton's "
            "interpreter and CPU tensors):",
            "",
            "| test | without | with |",
            "|---|---|---|",
        ]
        for row in rows:
            node = row.node.replace("|", "\\|")
            lines.append(f"| `{node}` | {_cell(row.red)} | {_cell(row.green)} |")
        if found.pin.tree != pin.tree:
            lines += ["", f"Not run again on {found.release}: {_TO_FILL}."]
    lines += [
        "",
        f"Shown on: {patch.trailer('Verified-On')}. "
        f"Not verified: {_flow(patch.trailer('Unverified'))}.",
        "",
        f"Checks, those of {hooks.CONFIG} on the changed files:",
        "",
        "| check | result | |",
        "|---|---|---|",
    ]
    for check in checks:
        if check.state != hooks.NO_FILES:
            lines.append(f"| {check.name} | {check.state} | {_cell(check.detail)} |")
    idle = [check.name for check in checks if check.state == hooks.NO_FILES]
    if idle:
        lines += ["", f"None of the changed files is for: {', '.join(idle)}."]
    return "\n".join(lines).strip()


def _cell(text: str) -> str:
    return _flow(text).replace("|", "\\|")


def _for_people(work: git.Repository, tree: str, patch: Patch) -> str:
    """What only the person who sends it can say."""
    rules = _read(work, tree, "AGENTS.md")
    searches = re.findall(r"^(gh (?:issue|pr) .+)$", rules, re.MULTILINE)
    lines = [
        "## Why this is not a duplicate",
        "",
        f"{_TO_FILL}: what these found, and when.",
        "",
        "```bash",
        *(searches or ['gh pr list --repo vllm-project/vllm --search "KEYWORDS"']),
        "```",
        "",
        "## AI assistance",
        "",
        f"{_TO_FILL}: whether AI was used, for what, and that you have reviewed every "
        "line and run the tests yourself.",
    ]
    if re.search(r"[Mm]odel evaluation", rules):
        lines += ["", f"Model evaluation: {_TO_FILL}, or why output cannot change."]
    return "\n".join(lines)


def summary(prepared: Prepared) -> dict[str, Any]:
    """What was prepared, for JSON."""
    return {
        "folder": prepared.folder,
        "tree": prepared.tree,
        "branch": prepared.branch,
        "base": prepared.base,
        "commits": list(prepared.commits),
        "title": prepared.title,
        "body": prepared.body,
        "mails": list(prepared.mails),
        "onto": prepared.target.describe(),
        "remote": prepared.remote,
    }

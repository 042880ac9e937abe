"""How one patch fares on another base: a true three-way merge, and then doubt.

The merge's base is the very tree the patch was made on, so nothing is re-applied by
its text.  The verdicts:

``clean``
    Every file is as the patch knew it; its diff is the same by construction.
``merged``
    Merged, and nothing speaks against it.
``conflict``
    Both sides changed the same lines.
``empty``
    The merge leaves nothing of it.
``absorbed``
    An upstream commit makes the same change (patch id), and the merge leaves nothing
    or, where later commits changed those lines, left nothing right after it.
``suspect``
    Merged, but a person has to look: a line landed in another place, upstream names
    its pull request, most of it is there already, or what it uses is gone.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import git, landing, trailers
from .apply import Applied
from .base import IDENTITY
from .history import Change
from .patchfile import Patch
from .target import Target

CLEAN, MERGED, CONFLICT = "clean", "merged", "conflict"
EMPTY, ABSORBED, SUSPECT = "empty", "absorbed", "suspect"
VERDICTS = (CLEAN, MERGED, CONFLICT, EMPTY, ABSORBED, SUSPECT)
# These drop a patch by themselves; nothing else does.
DROPPING = (EMPTY, ABSORBED)
# These stop a rebase until a person has decided.
STOPPING = (CONFLICT, SUSPECT)

# Of the distinct lines that a patch adds to a file, how much of them upstream may have
# before the patch is taken for absorbed in other words.
_ALIKE = 0.6
# How much of a moved file has to be as it was before lines are put into it unasked.
_MOVED = 70
CODE = (".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp",
         ".cmake", ".toml", "CMakeLists.txt")  # fmt: skip
_MOST = 8
# A word that at most this share of the code files has says what a change is about.
_RARE = 0.015
# More callers than this, and the name is not one function's.
_CALLERS = 20


@dataclass(frozen=True)
class Hunk:
    """One place that both sides changed."""

    line: int  # of the new file, from 1
    place: str  # function, class or key; empty for the file itself
    base: tuple[str, ...]
    upstream: tuple[str, ...]
    patch: tuple[str, ...]
    causes: tuple[str, ...]  # upstream commits that touched these lines
    now_in: tuple[str, ...]  # files that have what upstream took away here


@dataclass(frozen=True)
class FileConflict:
    """One file that could not be merged."""

    path: str
    kind: str
    hunks: tuple[Hunk, ...]
    causes: tuple[str, ...]  # upstream commits that touched the file


@dataclass(frozen=True)
class Outcome:
    """How one patch fared."""

    patch: str
    verdict: str
    reasons: tuple[str, ...] = ()  # why suspect, absorbed or empty
    conflicts: tuple[FileConflict, ...] = ()
    moved: tuple[str, ...] = ()  # files that upstream moved, with where to
    rests_on: tuple[str, ...] = ()  # patches whose open conflict this one builds on
    tree: str | None = None  # the merged tree; None on a conflict
    decision: str = ""  # of a person, where it stopped
    fate: str = ""  # what the ledger says of it, if it was skipped


class Carrier:
    """Carries the patches of one stack, one after the other, to one target."""

    def __init__(
        self,
        repository: git.Repository,
        merging: git.Merging,
        stack: list[Applied],
        old: str,
        target: Target,
    ):
        """
        Args:
            repository: Has both bases and the stack's commits.
            merging: From ``repository.merging()``.
            stack: The commits of the patches, on their own base.
            old: The tree of that base.
            target: What they are carried to.
        """
        self.repository = repository
        self.merging = merging
        self.stack = stack
        self.old = old
        self.new = target.pin.tree
        self.target = target
        self._rare: dict[str, bool] = {}
        # What is looked at again and again; objects never change.
        self.entries = functools.lru_cache(maxsize=8)(self._entries)
        self.blob = functools.lru_cache(maxsize=256)(repository.read)
        self.used_words = functools.lru_cache(maxsize=None)(self._used_words)

    def judge(self, applied: Applied, tip: str) -> Outcome:
        """Merge one patch onto ``tip`` and say what became of it."""
        repository = self.repository
        name = applied.patch.name
        merge = self.merging.pick(applied.commit, tip)
        before = repository.commit(tip).tree
        twin = self._same_change(applied)
        same = f"upstream commit {twin} makes the same change" if twin else ""
        if merge.tree is None:
            reasons = list(self._hints(applied.patch))
            # Read now: the next merge takes place in the same work tree.
            conflicts = tuple(self._conflicts(applied, before, merge))
            if twin:
                if self._was_taken(applied, twin):
                    return Outcome(name, ABSORBED, (same,))
                reasons.append(f"{same}, but in another place, or it was undone since")
            return Outcome(name, CONFLICT, tuple(reasons), conflicts=conflicts)
        if merge.tree == before:
            if same:
                return Outcome(name, ABSORBED, (same,), tree=merge.tree)
            reason = "the merge leaves nothing of it: the new base has all of it"
            return Outcome(name, EMPTY, (reason,), tree=merge.tree)
        change = _Change(self, applied, before, merge.tree)
        reasons = [*self._hints(applied.patch), *change.doubts()]
        if same:
            reasons.append(f"{same}, yet part of it is not there: was it undone since?")
        moved = tuple(f"{old} is now {new}" for old, new in change.moved.items())
        verdict = CLEAN if change.is_exact else MERGED
        if reasons:
            verdict = SUSPECT
        return Outcome(name, verdict, tuple(reasons), moved=moved, tree=merge.tree)

    # -- upstream's history ------------------------------------------------------

    def _same_change(self, applied: Applied) -> Change | None:
        """An upstream commit with the patch's id: the newest one."""
        return self.upstream_ids.get(self._patch_id(applied))

    def _patch_id(self, applied: Applied) -> str:
        return next(iter(self.repository.patch_ids("-1", applied.commit)), "")

    def _was_taken(self, applied: Applied, twin: Change) -> bool:
        """Whether ``twin`` left nothing of a patch to do, and nobody took that back.

        A patch id knows neither place nor white space.
        """
        history = self.target.history
        assert history is not None
        paths = [change.path for change in applied.patch.files]
        undoing = history.patch_ids(paths, reverse=True).get(self._patch_id(applied))
        order = [change.id for change in history.changes(*paths)]  # newest first
        if undoing and order.index(undoing.id) < order.index(twin.id):
            return False
        tree = history.repository.commit(twin.id).tree
        self.repository.copy_from(history.repository, tree)
        who = IDENTITY
        there = self.repository.write_commit(tree, [], b"Upstream\n", who, who)
        return self.merging.pick(applied.commit, there).tree == tree

    @functools.cached_property
    def upstream_ids(self) -> dict[str, Change]:
        """Upstream's commits by patch id, those that touch a file of the stack."""
        if self.target.history is None:
            return {}
        paths = {change.path for a in self.stack for change in a.patch.files}
        return self.target.history.patch_ids(sorted(paths))

    def _hints(self, patch: Patch) -> Iterator[str]:
        """What the patch's Upstream-Status has to do with the new base."""
        status, history = patch.trailer("Upstream-Status"), self.target.history
        number = re.search(r"#(\d+)", status)
        if number and history:
            for change in history.naming(int(number[1])):
                yield f"upstream commit {change} names its pull request #{number[1]}"
        if status.startswith("Backport ") and history:
            if history.has(status.split()[1]):
                yield f"it is a backport of {status.split()[1][:12]}, which is there"
        absorbed = re.search(r", v(\d+)\.(\d+)\.(\d+)$", status)
        release = re.match(r"v(\d+)\.(\d+)\.(\d+)", self.target.release)
        if absorbed and release:
            if tuple(map(int, absorbed.groups())) <= tuple(map(int, release.groups())):
                yield f"its Upstream-Status says: {status}"

    def causes(self, *paths: str) -> tuple[str, ...]:
        """Upstream commits that touched files, where history is at hand."""
        if self.target.history is None:
            return ()
        return tuple(map(str, self.target.history.changes(*paths)))[:_MOST]

    # -- conflicts ---------------------------------------------------------------

    def _conflicts(
        self, applied: Applied, before: str, merge: git.Merge
    ) -> Iterator[FileConflict]:
        for conflict in merge.conflicts:
            path = conflict.path
            hunks = []
            if {"ours", "theirs"} <= conflict.sides and conflict.content is not None:
                theirs = self.read(before, path)
                hunks = list(self._hunks(path, conflict.content, theirs))
            kind = self._kind(applied, conflict)
            old_names = [old for old, (new, _) in self.renames.items() if new == path]
            causes = self.causes(path, *old_names)
            yield FileConflict(path, kind, tuple(hunks), causes)

    def _kind(self, applied: Applied, conflict: git.Conflict) -> str:
        path, sides = conflict.path, conflict.sides
        if sides == {"base", "ours", "theirs"}:
            return "both changed it"
        if sides == {"ours", "theirs"}:
            return "both added it"
        if sides == {"base", "ours"}:
            return "the patch deletes it, upstream changed it"
        if sides == {"base", "theirs"}:
            if path not in self.entries(self.old):
                maker = next(
                    (
                        other.patch.name
                        for other in self.stack
                        if path in {x.path for x in other.patch.files}
                    ),
                    "",
                )
                if maker != applied.patch.name:
                    return f"{maker} makes it, and was left out"
            return "upstream deleted or rewrote it, the patch changes it"
        return "it was moved or renamed"

    def _hunks(self, path: str, content: bytes, tip: bytes | None) -> Iterator[Hunk]:
        where = landing.places(path, landing.text_of(tip))
        for line, base, upstream, patch in _marked(landing.text_of(content)):
            place = where[min(line, len(where)) - 1] if where else ""
            causes = self._line_causes(path, upstream)
            now_in = self._now_in(base, patch) if not upstream else ()
            yield Hunk(line, place, base, upstream, patch, causes, now_in)

    def _now_in(self, base: tuple[str, ...], patch: tuple[str, ...]) -> tuple[str, ...]:
        """Where the lines are that a patch changes and upstream took away."""
        lines = {line.strip() for line in base} - {line.strip() for line in patch}
        lines = {line for line in lines if landing.is_distinct(line)}
        found: Counter[str] = Counter()
        for line in sorted(lines, key=lambda line: (-len(line), line))[:3]:
            before = self.repository.files_with(line, self.old)
            after = self.repository.files_with(line, self.new)
            found.update(set(after) - set(before))
        return tuple(sorted(found, key=lambda path: (-found[path], path))[:3])

    def _line_causes(self, path: str, lines: tuple[str, ...]) -> tuple[str, ...]:
        """Upstream commits that touched ``lines`` of a file of the new base."""
        history = self.target.history
        text = landing.text_of(self.read(self.new, path)).split("\n")
        if history is None or not lines:
            return ()
        for start in range(len(text) - len(lines) + 1):
            if tuple(text[start : start + len(lines)]) == lines:
                found = history.touching(path, start + 1, start + len(lines))
                return tuple(map(str, found))[:_MOST]
        return ()

    # -- what the doubts need ----------------------------------------------------

    def _entries(self, tree: str) -> dict[str, git.Entry]:
        return self.repository.entries(tree=tree)

    def read(self, tree: str, path: str) -> bytes | None:
        entry = self.entries(tree).get(path)
        return None if entry is None else self.blob(entry.blob)

    @functools.cached_property
    def renames(self) -> dict[str, tuple[str, int]]:
        """Files that upstream moved: the new name, and % alike."""
        return self.repository.renamed(self.old, self.new)

    @functools.cached_property
    def gone(self) -> frozenset[str]:
        """Names that the stack's patches use, and only the old base has."""
        used: set[str] = set()
        for applied in self.stack:
            for path, (_, new) in self.changed(applied).items():
                if new.blob != git.NO_BLOB and path.endswith(CODE):
                    used |= self.used_words(applied.commit, path)
        return frozenset(self._only_in_old(used))

    def changed(self, applied: Applied) -> dict[str, tuple[git.Entry, git.Entry]]:
        parent = self.repository.commit(applied.commit).parents[0]
        return self.repository.changed(
            self.repository.commit(parent).tree, applied.tree
        )

    def _used_words(self, commit: str, path: str) -> set[str]:
        """Names that the lines which a commit adds to a file use."""
        found = self.repository.commit(commit)
        before = self.read(self.repository.commit(found.parents[0]).tree, path)
        after = self.read(found.tree, path)
        added: set[str] = set()
        for delta in landing.change(path, before, after).values():
            added.update(delta.added)
        return landing.code_words(path, landing.text_of(after), added)

    @functools.cached_property
    def fresh(self) -> dict[str, bytes]:
        """The Python files, tests left out, that only the new base has like this."""
        known = {entry.blob for entry in self.entries(self.old).values()}
        found = {
            path: entry.blob
            for path, entry in self.entries(self.new).items()
            if path.endswith(".py")
            and not path.startswith("tests/")
            and entry.blob not in known
        }
        contents = self.repository.read_many(found.values())
        return {path: contents[blob] for path, blob in found.items()}

    @functools.cached_property
    def origins(self) -> dict[str, str]:
        """Old names of files that upstream moved."""
        return {new: old for old, (new, _) in self.renames.items()}

    def is_rare(self, word: str) -> bool:
        """Whether few files of the new base have a word."""
        if word not in self._rare:
            code = [path for path in self.entries(self.new) if path.endswith(CODE)]
            having = self.repository.files_with(word, self.new)
            having = [path for path in having if path.endswith(CODE)]
            self._rare[word] = len(having) <= max(3, _RARE * len(code))
        return self._rare[word]

    def _only_in_old(self, words: set[str]) -> set[str]:
        old, new = (
            {
                entry.blob
                for path, entry in self.entries(tree).items()
                if path.endswith(CODE)
            }
            for tree in (self.old, self.new)
        )
        if not old - new:
            return set()
        left = {word.encode() for word in words}
        left &= self._words_of(old - new, left)
        for blobs in (new - old, old & new):
            if left:
                left -= self._words_of(blobs, left)
        return {word.decode() for word in left}

    def words_in(self, tree: str, words: set[str]) -> set[str]:
        """Those of ``words`` that the code of a tree has anywhere."""
        blobs = {
            e.blob for path, e in self.entries(tree).items() if path.endswith(CODE)
        }
        found = self._words_of(blobs, {word.encode() for word in words})
        return {word.decode() for word in found}

    def _words_of(self, blobs: set[str], wanted: set[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        ordered = sorted(blobs)
        for start in range(0, len(ordered), 500):
            contents = self.repository.read_many(ordered[start : start + 500])
            for content in contents.values():
                found |= landing.all_words(content) & wanted
        return found


class _Change:
    """What one merge did, beside what its patch does to its own base."""

    def __init__(self, carrier: Carrier, applied: Applied, before: str, after: str):
        repository = carrier.repository
        parent = repository.commit(applied.commit).parents[0]
        self.carrier, self.applied = carrier, applied
        self.old, self.new = repository.commit(parent).tree, applied.tree
        self.before, self.after = before, after
        self.meant = repository.changed(self.old, self.new)
        self.landed = repository.changed(before, after)
        self.moved = {
            path: carrier.renames[path][0]
            for path in self.meant.keys() - self.landed.keys()
            if path in carrier.renames and carrier.renames[path][0] in self.landed
        }

    @property
    def is_exact(self) -> bool:
        return self.meant == self.landed

    def doubts(self) -> Iterator[str]:
        """Reasons to have a person look, one sentence each."""
        targets = {**{path: path for path in self.landed}, **self.moved}
        unknown = set(self.landed) - set(self.meant) - set(self.moved.values())
        for path in sorted(unknown):
            yield f"changes {path}, which it was not made for"
        for origin in sorted(self.meant):
            if origin in targets:
                yield from self._doubts_of(origin, targets[origin])
            else:
                yield f"{origin}: upstream has all of what it does there"

    def _doubts_of(self, origin: str, path: str) -> Iterator[str]:
        carrier = self.carrier
        if origin != path and carrier.renames[origin][1] < _MOVED:
            alike = carrier.renames[origin][1]
            yield f"{path}: taken for {origin} moved, but only {alike} % alike"
        old, new = carrier.read(self.old, origin), carrier.read(self.new, origin)
        before, after = carrier.read(self.before, path), carrier.read(self.after, path)
        if (old, new) != (before, after):
            sides = ((origin, old), (origin, new), (path, before), (path, after))
            loose = not all(landing.parses(x, landing.text_of(y)) for x, y in sides)
            meant = landing.change(origin, old, new, loose)
            landed = landing.change(path, before, after, loose)
            for stray in landing.strays(meant, landed):
                yield f"{path}: {stray}"
            there, total = landing.already_there(origin, old, new, before)
            if there >= 2 and there >= _ALIKE * total:
                yield (
                    f"{path}: {there} of {total} distinct lines that it adds are there "
                    "already"
                )
            texts = [landing.text_of(side) for side in (before, new, after)]
            if landing.parses(path, texts[0]):  # else nothing new can be told
                known = landing.faults(path, texts[0])
                known |= landing.faults(origin, texts[1])
                for fault in sorted(landing.faults(path, texts[2]) - known):
                    yield f"{path}: {fault}"
        if after is not None and path.endswith(CODE):
            used = carrier.used_words(self.applied.commit, origin) & carrier.gone
            if used:
                names = ", ".join(sorted(used))
                yield f"{path}: uses {names}, which the new base has nowhere"
        if after is not None and path.endswith(".py"):
            yield from self._lost_imports(origin, path, old, new, after)
            if not path.startswith("tests/"):
                yield from self._fixed_by_callers(origin, old, new)

    def _fixed_by_callers(
        self, origin: str, old: bytes | None, new: bytes | None
    ) -> Iterator[str]:
        """Callers that upstream made speak of what the patch speaks of.

        The same defect may have been mended one level up; no merge can see that.
        """
        was, now = (landing.bodies(origin, landing.text_of(x)) for x in (old, new))
        names = Counter(place.rpartition(".")[2] for place in now)
        changed = {
            place.rpartition(".")[2]: was[place]
            for place in was.keys() & now.keys()
            if place and was[place] != now[place]
        }
        used = self.carrier.used_words(self.applied.commit, origin)
        for name, body in sorted(changed.items()):
            # A method that many classes have is called by that name anywhere.
            if names[name] > 1 or name.startswith("__"):
                continue
            about = used - landing.code_words(origin, "\n".join(body), set(body))
            callers = self._changed_callers(name)
            if not callers or len(callers) > _CALLERS or self._is_common(name):
                continue
            for path, place, fresh in callers:
                told = sorted(x for x in fresh & about if self.carrier.is_rare(x))
                if told:
                    yield (
                        f"{path}: upstream changed {place}, which calls {name} and now "
                        f"has {', '.join(told)} too: is it mended there?"
                    )

    def _is_common(self, name: str) -> bool:
        return len(self.carrier.repository.files_with(f"def {name}", self.new)) > 2

    def _changed_callers(self, name: str) -> list[tuple[str, str, set[str]]]:
        """Functions that call ``name`` and that upstream changed: their new words."""
        carrier, call = self.carrier, f"{name}("
        found = []
        for path, content in carrier.fresh.items():
            if call.encode() not in content:
                continue
            before = carrier.read(carrier.old, carrier.origins.get(path, path))
            was = landing.bodies(path, landing.text_of(before))
            for place, body in landing.bodies(path, landing.text_of(content)).items():
                if place.rpartition(".")[2] == name or not place:
                    continue
                if any(call in line for line in body) and body != was.get(place):
                    old = was.get(place, ())
                    words = landing.code_words(path, "\n".join(body), set(body))
                    words -= landing.code_words(path, "\n".join(old), set(old))
                    found.append((path, place, words))
        return found

    def _lost_imports(
        self,
        origin: str,
        path: str,
        old: bytes | None,
        new: bytes | None,
        after: bytes,
    ) -> Iterator[str]:
        text_of, imports = landing.text_of, landing.imports
        added = imports(origin, text_of(new)) - imports(origin, text_of(old))
        for module, name in sorted(added & imports(path, text_of(after))):
            if self._imports(self.new, module, name) and not self._imports(
                self.after, module, name
            ):
                what = f"{name} from {module}" if name else module
                yield f"{path}: imports {what}, which the new base does not have"

    def _imports(self, tree: str, module: str, name: str) -> bool:
        """Whether a tree has a module and a name in it, as far as its text tells."""
        stem = module.replace(".", "/")
        there = self.carrier.entries(tree)
        below = (f"{stem}/{name}.py", f"{stem}/{name}/__init__.py")
        if name and any(path in there for path in below):
            return True
        files = (f"{stem}.py", f"{stem}/__init__.py")
        here = next((path for path in files if path in there), None)
        if here is None or not name:
            return here is not None
        names = landing.exports(landing.text_of(self.carrier.read(tree, here)))
        return names is None or name in names


def _marked(
    text: str,
) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Conflicts of a file with diff3 markers: line in ours, base, ours, theirs."""
    sides: dict[str, list[str]] = {}
    now, line, start = "", 0, 0
    for row in text.split("\n"):
        if row.startswith("<<<<<<< ") and not now:
            now, start = "ours", line + 1
            sides = {"ours": [], "base": [], "theirs": []}
        elif row.startswith("||||||| ") and now == "ours":
            now = "base"
        elif row == "=======" and now == "base":
            now = "theirs"
        elif row.startswith(">>>>>>> ") and now == "theirs":
            parts = (tuple(sides[side]) for side in ("base", "ours", "theirs"))
            base, ours, theirs = parts
            yield start, base, ours, theirs
            now = ""
        elif now:
            sides[now].append(row)
            line += now == "ours"
        else:
            line += 1


def needed(patches: Iterable[Patch], name: str) -> list[str]:
    """The patches that ``name`` declares to depend on, theirs too, in series order."""
    known = {patch.name: patch for patch in patches}
    wanted: set[str] = set()
    queue = [name]
    while queue:
        for other in trailers.depends_on(known[queue.pop()].trailers):
            if other in known and other not in wanted:
                wanted.add(other)
                queue.append(other)
    return [other for other in known if other in wanted]

#!/usr/bin/env python3
"""How long the stack commands take and how much memory they need.

Works on a fresh clone of this checkout with an empty cache, both in a temporary
folder.  Needs only Python and git.

    python3 bench/stack.py [--runs N] [--output FILE]

Prints a table, and writes the raw figures as JSON if --output is given.  The first
apply includes making .venv and downloading; its download is timed apart by running
it again on another clone with the archive in the cache.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def measure(command, cwd, env):
    """Run a command; return its seconds and the peak memory (MB) of its processes."""
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return {
        "command": " ".join(command),
        "seconds": round(time.monotonic() - start, 2),
        "peak_mb": round(usage.ru_maxrss / 1024),
    }


def clone(folder):
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


def run_once(folder):
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    first, second = clone(folder / "first"), clone(folder / "second")
    rows = [{"what": "apply, clean clone, empty cache",
             **measure(["make", "apply"], first, env)}]  # fmt: skip
    measure(["scripts/stack", "--help"], second, env)  # makes .venv
    for what, verb in (
        ("apply, clean clone, archive cached", "apply"),
        ("apply again, nothing to do", "apply"),
        ("lint", "lint"),
        ("export", "export"),
        ("status", "status"),
        ("verify", "verify"),
        ("version", "version"),
    ):
        rows.append({"what": what, **measure(["scripts/stack", verb], second, env)})
    return rows


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.runs):
        folder = Path(tempfile.mkdtemp(prefix="stack-bench-"))
        try:
            runs.append(run_once(folder))
        finally:
            shutil.rmtree(folder)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    git = subprocess.run(["git", "--version"], capture_output=True, text=True).stdout
    result = {
        "command": " ".join(["python3", "bench/stack.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "device": f"{processor()}, {len(os.sched_getaffinity(0))} cores, no GPU",
        "python": platform.python_version(),
        "git": git.strip(),
        "commit": commit,
        "runs": runs,
    }
    print(f"{'':38}{'seconds (each run)':24}peak MB")
    for rows in zip(*runs, strict=True):
        seconds = " ".join(f"{row['seconds']:.2f}" for row in rows)
        print(f"{rows[0]['what']:38}{seconds:24}{max(r['peak_mb'] for r in rows)}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

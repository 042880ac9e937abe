#!/usr/bin/env python3
"""Run on a GPU the test files that the patches add or change.

The tree is not built. With nvcc the C++ K insert alone is compiled, so that its tests
run too; tests of other C++ ops fail for want of them. vLLM runs on its CPU platform,
and Triton on the GPU.

    python3 bench/patch_tests.py --tree TREE [--patches FOLDER] [--output FILE]

Needs a GPU with PyTorch, Triton, pytest, pytest-xdist and what vLLM imports.  Exits
with 1 if a test fails.
"""

import argparse
import collections
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu"
OP = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
LIBRARY = "PATCH_TESTS_LIBRARY"


def series(patches):
    lines = (patches / "series").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_files(patches):
    """The test files that the patches add or change, in the order of the series."""
    pattern = re.compile(r"^\+\+\+ b/(tests/\S*/test_\w+\.py)$", re.MULTILINE)
    texts = [(patches / name).read_text() for name in series(patches)]
    return list(dict.fromkeys(file for text in texts for file in pattern.findall(text)))


def compile_insert(tree, folder):
    """Compile the C++ K insert and its registration.  Returns the library."""
    from torch.utils import cpp_extension

    bindings = (tree / "csrc/torch_bindings.cpp").read_text()
    pattern = rf'ops\.def\(\s*"{OP}\(.*?\);\s*ops\.impl\("{OP}".*?\);'
    registration = re.search(pattern, bindings, re.DOTALL)
    binding = folder / "binding.cpp"
    binding.write_text(
        '#include <torch/all.h>\n#include <torch/library.h>\n#include "ops.h"\n'
        f"TORCH_LIBRARY_FRAGMENT(_C, ops) {{\n{registration[0]}\n}}\n"
    )
    return cpp_extension.load(
        "insert",
        [str(tree / SOURCE), str(binding)],
        extra_cflags=["-std=c++20"],
        extra_cuda_cflags=["-O3", "-DENABLE_FP8", "--expt-relaxed-constexpr"],
        extra_include_paths=[str(tree / "csrc")],
        build_directory=str(folder),
        is_python_module=False,
    )


def prepare():
    """What a pytest process needs before it collects: this file is its plugin."""
    sys.path.insert(0, str(ROOT / "ci"))
    from harness import bootstrap

    bootstrap.install(hide_gpus=False)
    if os.environ.get(LIBRARY):
        import torch

        torch.ops.load_library(os.environ[LIBRARY])


def run(tree, files, folder, jobs):
    report = folder / "report.xml"
    path = [str(tree), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if shutil.which("nvcc"):
        compile_insert(tree, folder)
        environment[LIBRARY] = str(folder / "insert.so")
    command = [sys.executable, "-m", "pytest", "-p", "patch_tests", "--noconftest"]
    command += ["-q", f"-n{jobs}", "--dist=loadfile", f"--junitxml={report}", *files]
    subprocess.run(command, cwd=tree, env=environment)
    tests = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        found = [
            child for child in case if child.tag in ("failure", "error", "skipped")
        ]
        outcome = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        tests[name] = {"outcome": outcome[found[0].tag] if found else "passed"}
        if found:
            tests[name]["why"] = (found[0].get("message") or "")[:200]
    return tests


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--tree", type=Path, required=True, help="the applied vLLM tree"
    )
    parser.add_argument("--patches", type=Path, default=ROOT / "patches" / "v0.22.0")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU; on a CPU run `make test`")
    files = test_files(arguments.patches)
    with tempfile.TemporaryDirectory() as name:
        tests = run(arguments.tree.resolve(), files, Path(name), arguments.jobs)
    counts = collections.Counter(test["outcome"] for test in tests.values())
    result = {
        "command": " ".join(["python3", "bench/patch_tests.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "series": series(arguments.patches),
        "counts": counts,
        "tests": tests,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, test in tests.items():
        if test["outcome"] == "failed":
            print(f"failed {name}: {test['why']}")
    print(dict(counts))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
else:
    prepare()

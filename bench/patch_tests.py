#!/usr/bin/env python3
"""Run on a GPU the test files that the patches add or change.

The tree is not built. With nvcc the C++ K insert alone is compiled, so that its tests
run too; tests of other C++ ops fail for want of them. vLLM runs on its CPU platform,
and Triton on the GPU.

    python3 bench/patch_tests.py --tree TREE [--patches FOLDER] [--output FILE]

With `--sanitizer` each file runs under compute-sanitizer, which watches the C++ insert
and the Triton kernels of the files that the patches touch.

Needs a GPU with PyTorch, Triton, pytest and what vLLM imports. Exits with 1 if a test
fails or the sanitizer finds something.
"""

import argparse
import collections
import concurrent.futures
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
KERNEL = "fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel"
LIBRARY = "PATCH_TESTS_LIBRARY"


def series(patches):
    lines = (patches / "series").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_files(patches):
    """The test files that the patches add or change, in the order of the series."""
    pattern = re.compile(r"^\+\+\+ b/(tests/\S*/test_\w+\.py)$", re.MULTILINE)
    texts = [(patches / name).read_text() for name in series(patches)]
    return list(dict.fromkeys(file for text in texts for file in pattern.findall(text)))


def triton_kernels(tree, patches):
    """The names of the Triton kernels in the files of vLLM that the patches touch."""
    texts = [(patches / name).read_text() for name in series(patches)]
    pattern = re.compile(r"^\+\+\+ b/(vllm/\S+\.py)$", re.MULTILINE)
    files = {file for text in texts for file in pattern.findall(text)}
    kernel = re.compile(
        r"^@triton\.jit(?:\(.*?\))?\ndef (\w+)", re.MULTILINE | re.DOTALL
    )
    sources = [(tree / file).read_text() for file in files if (tree / file).exists()]
    return sorted({name for source in sources for name in kernel.findall(source)})


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


def run(tree, files, folder, jobs, watch):
    """Runs each file in a process of its own. `watch` is what that starts with.

    Returns the outcomes of the tests, and by file what a sanitizer summed up.
    """
    path = [str(tree), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if shutil.which("nvcc"):
        compile_insert(tree, folder)
        environment[LIBRARY] = str(folder / "insert.so")

    def run_file(file):
        report = folder / f"{Path(file).stem}.xml"
        command = [*watch, sys.executable, "-m", "pytest", "-p", "patch_tests", "-q"]
        command += ["--noconftest", f"--junitxml={report}", file]
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
        )
        print(done.stdout, flush=True)
        summaries = re.findall(r"^=+ (\w+ SUMMARY: .*)$", done.stdout, re.MULTILINE)
        return outcomes(report), summaries

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        done = dict(zip(files, pool.map(run_file, files)))
    tests = {name: test for found, _ in done.values() for name, test in found.items()}
    return tests, {file: summaries for file, (_, summaries) in done.items()}


def outcomes(report):
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
    parser.add_argument("--sanitizer", choices=("memcheck", "racecheck"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU; on a CPU run `make test`")
    files = test_files(arguments.patches)
    tree, watch = arguments.tree.resolve(), []
    if arguments.sanitizer:
        watch = ["compute-sanitizer", "--tool", arguments.sanitizer]
        watch += ["--kernel-name", f"kernel_substring={KERNEL}"]
        for name in triton_kernels(tree, arguments.patches):
            watch += ["--kernel-name", f"kernel_name={name}"]
    with tempfile.TemporaryDirectory() as name:
        tests, summaries = run(tree, files, Path(name), arguments.jobs, watch)
    counts = collections.Counter(test["outcome"] for test in tests.values())
    result = {
        "command": " ".join(["python3", "bench/patch_tests.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "series": series(arguments.patches),
        "sanitizer": {"watch": watch, "summaries": summaries} if watch else None,
        "counts": counts,
        "tests": tests,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, test in tests.items():
        if test["outcome"] == "failed":
            print(f"failed {name}: {test['why']}")
    print(dict(counts))
    unclean = []
    if watch:
        # Each file has one, unless the sanitizer itself failed.
        clean = re.compile(r"\w+ SUMMARY: 0 ")
        unclean = [
            f"{arguments.sanitizer} of {file}: {found}"
            for file, found in summaries.items()
            if not found or not all(map(clean.match, found))
        ]
        print("\n".join(unclean) or f"{arguments.sanitizer}: nothing found")
    return 1 if counts["failed"] or not counts["passed"] or unclean else 0


if __name__ == "__main__":
    sys.exit(main())
else:
    prepare()

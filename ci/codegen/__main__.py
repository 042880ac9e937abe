"""Compile every launch of `launches` for some architectures, one process each.

Triton 3.9.0 returns a kernel even if LLVM could not assemble its inline assembly,
and 3.6.0 aborts the process. So each kernel is compiled in a process of its own,
whose standard error goes to a file.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import bootstrap, platforms

#: Seconds after which the compilation of one kernel is given up.
PATIENCE = 180

ASSEMBLY = ".s"
ANSWER = ".json"
ERRORS = ".err"


class Compiler:
    """Stands in for Triton's launcher: a launch is compiled and not run.

    Args:
        folder: Where the results go.
        names: The kernels that are compiled; all if empty.
        jobs: How many kernels at once.
    """

    def __init__(self, folder: Path, names: frozenset[str], jobs: int):
        self.folder, self.names, self.jobs = folder, names, jobs
        self.running: set[int] = set()
        self.arch = self.variant = ""
        self.count = 0

    def call(self, entry: Any) -> None:
        """Make vLLM launch; if it cannot, that is a result, too."""
        self.variant = entry.variant
        try:
            entry.call()
        except Exception as error:
            function = entry.call.func
            answer = self.answer(function.__module__, function.__name__)
            write(self.stem(), answer | {"error": f"{type(error).__name__}: {error}"})

    def launch(self, compile_: Callable[[], Any], function: Any) -> None:
        if self.names and function.__name__ not in self.names:
            return
        while len(self.running) >= self.jobs:
            self.wait()
        answer = self.answer(function.__module__, function.__name__)
        stem = self.stem()
        write(stem, answer | {"died": True})  # the child replaces it
        child = os.fork()
        if child:
            self.running.add(child)
            return
        with open(stem.with_suffix(ERRORS), "wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        signal.alarm(PATIENCE)
        write(stem, answer | compile_one(compile_, stem.with_suffix(ASSEMBLY)))
        os._exit(0)

    def answer(self, module: str, kernel: str) -> dict[str, Any]:
        where = {"module": module, "kernel": kernel}
        return where | {"variant": self.variant, "arch": self.arch}

    def stem(self) -> Path:
        self.count += 1
        return self.folder / f"{self.arch}-{self.count:03}"

    def wait(self) -> None:
        child, _ = os.wait()
        self.running.discard(child)

    def finish(self) -> None:
        while self.running:
            self.wait()


def compile_one(compile_: Callable[[], Any], assembly: Path) -> dict[str, Any]:
    """Compile in this process; an exception is told and also printed."""
    try:
        kernel = compile_()
        assembly.write_text(kernel.asm["amdgcn"])
        return {"lds": kernel.metadata.shared}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def write(stem: Path, value: dict[str, Any]) -> None:
    temporary = stem.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.replace(stem.with_suffix(ANSWER))


def main() -> None:
    parser = argparse.ArgumentParser(prog="codegen", description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    parser.add_argument("--arch", action="append", required=True)
    parser.add_argument("--triton", metavar="VERSION")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # Without line numbers, code that only moved in its file is the same text.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        run(options)


def run(options: argparse.Namespace) -> None:
    bootstrap.install()
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if options.triton not in (None, triton.__version__):
        sys.exit(f"Triton is {triton.__version__}, not {options.triton}")

    from . import launches

    torch.set_num_threads(1)  # there are processes enough
    # vLLM refuses CPU tensors here, and these stand in for a GPU's.
    torch.Tensor.is_cpu = property(lambda tensor: False)  # type: ignore[assignment]
    compiler = Compiler(options.out, frozenset(options.kernels), options.jobs)
    real = JITFunction.run

    def launch(self, *args, grid, warmup, **kwargs):
        def compile_():
            return real(self, *args, grid=grid, warmup=True, **kwargs)

        compiler.launch(compile_, self.fn)

    JITFunction.run = launch
    for arch in options.arch:
        compiler.arch = arch
        with platforms.use(arch):
            driver.set_active(compile_only_driver(GPUTarget("hip", arch, 64)))
            for entry in launches.ALL:
                compiler.variant = entry.variant
                compiler.call(entry)
    compiler.finish()


def compile_only_driver(target: Any) -> Any:
    """A Triton driver of a GPU that is not there."""
    from triton.backends import backends

    class Driver(backends["amd"].driver):
        def __init__(self) -> None:
            pass  # the real one loads the HIP runtime

        def get_current_target(self):
            return target

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=0):
            return 0

    return Driver()


if __name__ == "__main__":
    main()

"""What the benchmarks of kernels share: the files of several vLLM trees, loaded side by
side, and time under graph replay.

Neither vLLM nor a network is needed where they run, only torch and Triton. `prepare`
makes a folder with the few files of each tree and the benchmark itself. A tree is a
folder or an sdist (`unearth --no-binary --download . vllm==0.33.0` gets one). Other
releases' files are only run from the folder; nothing of them is in this project.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import shutil
import statistics
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

OPS = "vllm/v1/attention/ops/"
SPARSE = "rocm_aiter_mla_sparse"
FILES = {
    "patched": [
        f"{SPARSE}.py",
        "triton_sparse_mla.py",
        "triton_mqa_logits.py",
        "fp8_dialect.py",
    ],
    "v0.22.0": [f"{SPARSE}.py"],
    "v0.33.0": [f"{SPARSE}.py"],
}

#: FLOP/s of bf16 products and bytes/s, for the floor. H200: measured on the machine
#: (see bench/notes.md). MI300X: AMD's figures, for arithmetic alone.
RATES = {"H200": (790e12, 4.3e12), "MI300X": (1307e12, 5.3e12)}


# ---------------------------------------------------------------- the folder


def prepare(args) -> None:
    for tree, names in FILES.items():
        target = args.folder / tree
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            (target / name).write_bytes(_read(getattr(args, tree), OPS + name))
    here = Path(__file__).parent
    for name in ("trees.py", "decode.py", "prefill.py", "paged_logits.py"):
        shutil.copy(here / name, args.folder / name)
    print(f"wrote {args.folder}")


def add_prepare(commands) -> None:
    """The command `prepare`, the same for every benchmark."""
    command = commands.add_parser("prepare", help="make the folder")
    command.add_argument("folder", type=Path)
    add_trees(command)
    command.set_defaults(function=prepare)


def add_trees(command) -> None:
    """An option for each tree."""
    for tree in FILES:
        command.add_argument(f"--{tree}", dest=tree, type=Path, required=True)


def _read(tree: Path, path: str) -> bytes:
    if tree.is_dir():
        return (tree / path).read_bytes()
    with tarfile.open(tree) as archive:
        for member in archive:
            if member.name.partition("/")[2] == path:
                return archive.extractfile(member).read()
    sys.exit(f"{tree} has no {path}")


# ------------------------------------------------- vLLM's modules, pretended


class Anything:
    """What vLLM's modules import and the functions measured here do not use."""

    def __call__(self, *args, **kwargs):  # also as a decorator
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other):  # in annotations
        return self

    __ror__ = __or__


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `vllm`. `known` has the names that matter."""

    def __init__(self, known: dict[str, dict]):
        self.known = known

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(self.known.get(module.__name__, {}))
        module.__getattr__ = self._anything

    @staticmethod
    def _anything(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Workspace:
    """A buffer that lives as long as the server, as vLLM's manager has it."""

    def __init__(self, torch, device):
        self.torch, self.device = torch, device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def get_simultaneous(self, *specs):
        sizes = []
        for shape, dtype in specs:
            size = dtype.itemsize
            for n in shape:
                size *= n
            sizes.append(size)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 256) * 256)
        if starts[-1] > len(self.buffer):
            self.buffer = self.torch.empty(
                starts[-1], dtype=self.torch.uint8, device=self.device
            )
        return [
            self.buffer[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, specs)
        ]


class Env(SimpleNamespace):
    """What `load` finds."""

    __hash__ = object.__hash__


def load(folder: Path, arch: str = "", units: int = 4) -> Env:
    """torch, the device, and for each tree its module of sparse attention.

    With an arch, modules are as on such a GPU with so many compute units, for a caller
    that only compiles.
    """
    import torch
    import triton
    import triton.language

    device = "cuda" if torch.cuda.is_available() and not arch else "cpu"
    if device == "cpu":
        torch.Tensor.is_cpu = property(lambda tensor: False)
        if not arch:
            _correct_interpreter()
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        arch = getattr(properties, "gcnArchName", "")
        units = properties.multi_processor_count
    fnuz = arch.startswith("gfx94")
    fp8 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    workspace = Workspace(torch, device)
    platform = SimpleNamespace(
        fp8_dtype=lambda: fp8,
        is_fp8_fnuz=lambda: fnuz,
        is_rocm=lambda: arch.startswith("gfx"),
        is_cuda=lambda: device == "cuda" and not arch.startswith("gfx"),
        num_compute_units=lambda device_id=0: units,
    )
    known = {
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.platforms": {"current_platform": platform},
        "vllm.platforms.rocm": {
            "_ON_GFX942": arch.startswith("gfx942"),
            "_ON_GFX950": arch.startswith("gfx950"),
        },
        "vllm.utils.math_utils": {"cdiv": triton.cdiv},
        "vllm.utils.platform_utils": {"num_compute_units": lambda device_id=0: units},
        "vllm.v1.worker.workspace": {
            "current_workspace_manager": lambda: workspace,
            "is_workspace_manager_initialized": lambda: True,
        },
    }
    sys.meta_path.insert(0, Stubs(known))
    modules = {}
    for name in reversed(FILES["patched"]):  # what a file imports is behind it
        module = load_file(folder / "patched" / name)
        modules[Path(name).stem] = module
        known[OPS.replace("/", ".") + Path(name).stem] = vars(module)
    modules["patched"] = modules[SPARSE]
    for tree in ("v0.22.0", "v0.33.0"):
        modules[tree] = load_file(folder / tree / f"{SPARSE}.py")
    # Its choices for gfx942, wherever it runs.
    modules["v0.33.0"]._ON_GFX942 = True
    name = arch or "CPU, interpreted"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    return Env(
        torch=torch,
        triton=triton,
        device=device,
        name=name,
        fnuz=fnuz,
        fp8=fp8,
        on_gfx942=arch.startswith("gfx942"),
        units=units,
        rates=next((rates for key, rates in RATES.items() if key in name), None),
        modules=modules,
    )


def _name(path: Path) -> str:
    return f"{path.parent.name}_{path.stem}".replace(".", "_")


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_name(path), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_name(path)] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _correct_interpreter():
    """Triton's interpreter does not compute FP8; the project's harness does."""
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (root / "ci" / "harness").is_dir():
            sys.path.insert(0, str(root / "ci"))
            from harness import triton_interpreter

            return triton_interpreter.install()
    sys.exit("without a GPU run this in the project, for ci/harness")


# ---------------------------------------------------------------------- time


def time_graph(env, calls, repeats=7) -> float:
    """Median microseconds of one of `calls`, which are captured in one graph. Each has
    its own inputs, as the layers of a model have."""
    return time_graphs(env, {"": calls}, repeats)[""]


def time_graphs(env, versions, repeats) -> dict[str, float]:
    """`time_graph` of several versions, whose graphs take turns, so that what changes
    on the machine meanwhile falls on all of them."""
    torch = env.torch
    graphs = {name: capture(env, calls) for name, calls in versions.items()}
    if env.device == "cpu":
        return dict.fromkeys(versions, 0.0)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = {name: [] for name in versions}
    for step in range(repeats + 2):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if step >= 2:
                times[name].append(start.elapsed_time(end))
    return {
        name: statistics.median(times[name]) * 1e3 / len(calls)
        for name, calls in versions.items()
    }


def capture(env, calls):
    """A graph of `calls`. On a CPU they are only called."""
    torch = env.torch
    if env.device == "cpu":
        for call in calls:
            call()
        return None
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def floor(env, flop: float, size: float) -> float | None:
    """Microseconds that products or memory take at least, where the rates are known."""
    return max(flop / env.rates[0], size / env.rates[1]) * 1e6 if env.rates else None


def summary(rows) -> dict:
    """How much faster the patched tree is than each other, over the rows of a table."""
    result = {}
    for tree in ("v0.22.0", "v0.33.0"):
        ratios = [
            row["us"][tree] / row["us"]["patched"]
            for row in rows
            if all(isinstance(row["us"].get(x), float) for x in (tree, "patched"))
            and row["us"]["patched"] > 0
        ]
        if ratios:
            result[tree] = {
                "geometric_mean": statistics.geometric_mean(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "shapes": len(ratios),
            }
    return result

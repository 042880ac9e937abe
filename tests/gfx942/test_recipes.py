"""The recipes are what vLLM's own parsers take, and mean what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from stackkit import bench, pins, recipes  # noqa: E402

PROJECT = pins.load(ROOT)
PIN = PROJECT.pin(None)
NAMES = ("dp4-ep", "tp4", "tp8-ep", "tp8-ep-mtp")
# Set by the release's images; not read through vLLM's table of variables.
NOT_VLLMS = {"TOKENIZERS_PARALLELISM", "SAFETENSORS_FAST_GPU", "HIP_FORCE_DEV_KERNARG",
             "HSA_NO_SCRATCH_RECLAIM", "HSA_ENABLE_IPC_MODE_LEGACY"}  # fmt: skip


@pytest.fixture(scope="module")
def parser():
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    main = FlexibleArgumentParser()
    verbs = main.add_subparsers(dest="verb")
    make_arg_parser(verbs.add_parser("serve"))
    return main


def parse(parser, name, *more):
    recipe = recipes.find(PROJECT, PIN, name)
    return parser.parse_args(list(recipe.command(None, *more)[1:]))


def test_every_recipe_is_tested():
    assert tuple(sorted(x.name for x in recipes.load(PROJECT, PIN))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_vllm_takes_every_flag(parser, name):
    recipe = recipes.find(PROJECT, PIN, name)
    parsed = parse(parser, name)
    for flag, value in recipe.flags.items():
        got = getattr(parsed, flag.replace("-", "_"))
        if flag == "compilation-config":
            assert (int(got.mode), got.cudagraph_mode.name) == (3, "FULL_DECODE_ONLY")
        else:
            assert got == value, flag


@pytest.mark.parametrize("name", NAMES)
def test_vllm_makes_its_configuration_of_it(monkeypatch, parser, name):
    from vllm.engine.arg_utils import AsyncEngineArgs

    # Offline, it would look for the checkpoint on the disk.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    parsed = parse(parser, name)
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    recipe = recipes.find(PROJECT, PIN, name)
    sizes = (arguments.tensor_parallel_size, arguments.data_parallel_size)
    assert sizes[0] * sizes[1] == recipe.gpus


def test_a_flag_that_vllm_does_not_know_is_not_taken(parser, tmp_path):
    text = (recipes.folder(PROJECT, PIN) / "tp4.yaml").read_text()
    path = tmp_path / "x.yaml"
    path.write_text(text.replace("block-size:", "blok-size:"))
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--config", str(path)])
    path.write_text(text.replace("triton_unfused", "triton_fused"))
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--config", str(path)])


def test_a_checkpoint_and_flags_win_over_the_file(parser):
    recipe = recipes.find(PROJECT, PIN, "tp4")
    line = recipe.command("/models/flash", "--enforce-eager", "--block-size", "64")
    parsed = parser.parse_args(list(line[1:]))
    assert parsed.model_tag == "/models/flash"  # serve takes it before --model
    assert parsed.enforce_eager is True
    assert parsed.block_size == 64


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_has_a_reason(name):
    """A comment stands above each flag, or above the group that it is in."""
    reasoned = False
    flags = []
    for line in (recipes.folder(PROJECT, PIN) / f"{name}.yaml").read_text().split("\n"):
        if line.startswith("#"):
            reasoned = True
        elif not line:
            reasoned = False
        elif not line.startswith(" "):
            flags.append(line.split(":")[0])
            assert reasoned or flags[-1] == "model", line
    assert set(flags) == set(recipes.find(PROJECT, PIN, name).flags)


def test_recipes_differ_only_in_parallelism_and_speculation():
    own = {"tensor-parallel-size", "data-parallel-size", "enable-expert-parallel",
           "speculative-config"}  # fmt: skip
    common = [
        {k: v for k, v in recipe.flags.items() if k not in own}
        for recipe in recipes.load(PROJECT, PIN)
    ]
    assert all(flags == common[0] for flags in common)


def test_the_longest_needle_fits():
    from stackkit import accept

    for recipe in recipes.load(PROJECT, PIN):
        assert recipe.flags["max-model-len"] > max(accept.LENGTHS) + 1000


def test_vllm_reads_every_variable():
    from vllm import envs

    environment = recipes.find(PROJECT, PIN, "tp4").environment
    ours = {name for name in environment if name.startswith("VLLM_")}
    assert ours <= set(envs.environment_variables)
    assert set(environment) - ours == NOT_VLLMS
    dockerfiles = "".join(
        (PROJECT.tree(PIN) / "docker" / name).read_text()
        for name in ("Dockerfile.rocm", "Dockerfile.rocm_base")
    )
    for name in NOT_VLLMS:
        assert f"{name}={environment[name]}" in dockerfiles


def test_variables_are_what_they_are_for(monkeypatch):
    from vllm import envs

    for name, value in recipes.find(PROJECT, PIN, "tp4").environment.items():
        monkeypatch.setenv(name, value)
    read = envs.environment_variables
    assert read["VLLM_ROCM_USE_AITER"]() is True
    assert read["VLLM_ROCM_USE_AITER_FP4BMM"]() is False


def test_vllm_bench_serve_takes_the_measurement():
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    line = bench.command(bench.Protocol(), "http://127.0.0.1:8000", "model",
                         tokenizer=None, seed=7, folder=Path("results"))  # fmt: skip
    parsed = parser.parse_args(list(line[3:]))
    assert (parsed.random_input_len, parsed.random_output_len) == (512, 512)
    assert (parsed.num_prompts, parsed.max_concurrency) == (10240, 1024)
    assert (parsed.num_warmups, parsed.request_rate) == (2048, float("inf"))
    assert (parsed.seed, parsed.ignore_eos, parsed.save_result) == (7, True, True)
    assert parsed.metric_percentiles == "50,90,99"
    assert parsed.tokenizer_mode == "deepseek_v4"


def test_a_result_of_vllm_bench_serve_has_what_is_read():
    """The names are in its source: it needs a server to write a result."""
    source = (PROJECT.tree(PIN) / "vllm" / "benchmarks" / "serve.py").read_text()
    for key in ("completed", "failed", "duration", "total_output_tokens",
                "output_throughput"):  # fmt: skip
        assert f'"{key}":' in source
    assert '[f"p{p_word}_{metric_attribute_name}_ms"]' in source


def test_the_entry_point_of_the_nonroot_image_is_in_the_release():
    text = (ROOT / "Dockerfile.rocm").read_text()
    paths = re.findall(r"/src/vllm/(\S+)", text)
    assert len(paths) >= 2
    for path in paths:
        assert (PROJECT.tree(PIN) / path).exists(), path

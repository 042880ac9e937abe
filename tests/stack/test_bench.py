"""bench gives figures for servers whose answers are right, and for no others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from fake_server import MODEL, Behavior, serving
from lab import ROOT, mentions

HERE = Path(__file__).resolve().parent


@pytest.fixture
def version(lab):
    return lab.ok("version", "--json").json["version"]


@pytest.fixture
def vllm(lab):
    """A program vllm on PATH that does what it is told."""
    return FakeProgram(lab)


class FakeProgram:
    def __init__(self, lab):
        self.lab = lab
        self.bin = lab.folder / "bin"
        self.bin.mkdir()
        program = self.bin / "vllm"
        program.write_text(
            f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_server.py"} "$@"\n'
        )
        program.chmod(0o755)
        self.calls_file = lab.folder / "calls.jsonl"
        self.told = {
            "calls": str(self.calls_file), "bench": {}, "faults": [],
            "eager_faults": [], "version": "1", "log": [],
        }  # fmt: skip

    @property
    def env(self):
        return {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "FAKE_VLLM": json.dumps(self.told),
        }

    @property
    def calls(self):
        return [json.loads(x) for x in self.calls_file.read_text().splitlines()]


def bench(lab, vllm, version, *options, faults=()):
    with serving(Behavior(*faults, version=version)) as url:
        return lab.run("bench", url, *options, env=vllm.env)


def test_figures_of_a_good_server(lab, vllm, version):
    output = lab.folder / "figures.json"
    result = bench(lab, vllm, version, "--gpus", "8", "--output", str(output))
    assert result.code == 0, result.text
    mentions(result, "mean 1010.00 output tokens/s, 126.25 per GPU, spread 0.99 %",
             "ttft in ms: p50 50.0, p90 90.0, p99 99.0")  # fmt: skip
    kept = json.loads(output.read_text())
    assert kept["mean_output_tokens_per_second"] == 1010
    assert (kept["version"], kept["model"], kept["gpus"]) == (version, MODEL, 8)
    lines = [call["arguments"] for call in vllm.calls]
    seeds = [line[line.index("--seed") + 1] for line in lines]
    assert seeds == ["0", "1", "2"]  # the same prompts would be in the prefix cache
    for flag, value in {
        "--random-input-len": "512", "--random-output-len": "512",
        "--max-concurrency": "1024", "--num-prompts": "10240", "--num-warmups": "2048",
        "--request-rate": "inf", "--random-range-ratio": "0",
        "--percentile-metrics": "ttft,tpot,itl,e2el", "--metric-percentiles": "50,90,99",
    }.items():  # fmt: skip
        assert lines[0][lines[0].index(flag) + 1] == value
    assert "--ignore-eos" in lines[0]


def test_a_server_that_fails_smoke_is_not_measured(lab, vllm, version):
    result = bench(lab, vllm, version, faults=["nan"])
    assert result.code == 1
    mentions(result, "fails smoke before the measurement: there is no figure",
             "129 tokens: 1 of 16 logprobs are not finite: nan")  # fmt: skip
    assert not vllm.calls_file.exists()
    assert "tokens/s" not in result.text


def test_a_server_that_breaks_meanwhile_gets_no_figure(lab, vllm, version):
    output = lab.folder / "figures.json"
    options = ("--json", "--output", str(output))
    result = bench(lab, vllm, version, *options, faults=["late-nan"])
    assert result.code == 1
    assert "fails smoke after the measurement" in result.json["error"]["message"]
    assert len(vllm.calls) == 3 and not output.exists()
    assert "1010" not in result.text


@pytest.mark.parametrize(
    "told, words",
    [
        ({"exit": 1}, ["vllm bench serve ended with 1", "Initial test run failed"]),
        ({"silent": True}, ["wrote no result"]),
        ({"result": {"completed": 79, "failed": 1}}, ["1 of 80 requests failed"]),
        ({"result": {"total_output_tokens": 40959}}, ["40959 of 40960", "cut short"]),
        ({"result": {"output_throughput": float("nan")}}, ["throughput is nan"]),
        ({"result": {"output_throughput": 0}}, ["throughput is 0"]),
        ({"result": {"p99_ttft_ms": float("nan")}}, ["p99_ttft_ms is nan"]),
        ({"result": {"completed": float("inf")}}, ["lacks or has a damaged"]),
        ({"without": ["output_throughput"]}, ["lacks or has a damaged"]),
        ({"result": {"p99_itl_ms": None}}, ["lacks or has a damaged"]),
    ],
)
def test_a_measurement_that_is_not_whole_gives_no_figure(
    lab, vllm, version, told, words
):
    vllm.told["bench"] = told
    options = ("--concurrency", "8", "--repeats", "1")
    result = bench(lab, vllm, version, *options)
    assert result.code == 1
    mentions(result, *words)
    assert "output tokens/s" not in result.out


def test_without_vllm_it_is_a_sentence(lab, version):
    with serving(Behavior(version=version)) as url:
        result = lab.run("bench", url, env={"PATH": "/usr/bin:/bin"})
    assert result.code == 2
    mentions(result, "vllm is not on PATH", "scripts/stack build", "mend:")


def test_figures_that_could_not_be_kept_are_not_measured(lab, vllm, version):
    result = bench(lab, vllm, version, "--output", str(lab.folder / "none" / "x"))
    assert result.code == 2
    mentions(result, "cannot be written", "name a file in a folder")
    assert not vllm.calls_file.exists()


def test_a_dry_run_prints_the_command_and_needs_nothing(lab):
    result = lab.ok("bench", "http://127.0.0.1:9", "--dry-run")
    mentions(result, "vllm bench serve", "--random-input-len 512", "smoke")


def test_the_figures_are_of_the_server_that_was_named(lab, vllm, version):
    result = bench(lab, vllm, "0.1", "--repeats", "1")
    assert result.code == 1
    mentions(result, "the server is 0.1, this checkout builds", version)


# -- with a recipe: a server is started and stopped -------------------------------


@pytest.fixture
def recipes(lab):
    target = lab.root / "scripts" / "recipes" / "v1.2.0"
    target.mkdir(parents=True)
    for path in (ROOT / "scripts" / "recipes" / "v0.22.0").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def free_port():
    with serving(Behavior()) as url:
        return url.rpartition(":")[2]


def alive(port):
    from stackkit.client import Server

    url = f"http://127.0.0.1:{port}"
    return Server(url, timeout=1, first_timeout=1).healthy()


def test_smoke_with_a_recipe_compares_an_eager_server_with_one_with_graphs(
    lab, vllm, version, recipes
):
    vllm.told["version"], port = version, free_port()
    options = ("--recipe", "tp4", "--port", port, "--checkpoint", "/models/flash")
    result = lab.run("smoke", *options, env={**vllm.env, "VLLM_ROCM_USE_AITER": "0"})
    assert result.code == 0, result.text
    mentions(result, "192 tokens are the same", "eager: 129 tokens")
    first, second = vllm.calls
    assert first["arguments"] == [
        "serve", "/models/flash", "--config", str(recipes / "tp4.yaml"),
        "--port", port, "--enforce-eager",
    ]  # fmt: skip
    assert second["arguments"] == first["arguments"][:-1]
    # What the caller sets stays, the rest is the recipe's.
    assert second["environment"]["VLLM_ROCM_USE_AITER"] == "0"
    assert second["environment"]["VLLM_ROCM_USE_AITER_FP4BMM"] == "0"
    assert not alive(port)


def test_graphs_that_replay_wrongly_are_found_out(lab, vllm, version, recipes):
    vllm.told |= {"version": version, "faults": ["other-tokens"]}
    options = ("--recipe", "tp4", "--port", free_port())
    result = lab.run("smoke", *options, env=vllm.env)
    assert result.code == 1
    mentions(result, "1 tokens: token 6 is ' OTHER' here and", "there")


def test_a_server_that_ends_by_itself_is_a_sentence_with_its_last_words(
    lab, vllm, version, recipes
):
    vllm.told |= {"exit": 7}
    options = ("--recipe", "tp4", "--port", free_port())
    result = lab.run("accept", "--only", "needles", *options, env=vllm.env)
    assert result.code == 1
    mentions(result, "the server ended by itself with status 7",
             "RuntimeError: Engine core initialization failed.", "tp4.log")  # fmt: skip


def test_a_server_that_never_gets_ready_is_stopped(lab, vllm, version, recipes):
    vllm.told |= {"version": version, "faults": ["unhealthy"]}
    port = free_port()
    options = ("--recipe", "tp4", "--port", port, "--wait", "1.5", "--concurrency", "1")
    result = lab.run("bench", *options, env=vllm.env)
    assert result.code == 1
    mentions(result, "is not there or not ready")
    with serving(Behavior(), int(port)):  # the port is free again
        pass


def test_a_taken_port_is_a_usage_error(lab, vllm, version, recipes):
    with serving(Behavior(version=version)) as url:
        port = url.rpartition(":")[2]
        result = lab.run("smoke", "--recipe", "tp4", "--port", port, env=vllm.env)
    assert result.code == 2
    mentions(result, f"port {port} is taken", "--port")


def test_bench_and_accept_start_what_the_recipe_says(lab, vllm, version, recipes):
    vllm.told |= {"version": version}
    options = ("--recipe", "dp4-ep.yaml", "--port", free_port(), "--repeats", "1")
    result = lab.run("bench", *options, "--json", env=vllm.env)
    assert result.code == 0, result.text
    assert result.json["gpus"] == 4


def test_an_unknown_recipe_is_a_usage_error(lab, vllm, recipes):
    for verb in ("smoke", "bench"):
        result = lab.run(verb, "--recipe", "tp16", env=vllm.env)
        assert result.code == 2
        mentions(result, "there is no recipe 'tp16'", "dp4-ep, tp4, tp8-ep")

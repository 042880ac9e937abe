"""The kernels that cannot compile for AMD GPUs are not launched on them.

Both write MXFP4 with inline assembly for NVIDIA GPUs, for an FP4 indexer cache.
ci/codegen/<release>.json expects them to fail, for this reason.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.attention.backends.mla import indexer

GPUS = ("gfx942", "gfx950")


def config(use_fp4: bool) -> SimpleNamespace:
    """As much of a configuration as the builder reads until it decides."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=16),
        attention_config=SimpleNamespace(use_fp4_indexer_cache=use_fp4),
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=64),
    )


def build(monkeypatch, use_fp4: bool) -> None:
    def begin(self, *args, **kwargs):
        self.vllm_config = config(use_fp4)
        self.device = torch.device("cpu")
        self.kv_cache_spec = SimpleNamespace(block_size=64)
        self.reorder_batch_threshold = 1

    monkeypatch.setattr(indexer.AttentionMetadataBuilder, "__init__", begin)
    indexer.DeepseekV32IndexerMetadataBuilder()


@pytest.mark.parametrize("gpu", GPUS)
def test_an_fp4_indexer_cache_is_refused_when_an_engine_starts(
    fake_platform, monkeypatch, gpu
):
    fake_platform(gpu)
    with pytest.raises(AssertionError, match="requires Blackwell"):
        build(monkeypatch, use_fp4=True)


@pytest.mark.parametrize("gpu", GPUS)
def test_an_fp8_indexer_cache_is_not_refused(fake_platform, monkeypatch, gpu):
    fake_platform(gpu)
    build(monkeypatch, use_fp4=False)


def test_the_indexer_refuses_it_too():
    layer = SimpleNamespace(use_fp4_cache=True)
    with pytest.raises(AssertionError, match="support fp4 cache"):
        SparseAttnIndexer.forward_hip(layer, None, None, None, None)

"""Every MXFP4 MoE backend that DeepSeek-V4 can select on gfx942 can load weights."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import (
    gpt_oss_triton_kernels_moe as oai,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4

# What --moe-backend can name, and nothing.
NAMES = (
    "auto",
    "deep_gemm",
    "flashinfer_trtllm",
    "flashinfer_trtllm_afp8",
    "flashinfer_cutlass",
    "flashinfer_cutlass_afp8",
    "triton",
    "triton_unfused",
    "humming",
    "marlin",
    "aiter",
    "aiter_mxfp4_fp8",
    "aiter_mxfp4_mxfp4",
    "xpu",
    "cpu",
    "emulation",
)


def config(name: str, ep_size: int) -> FusedMoEConfig:
    parallel = FusedMoEParallelConfig(
        tp_size=1,
        tp_rank=0,
        pcp_size=1,
        pcp_rank=0,
        dp_size=1,
        dp_rank=0,
        ep_size=ep_size,
        ep_rank=0,
        sp_size=1,
        use_ep=ep_size > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    return FusedMoEConfig(
        num_experts=256,
        experts_per_token=6,
        hidden_dim=4096,
        intermediate_size_per_partition=2048,
        num_local_experts=256 // ep_size,
        num_logical_experts=256,
        moe_parallel_config=parallel,
        activation=MoEActivation.SILU,
        in_dtype=torch.bfloat16,
        device="cpu",
        routing_method=RoutingMethodType.DeepseekV4,
        moe_backend=name,
    )


def selected(name: str, ep_size: int):
    """The backend that a name gets, or None if it is refused."""
    try:
        return mxfp4.select_deepseek_v4_mxfp4_moe_backend(config(name, ep_size))[0]
    except (ValueError, NotImplementedError, ImportError):
        return None


def has_conversion(backend: mxfp4.Mxfp4MoeBackend) -> bool:
    """Whether the weight conversion has a branch for a backend.

    A branch may need a package that is not here: then the import fails inside it.
    """
    weights = [torch.zeros(2, 64, 32, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(2, 64, 2, dtype=torch.uint8) for _ in range(2)]
    try:
        mxfp4.convert_weight_to_mxfp4_moe_kernel_format(
            backend, torch.nn.Module(), *weights, *scales
        )
    except ModuleNotFoundError as error:
        return "triton_kernels" in str(error)
    except ValueError as error:
        if "Unsupported mxfp4_backend" in str(error):
            return False
        raise
    return True


def test_no_name_is_missing():
    known = mxfp4.map_mxfp4_backend
    for name in NAMES[1:]:
        assert known(name)
    with pytest.raises(ValueError) as error:
        known("nothing")
    assert all(f"'{name}'" in str(error.value) for name in NAMES[1:])
    assert str(error.value).count("'") == 2 * len(NAMES)


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("with_aiter", [False, True])
def test_what_gfx942_selects_has_a_weight_conversion(
    fake_platform, monkeypatch, with_aiter, ep_size
):
    fake_platform("gfx942", aiter={} if with_aiter else None)
    monkeypatch.setattr(oai, "has_triton_kernels", lambda: True)
    found = {name: selected(name, ep_size) for name in NAMES}
    assert found["auto"] is mxfp4.Mxfp4MoeBackend.TRITON_UNFUSED
    assert found["emulation"] is mxfp4.Mxfp4MoeBackend.EMULATION
    lacking = {
        name
        for name, backend in found.items()
        if backend and not has_conversion(backend)
    }
    assert lacking == set()


def test_a_backend_without_conversion_is_seen():
    assert not has_conversion(mxfp4.Mxfp4MoeBackend.NONE)

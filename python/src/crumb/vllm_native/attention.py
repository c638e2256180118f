# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of an engine's layers, on the CPU or on this process's GPU."""

from typing import Any

import torch
from vllm.logger import init_logger

from crumb import _engines
from crumb.blocks import BlockAttention, DeviceBlockAttention, DeviceBlockLimits
from crumb.errors import InvalidArgument
from crumb.vllm_native.model import BLOCK_TOKENS, RECENT_TOKENS, model_of, rank_of
from crumb.worker import WorkerSettings

logger = init_logger("vllm.crumb")

# vLLM's null block, which padding requests of captured steps have for all of their blocks.
NULL_BLOCK = 0


class CpuAttention:
    """Attention in host memory."""

    def __init__(self, model: Any, rank: Any, settings: WorkerSettings) -> None:
        self.settings = settings
        self._blocks = BlockAttention(model, rank=rank, settings=settings)

    def attend(self, layer: int, pool: Any, batch: Any, step: Any, rows: Any) -> None:
        """Computes the fresh tokens of one layer."""
        self._blocks.attend(layer, pool, batch, rows)

    def raise_fault(self) -> None:
        """Errors were raised by `attend`."""


class GpuAttention:
    """Attention in the memory of one GPU, on torch's current stream."""

    def __init__(self, model: Any, rank: Any, settings: WorkerSettings, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        limits = DeviceBlockLimits(
            requests=scheduler.max_num_seqs, tokens=scheduler.max_num_batched_tokens,
            pages=-(-vllm_config.model_config.max_model_len // BLOCK_TOKENS),
            padding_block=NULL_BLOCK)
        device = torch.cuda.current_device()
        self.settings = settings
        self._blocks = DeviceBlockAttention(model, device, limits=limits, rank=rank,
                                            settings=settings)
        logger.info("Crumb's kernels have %.0f MiB for steps of %d requests and %d tokens",
                    self._blocks.device_bytes / 2**20, limits.requests, limits.tokens)

    def attend(self, layer: int, pool: Any, batch: Any, step: Any, rows: Any) -> None:
        """Computes the fresh tokens of one layer. The first layer begins the step."""
        stream = torch.cuda.current_stream().cuda_stream
        if layer == 0:
            self._blocks.prepare(pool, batch, step, stream)
        self._blocks.attend(layer, pool, rows, stream)

    def raise_fault(self) -> None:
        """Raises the error that an earlier step has found on the device."""
        self._blocks.raise_fault()


def attention_of(vllm_config: Any, scale: float, soft_cap: float) -> Any:
    """Attention for a layer with this scale and soft cap.

    An engine's layers share it: those that exist have it as `attention`, in the engine's
    static_forward_context. It ends with them, and no other engine of the process has it.
    """
    settings = WorkerSettings(recent_tokens=RECENT_TOKENS, scale=scale, soft_cap=soft_cap)
    on_cpu = vllm_config.device_config.device_type == "cpu"
    for layer in vllm_config.compilation_config.static_forward_context.values():
        opened = getattr(layer, "attention", None)
        if not isinstance(opened, (CpuAttention, GpuAttention)):
            continue
        if opened.settings == settings:
            return opened
        if not on_cpu:  # the first layer prepares a step for all of them
            raise InvalidArgument("Crumb's attention backend does not support layers with "
                                  "different scales or soft caps on a GPU")
    model, rank = model_of(vllm_config), rank_of(vllm_config)
    if model.rotation == "hadamard":
        logger.info(_engines.HADAMARD_NOTE)
    return (CpuAttention(model, rank, settings) if on_cpu else
            GpuAttention(model, rank, settings, vllm_config))

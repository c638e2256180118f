# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Describes a transformers model by Crumb's names, and refuses unsupported features."""

import ctypes
import dataclasses
import hashlib
import json
from typing import Any, List, Mapping, Optional, Sequence, Union

from crumb.calibrate import rope_metadata
from crumb.client import PAGE_TOKENS, Client
from crumb.errors import InvalidArgument
from crumb.gpu import GpuSettings, GpuWorker, torch_device
from crumb.worker import Model, Worker, WorkerSettings

HEAD_DIMS = (64, 128, 256)
# RoPE types whose rotation of a token depends on the length of the sequence.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attention_modules(model: Any) -> List[Any]:
    """The modules of a transformers model that compute attention, in order."""
    return [module for module in model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")]


def check_supported(model: Any) -> None:
    """Raises InvalidArgument, with one sentence, if Crumb cannot serve a transformers model.

    Served are decoders on the CPU or one CUDA device in which every layer has full causal attention
    through AttentionInterface, with equal head_dim (64, 128 or 256) of keys and values.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or model.device.type not in ("cpu", "cuda"):
        raise InvalidArgument("CrumbCache serves models on the CPU or on one CUDA device; "
                              f"{name} is on {', '.join(sorted(devices))}")
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidArgument(f"CrumbCache serves decoders; {name} has an encoder, too")
    layer_types = getattr(config, "layer_types", None)
    kinds = set(layer_types or ["full_attention"]) - {"full_attention"}
    modules = attention_modules(model)
    if (any(getattr(module, "sliding_window", None) for module in modules) or
            not layer_types and getattr(config, "sliding_window", None)):
        kinds.add("sliding_attention")
    if getattr(config, "attention_chunk_size", None):
        kinds.add("chunked_attention")
    if getattr(config, "kv_lora_rank", None):
        kinds.add("latent attention (MLA)")
    if kinds:
        raise InvalidArgument("CrumbCache serves models in which every layer has full attention; "
                              f"{name} has layers of {', '.join(sorted(kinds))}")
    if [module.layer_idx for module in modules] != list(range(config.num_hidden_layers)):
        raise InvalidArgument(
            f"CrumbCache serves models in which every layer has full attention; of the "
            f"{config.num_hidden_layers} layers of {name} {len(modules)} have it")
    if len({scale_of(module) for module in modules}) != 1:
        raise InvalidArgument(f"the layers of {name} scale attention differently, which a Worker "
                              "cannot do")
    if head_dim_of(config) not in HEAD_DIMS:
        raise InvalidArgument(f"{name} has head_dim {head_dim_of(config)}; CrumbCache serves "
                              "64, 128 and 256")


def scale_of(module: Any) -> float:
    """The factor of q.k in an attention module."""
    return float(getattr(module, "scaling", None) or module.head_dim**-0.5)


def head_dim_of(config: Any) -> int:
    """Elements of a row of one head."""
    return int(getattr(config, "head_dim", None) or
               config.hidden_size // config.num_attention_heads)


# Members of a configuration that change no result: versions, and where it was loaded from. Names
# that begin with "_" are such, too.
CONFIG_MEMBERS_LEFT_OUT = ("transformers_version", "name_or_path")


def weights_digest(model: Any) -> str:
    """SHA-256 of the configuration, and of names, dtypes, shapes and bytes of all weights, on
    whichever device they are: about 1 s for a GB.

    model: a transformers model. Raises InvalidArgument for a model with adapters, whose
    state decides with which weights it computes: name the weights yourself then.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise InvalidArgument("this model has adapters: pass weights=\"...\", a name that changes "
                              "with the weights and the active adapters")
    members = _without_places(model.config.to_dict())
    digest = hashlib.sha256(json.dumps(members, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        held = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{held.dtype}\0{list(held.shape)}\0".encode())
        size = held.numel() * held.element_size()
        if size > 0:
            digest.update((ctypes.c_char * size).from_address(held.data_ptr()))
    return digest.hexdigest()


def _without_places(value: Any) -> Any:
    """A part of a configuration without CONFIG_MEMBERS_LEFT_OUT."""
    if isinstance(value, dict):
        return {str(name): _without_places(member) for name, member in value.items()
                if not str(name).startswith("_") and name not in CONFIG_MEMBERS_LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [_without_places(member) for member in value]
    return value


def check_worker(model: Any, worker: Union[Worker, GpuWorker]) -> None:
    """Raises InvalidArgument if a worker does not have the shapes of a transformers model, or keeps
    pages on another device."""
    config = model.config.get_text_config()
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads,
             head_dim_of(config))
    have = (worker.layers, worker.kv_heads, worker.q_heads, worker.head_dim)
    if have != shape:
        raise InvalidArgument(f"the worker has {have} layers, KV heads, query heads and head_dim, "
                              f"and {type(model).__name__} {shape}")
    if device_of(worker) != model.device:
        raise InvalidArgument(f"the worker keeps pages on {device_of(worker)}, and "
                              f"{type(model).__name__} is on {model.device}")


def device_of(worker: Union[Worker, GpuWorker]) -> Any:
    """The torch.device that tensors of a worker's sequences are on."""
    import torch
    return (torch_device(worker.device) if isinstance(worker, GpuWorker) else torch.device("cpu"))


def sized(gpu: GpuSettings, lengths: Sequence[int], history: str) -> GpuSettings:
    """Settings with the memory that sequences of these lengths need, where `gpu` names none."""
    pages = sum(-(-length // PAGE_TOKENS) + 1 for length in lengths)
    exact = history == "bf16"
    return dataclasses.replace(
        gpu, sequences=gpu.sequences or len(lengths), prompts=gpu.prompts or min(2, len(lengths)),
        pages=gpu.pages or (len(lengths) if exact else pages),
        bf16_pages=gpu.bf16_pages or (pages if exact else 0))


def open_worker(model: Any, client: Optional[Client] = None, *, name: Optional[str] = None,
                weights: Optional[str] = None, history: str = "int2", rotation: str = "hadamard",
                tenant: Optional[str] = None, fields: Optional[Mapping[str, str]] = None,
                recent_tokens: int = 0, page_bytes_max: int = 0, begin_deadline: float = 0.0,
                gpu: GpuSettings = GpuSettings()) -> Union[Worker, GpuWorker]:
    """A Worker with the shapes of a transformers model, or a GpuWorker if the model is on a CUDA
    device, for several caches to have in common.

    client: None: no crumbd. name: for people and metrics; None: the checkpoint's. weights: a digest
    of the weights; None: `weights_digest(model)` if there is a client. gpu: memory on a CUDA
    device; page_bytes_max: on the CPU. The other arguments are those of `crumb.Model` and
    `crumb.WorkerSettings`. Raises InvalidArgument for a model that `check_supported` refuses, and
    with a client for a RoPE that depends on the sequence's length.
    """
    check_supported(model)
    on_gpu = model.device.type == "cuda"
    if page_bytes_max if on_gpu else gpu != GpuSettings():
        raise InvalidArgument(
            f"{type(model).__name__} is on {model.device}: memory for pages is "
            f"{'gpu=crumb.GpuSettings(pages=...)' if on_gpu else 'page_bytes_max='} there")
    config = model.config.get_text_config()
    rope = rope_metadata(model.config)
    kind = json.loads(rope.get("rope_scaling", "{}")).get("rope_type")
    if client is not None and kind in LENGTH_DEPENDENT_ROPE:
        raise InvalidArgument(f"with RoPE of type {kind!r} the keys of a prefix depend on how long "
                              "its sequence is, so its pages cannot be shared: open the cache "
                              "without crumbd")
    if weights is None:
        weights = "private" if client is None else weights_digest(model)
    shape = Model(model=name or getattr(config, "_name_or_path", "") or config.model_type,
                  weights=weights, layers=config.num_hidden_layers,
                  kv_heads=config.num_key_value_heads, q_heads=config.num_attention_heads,
                  head_dim=head_dim_of(config), history=history, rotation=rotation,
                  rope=json.dumps(rope, sort_keys=True), tenant=tenant,
                  fields=fields or {})
    settings = WorkerSettings(recent_tokens=recent_tokens, page_bytes_max=page_bytes_max,
                              scale=scale_of(attention_modules(model)[0]),
                              begin_deadline=begin_deadline)
    if on_gpu:
        return GpuWorker(client, shape, device=model.device.index, settings=settings, gpu=gpu)
    return Worker(client, shape, settings=settings)

# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A decoder of Qwen3's architecture in torch, whose attention the caller supplies."""

import dataclasses
import json
import math
import pathlib
from typing import Any, Callable, Dict, Optional

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# By preference; cuDNN has no kernels for the CPU and for types other than BF16 and FP16.
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The fields of Qwen3's config.json that differ between models."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 1e9
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6

    def config(self) -> Dict[str, Any]:
        """config.json."""
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                **dataclasses.asdict(self), "tie_word_embeddings": True, "attention_bias": False,
                "hidden_act": "silu", "use_sliding_window": False, "torch_dtype": "bfloat16"}


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Linear(nn.Linear):
    """A projection without bias that computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


def rope_table(shape: Shape, positions: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor]":
    """Cosines and sines [tokens, 1, head_dim / 2]; angles are rounded to float32, as published."""
    pairs = torch.arange(shape.head_dim // 2, dtype=torch.float64, device=positions.device)
    frequencies = (shape.rope_theta ** (-2 * pairs / shape.head_dim)).float()
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, table: "tuple[torch.Tensor, torch.Tensor]") -> torch.Tensor:
    """RoPE of [..., tokens, heads, head_dim]."""
    cosine, sine = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention with norms of queries and keys and RoPE."""

    def __init__(self, shape: Shape, layer: int, qk_gain: float) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, queries)
        self.k_proj = Linear(shape.hidden_size, keys)
        self.v_proj = Linear(shape.hidden_size, keys)
        self.o_proj = Linear(queries, shape.hidden_size)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps, qk_gain)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps, qk_gain)

    def forward(self, x: torch.Tensor, table: Any, attention: Attention) -> torch.Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), table)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), table)
        v = self.v_proj(x).view(heads)
        return self.o_proj(attention(self.layer, q, k, v).flatten(-2).to(x.dtype))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each with a norm in front."""

    def __init__(self, shape: Shape, layer: int, qk_gain: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape, layer, qk_gain)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, table: Any, attention: Attention) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model. Names of parameters are those of Qwen3's checkpoints below `model.`."""

    def __init__(self, shape: Shape, qk_gain: float = 1.0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, layer, qk_gain) for layer in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def initialize(self, generator: torch.Generator) -> None:
        """Random weights. Projections into the residual stream begin at zero."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
                elif parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) /
                                    math.sqrt(parameter.shape[1]))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention,
               dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """Final hidden states [..., tokens, hidden_size] of tokens [..., tokens], computed in
        `dtype`; None: that of the weights."""
        table = rope_table(self.shape, positions)
        x = self.embed_tokens(tokens).to(dtype or self.embed_tokens.weight.dtype)
        for layer in self.layers:
            x = layer(x, table, attention)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        return functional.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


def causal_attention(layer: int, q: torch.Tensor, k: torch.Tensor,
                     v: torch.Tensor) -> torch.Tensor:
    """Exact attention of whole sequences: [batch, tokens, heads, head_dim]."""
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                                      v.transpose(1, 2), is_causal=True,
                                                      enable_gqa=True)
    return out.transpose(1, 2)


def save(model: Decoder, folder: pathlib.Path) -> None:
    """Writes config.json and model.safetensors (BF16), as transformers and Crumb load them."""
    from crumb.calibrate import write_safetensors
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
               for name, value in model.state_dict().items()}
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.shape.config(), indent=1) + "\n",
                                        encoding="utf-8")


def load(folder: pathlib.Path, device: str = "cpu",
         dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """The model of a folder that `save` wrote, or of one with weights of another type."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{field.name: config[field.name] for field in dataclasses.fields(Shape)})
    state = {name.removeprefix("model."): tensor
             for name, tensor in load_file(folder / "model.safetensors").items()}
    model = Decoder(shape)
    model.load_state_dict(state)
    return model.to(device, dtype).eval()

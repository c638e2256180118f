# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The attention function "crumb" in transformers' tables."""

import threading
from typing import Any, Optional, Tuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crumb.errors import InvalidArgument
from crumb.transformers._model import scale_of

ATTENTION = "crumb"

# `_active.attending` attends in the pass that runs in this thread: a CrumbCache or the loop of
# crumb.generate, with a method attend(layer, query, key, value). Unset or None outside a pass.
_active = threading.local()


def active() -> Any:
    """The object that attends in the pass of this thread, or None."""
    return getattr(_active, "attending", None)


def set_active(attending: Any) -> None:
    """Sets the object that attends in this thread's pass; None: the pass has ended."""
    _active.attending = attending


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[torch.Tensor], **options: Any) -> Tuple[torch.Tensor, Any]:
    """transformers' attention function "crumb".

    query: [batch, q_heads, columns, head_dim]. Returns the output, [batch, columns, q_heads,
    head_dim] in query's dtype, and None for the weights. Outside a pass over Crumb's sequences it
    computes as "sdpa" does. Raises InvalidArgument for a
    sliding window, a soft cap, attention sinks, dropout and a scale that is not the module's own.
    """
    attending = active()
    if attending is None:
        out: Tuple[torch.Tensor, Any] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **options)
        return out
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise InvalidArgument(f"{type(module).__name__} attends with {name}, which a "
                                  "CrumbCache does not have")
    if options.get("dropout"):
        raise InvalidArgument("a CrumbCache has no dropout: model.eval() before the pass")
    if options.get("scaling") not in (None, scale_of(module)):
        raise InvalidArgument(f"{type(module).__name__} scales attention by {options['scaling']}, "
                              f"and a CrumbCache by {scale_of(module)}")
    return attending.attend(module.layer_idx, query, key, value), None


def _mask(*args: Any, **options: Any) -> Optional[torch.Tensor]:
    """The mask for `attention`: none in a pass over Crumb's sequences, otherwise that of "sdpa"."""
    if active() is not None:
        return None
    mask: Optional[torch.Tensor] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **options)
    return mask


AttentionInterface.register(ATTENTION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)

# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a transformers model in a pass over a CrumbCache."""

from typing import Any, List, Mapping, Optional

import torch

from crumb.errors import FailedPrecondition, InvalidArgument
from crumb.transformers._attention import ATTENTION


def pads_of(mask: Optional[torch.Tensor], ids: torch.Tensor) -> List[int]:
    """The number of pad columns of each row, which must be on the left."""
    if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
        raise InvalidArgument(f"input_ids must be token ids [batch, columns]; it is "
                              f"{list(ids.shape)} of {ids.dtype}")
    if mask is None:
        return [0] * ids.shape[0]
    if mask.shape != ids.shape:
        raise InvalidArgument(f"attention_mask is {list(mask.shape)}, and input_ids "
                              f"{list(ids.shape)}: the first pass has all of the prompt, unless "
                              "the cache knows it: CrumbCache(model, input_ids, attention_mask)")
    mask = mask.cpu()
    pads = [int(count) for count in (mask == 0).sum(1)]
    for row, count in enumerate(pads):
        if bool((mask[row, count:] == 0).any()) or count == mask.shape[1]:
            raise InvalidArgument(f"row {row} of attention_mask is not zeros on the left and ones "
                                  "on the right: pad on the left (padding_side=\"left\"), with a "
                                  "token in every row")
    return pads


def check_inputs(inputs: Mapping[str, Any], decoder: Any) -> None:
    """Refuses arguments that a pass over a CrumbCache does not support."""
    if decoder.config._attn_implementation != ATTENTION:
        raise FailedPrecondition(
            f"the attention of {type(decoder).__name__} is {decoder.config._attn_implementation!r} "
            f"now: model.set_attn_implementation({ATTENTION!r}) before a pass with a CrumbCache")
    ids, mask, positions = (inputs.get(name) for name in
                            ("input_ids", "attention_mask", "position_ids"))
    if ids is None:
        raise InvalidArgument("a pass over a CrumbCache needs input_ids, because pages are found "
                              "by their tokens; inputs_embeds is not enough")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        raise InvalidArgument("the attention mask must be [batch, columns]: a CrumbCache attends "
                              "causally and knows no other pattern")
    if positions is not None and positions.dim() != 2:
        raise InvalidArgument(f"position_ids must be [batch, columns]; it is "
                              f"{list(positions.shape)}")
    if inputs.get("output_attentions"):
        raise InvalidArgument("a CrumbCache returns no attention weights: leave output_attentions "
                              "out")


def check_mask(mask: Optional[torch.Tensor], pads: torch.Tensor, end: int) -> None:
    """Checks that a pass which ends before column `end` has the rows' mask. pads: [batch, 1]."""
    if mask is not None:
        expected = torch.arange(end, device=mask.device) >= pads
        if mask.shape != expected.shape or not torch.equal(mask.bool(), expected):
            raise InvalidArgument("the attention mask must be that of the prompts, padded on the "
                                  "left, with ones for all columns after them")


def check_prompt(ids: torch.Tensor, prompt: torch.Tensor, pads: torch.Tensor, first: int) -> None:
    """Checks that the columns of a pass from `first` on have the tokens of the prompts, as far as
    these go, and do not cross their end. pads: [batch, 1]."""
    end, known = first + ids.shape[1], prompt.shape[1]
    if first < known < end:
        raise InvalidArgument(f"the pass has columns {first} to {end}, and the prompts end at "
                              f"{known}: make a pass end there")
    if first < known:
        same = ids == prompt[:, first:end]
        if not bool((same | (torch.arange(first, end, device=ids.device) < pads)).all()):
            raise InvalidArgument("the tokens of the pass are not those of the prompts that the "
                                  "cache was made for")


def positions_of(first: int, columns: int, pads: torch.Tensor,
                 given: Optional[torch.Tensor]) -> torch.Tensor:
    """Positions [batch, columns]: of a row's token t position t, whatever its padding, because
    pages are found by their tokens alone. pads: [batch, 1]."""
    expected = torch.arange(first, first + columns, device=pads.device) - pads
    if given is not None and not bool(((given == expected) | (expected < 0)).all()):
        raise InvalidArgument("position_ids must count each row's tokens from 0, without its "
                              "padding, because pages are found by their tokens alone")
    return expected.clamp(min=0)

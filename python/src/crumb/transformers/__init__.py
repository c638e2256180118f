# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a Hugging Face model in INT2 pages that attention reads in place, on the CPU or a
CUDA device:

    from crumb.transformers import CrumbCache
    with CrumbCache(model, **inputs, socket_dir="/run/crumb") as cache:
        model.generate(**inputs, past_key_values=cache)

    from crumb.transformers import generate      # also crumb.generate: a batched loop of its own
    generate(model, prompts, tokenizer=tokenizer, socket_dir="/run/crumb")

A forward pass of the model's decoder is a pass over a sequence for each row of the batch:

1. A hook before the pass reads the token ids, the attention mask and the positions, and finds out
   which columns of the batch are fresh in each row. Pad columns, and columns that a row has in its
   cache already, are skipped.
2. In each layer `CrumbCache.update` appends the fresh rows. It returns them unchanged, because no
   earlier row exists outside the sequence.
3. The attention function "crumb", registered in transformers' AttentionInterface, attends over the
   sequences. Without a CrumbCache it computes as "sdpa" does.
4. A hook after the pass advances the sequences by the fresh tokens, or drops the pass if it failed.

On a CUDA device the hook of step 1 cuts a long prompt into pieces that device memory has room for
and computes all of them but the last, without padding; step 4 puts their outputs together.

Importing this module needs torch and transformers, and registers the attention function, so that
`attn_implementation="crumb"` is a valid argument of `from_pretrained` from then on.
"""

from crumb.transformers._attention import ATTENTION
from crumb.transformers._cache import CrumbCache
from crumb.transformers._generate import Generated, generate
from crumb.transformers._model import check_supported, open_worker, weights_digest

__all__ = ["ATTENTION", "CrumbCache", "Generated", "check_supported", "generate", "open_worker",
           "weights_digest"]

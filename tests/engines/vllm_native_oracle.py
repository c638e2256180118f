# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens by crumb.transformers: vllm_native_oracle.py MODEL

Reads {"score": [...]} from standard input and writes RESULT {"scores": [...]}: the logarithms of
the probabilities of these tokens but the first. Each token is a pass of its own, so that it attends
history as in decoding, like vLLM with Crumb's attention backend in every pass.
"""

import json
import sys

import torch
import transformers

from crumb.transformers import CrumbCache


def main():
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    model.eval()
    for line in sys.stdin:
        tokens = torch.tensor([json.loads(line)["score"]])
        scores = []
        with torch.no_grad(), CrumbCache(model) as cache:
            for at in range(tokens.shape[1] - 1):
                logits = model(tokens[:, at:at + 1], past_key_values=cache, use_cache=True).logits
                scores.append(float(logits[0, -1].float().log_softmax(-1)[tokens[0, at + 1]]))
        print("RESULT " + json.dumps({"scores": scores}), flush=True)


if __name__ == "__main__":
    main()

# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts, comparisons and bounds of the tests of vLLM's INT2 blocks, on the CPU and on a GPU."""

import pathlib
import shutil

from engine_process import package_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY_LM = ROOT / "models/data/tiny-lm"
CUSTOM = {"attention_backend": "CUSTOM"}
ROUNDING = 0.15  # differences of log probabilities that BF16 rounding causes, at most
# The first positions, whose tokens attend no INT2 history: the 64 tokens of the sink and a recent
# window of up to 319 are BF16. The token at position 383 is the first that attends a page behind
# the sink as INT2, because 256 tokens follow the page, itself among them.
EXACT_TOKENS = 383
SCORED_TOKENS = 900  # length of the part of the text that is scored
DECODED = 24         # tokens behind short prompts
# First token in the text and length of prompts which the sink and the recent window cover together
# with the decoded tokens.
SHORT_PROMPTS = ((0, 20), (500, 64), (900, 65), (300, 250), (0, 250), (1200, 200))
LONG_DECODED = 60  # tokens behind prompts of a batch
# A pool with room for three of the requests of a batch, and chunks of 100 tokens.
SMALL = {**CUSTOM, "max_num_batched_tokens": 100, "max_num_seqs": 8, "num_gpu_blocks_override": 151,
         "enable_prefix_caching": False, "disable_log_stats": False}

# The most drafts for which the recent blocks have room at head_dim 128.
DRAFTS = {**CUSTOM, "disable_log_stats": False,
          "speculative_config": {"method": "ngram", "num_speculative_tokens": 5,
                                 "prompt_lookup_max": 3, "prompt_lookup_min": 1}}
# First token in the text and length of prompts behind which DRAFTED_TOKENS are decoded with drafts.
# These complete two windows.
DRAFTED = ((0, 380), (300, 600))
DRAFTED_TOKENS = 150


def model_folder(folder):
    """A copy of the project's small model that vLLM loads, inside `folder`."""
    model = pathlib.Path(folder) / "model"
    shutil.copytree(TINY_LM, model)
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return model


def environment(build, folder):
    """The environment of a process that imports the package from a build, staged in `folder`."""
    return {**package_environment(build, folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def batch_prompts(text):
    """Prompts of a batch, some longer than the exact positions."""
    return [text[i * 150:i * 150 + n] for i, n in enumerate((700, 30, 384, 513, 900))]


def mean_difference(found, expected):
    """Mean absolute difference of log probabilities."""
    return sum(abs(x - y) for x, y in zip(found, expected, strict=True)) / len(found)


def sure_tokens(result):
    """How many tokens come before the first that is as likely as another one but for rounding.
    result: the result of a request with "margins"."""
    return next((i for i, margin in enumerate(result["margins"]) if margin < ROUNDING),
                len(result["margins"]))


def check_scores(test, name, found, plain, stored):
    """Compares the log probabilities of a text's tokens with those of vLLM's own attention where no
    INT2 is attended, and with those of crumb.transformers behind that.

    Behind that, the difference to crumb.transformers must be less than half of the
    difference that INT2 itself makes.
    """
    exact, history = slice(0, EXACT_TOKENS), slice(EXACT_TOKENS, None)
    short = mean_difference(found[exact], plain[exact])
    error = mean_difference(found[history], stored[history])
    quantization = mean_difference(stored[history], plain[history])
    print(f"{name}: mean |difference| of log probabilities: {short:.4f} to vLLM's own attention in "
          f"the first {EXACT_TOKENS} positions; behind them {error:.4f} to crumb.transformers, "
          f"{mean_difference(found[history], plain[history]):.4f} to vLLM's own attention, to "
          f"which crumb.transformers has {quantization:.4f}", flush=True)
    test.assertLess(short, 0.04)
    test.assertLess(error, 0.06)
    test.assertLess(error, quantization / 2)


def check_short_contexts(test, text, plain, engines):
    """Checks that tokens behind short prompts are those of vLLM's own attention, up to the first
    that is as likely as another one but for rounding. engines: {name: Engine}."""
    compared = 0
    for begin, tokens in SHORT_PROMPTS:
        prompt = text[begin:begin + tokens]
        expected = plain.request(tokens=prompt, max_tokens=DECODED, margins=True)
        sure = sure_tokens(expected)
        compared += sure
        for name, engine in engines.items():
            test.assertEqual(engine.generate(prompt, DECODED)["tokens"][:sure],
                             expected["tokens"][:sure], (name, begin, tokens))
    print(f"{compared} tokens behind short prompts are those of vLLM's own attention", flush=True)
    test.assertGreaterEqual(compared, 30)

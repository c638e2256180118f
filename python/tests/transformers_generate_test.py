# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.generate on the CPU, over small models with random weights. References are the loops of
transformers: over its own attention while all tokens are in BF16, and over a CrumbCache behind
that. transformers_device_test.py and transformers_gpu_test.py have the same for a GPU."""

import unittest

import crumb
import support
import transformers_cache_test as small

torch = small.torch
if torch is not None and small.transformers is not None:
    from crumb.transformers import CrumbCache, _generate, open_worker


class Tokenizer:
    """Texts of words w1, w2, ..., each a token."""

    def __call__(self, text):
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(f"w{token}" for token in tokens)


def prompts_of(*lengths):
    return [small.prompt(length, seed=length)[0].tolist() for length in lengths]


def by_transformers(model, prompt, tokens, attention="rounded"):
    """The tokens of transformers' own loop and attention, over rows rounded to BF16: rows in F32
    give other tokens where two are all but equally likely."""
    with small.attention(model, attention):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt):].tolist()


@unittest.skipIf(torch is None or small.transformers is None, "needs torch and transformers")
class GenerateTest(unittest.TestCase):
    def test_short_contexts_have_the_tokens_of_transformers(self):
        prompts = prompts_of(200, 3, 64, 100, 1)
        for name, model in small.families():
            expected = [by_transformers(model, prompt, 30) for prompt in prompts]
            for batch in (1, 2, 8):
                with self.subTest(name, batch=batch):
                    found = crumb.generate(model, prompts, max_new_tokens=30, batch=batch)
                    self.assertEqual([one.tokens for one in found], expected)
                    if batch == 1:
                        self.assertEqual(found[0].tokens,
                                         by_transformers(model, prompts[0], 30, "sdpa"))
                    self.assertEqual({(one.text, one.cached_tokens, one.ended) for one in found},
                                     {(None, 0, False)})

    def test_long_contexts_have_the_tokens_of_a_crumb_cache(self):
        model, prompts = small.model_of("Llama", 64), prompts_of(900, 380, 500)
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with CrumbCache(model, ids) as cache:
                expected.append(small.generate(model, ids, cache, 90)[0][0, len(prompt):].tolist())
        found = crumb.generate(model, prompts, max_new_tokens=90, batch=2)
        self.assertEqual([one.tokens for one in found], expected)

    def test_end_tokens(self):
        model, prompts = small.model_of("Qwen3", 64), prompts_of(40, 41, 42)
        whole = [one.tokens for one in crumb.generate(model, prompts, max_new_tokens=12)]
        ends = [whole[0][5], whole[1][2]]

        def until_end(tokens):
            return next((tokens[:i + 1] for i, token in enumerate(tokens) if token in ends), tokens)

        self.assertLess(len(until_end(whole[1])), 12)
        found = crumb.generate(model, prompts, max_new_tokens=12, eos_token_id=ends, batch=2)
        self.assertEqual([one.tokens for one in found], [until_end(tokens) for tokens in whole])
        self.assertEqual([one.ended for one in found],
                         [tokens[-1] in ends for tokens in map(until_end, whole)])
        model.generation_config.eos_token_id = ends[1]
        found = crumb.generate(model, prompts[1:2], max_new_tokens=12)[0]
        self.assertEqual(found.tokens[-1], ends[1])
        self.assertTrue(found.ended)

    def test_a_single_token(self):
        model, prompts = small.model_of("Llama", 64), prompts_of(10, 11, 12)
        found = crumb.generate(model, prompts, max_new_tokens=1, batch=2)
        self.assertEqual([one.tokens for one in found],
                         [by_transformers(model, prompt, 1) for prompt in prompts])
        self.assertEqual(crumb.generate(model, []), [])

    def test_texts(self):
        model, prompts = small.model_of("Llama", 64), prompts_of(10)
        text = Tokenizer().decode(prompts[0], True)
        by_ids = crumb.generate(model, prompts, max_new_tokens=5)[0]
        found = crumb.generate(model, [text], max_new_tokens=5, tokenizer=Tokenizer())[0]
        self.assertEqual(found.tokens, by_ids.tokens)
        self.assertEqual(found.text, Tokenizer().decode(by_ids.tokens, True))

    def test_samples_have_the_probabilities_of_the_model(self):
        """Compares 20,000 samples of a fixed seed with the temperature's probabilities."""
        probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
        logits = (probabilities.log() * 2).expand(20000, 4)  # temperature 2
        for top_p, expected in ((1.0, probabilities), (0.9, torch.tensor([4, 3, 2, 0]) / 9),
                                (0.41, torch.tensor([4, 3, 0, 0]) / 7),
                                (0.01, torch.tensor([1, 0, 0, 0]))):
            generator = torch.Generator().manual_seed(5)
            sampling = _generate._Sampling(2.0, top_p, generator)
            counts = torch.bincount(sampling.sample(logits), minlength=4) / 20000
            # Four standard deviations of the most variable of the four.
            self.assertLess(float((counts - expected).abs().max()), 0.014, top_p)
            self.assertTrue(torch.equal(counts > 0, expected > 0), top_p)

    def test_seeds(self):
        model, prompts = small.model_of("Llama", 64), prompts_of(10, 30)
        found = [crumb.generate(model, prompts, max_new_tokens=12, temperature=1.0, top_p=0.95,
                                seed=seed) for seed in (1, 1, 2, None, None)]
        self.assertEqual(found[0], found[1])
        self.assertNotEqual(found[0], found[2])
        self.assertNotEqual(found[3], found[4])

    def test_what_is_refused(self):
        model, prompts = small.model_of("Llama", 64), prompts_of(10)
        for pattern, given, options in (
                ("max_new_tokens", prompts, dict(max_new_tokens=0)),
                ("batch", prompts, dict(batch=0)), ("top_p", prompts, dict(top_p=0.0)),
                ("temperature", prompts, dict(temperature=-1.0)),
                ("prefill_tokens", prompts, dict(prefill_tokens=0)),
                ("at least one token", [[]], {}), ("0 to 499", [[1, 500]], {}),
                ("no tokenizer", ["text"], {}),
                ("GpuSettings", prompts, dict(page_bytes_max=1, gpu=crumb.GpuSettings(pages=1)))):
            if pattern == "GpuSettings":
                pattern = "page_bytes_max"
            with self.subTest(pattern), self.assertRaisesRegex(crumb.InvalidArgument, pattern):
                crumb.generate(model, given, **options)
        with open_worker(model) as worker:
            with self.assertRaisesRegex(crumb.InvalidArgument, "the worker's"):
                crumb.generate(model, prompts, worker=worker, history="bf16")
        with self.assertRaisesRegex(crumb.InvalidArgument, "training"):
            crumb.generate(model.train(), prompts)

    def test_a_failed_pass_ends_the_sequences(self):
        """The worker goes on, and so does a model whose attention was Crumb's in that pass."""
        model, prompts = small.model_of("Llama", 64), prompts_of(10, 100)
        expected = crumb.generate(model, prompts, max_new_tokens=9)
        calls = []

        def fail(*_):
            calls.append(0)
            if len(calls) == 5:
                raise RuntimeError("on purpose")

        with open_worker(model) as worker:
            hook = model.model.layers[1].register_forward_hook(fail)
            with self.assertRaisesRegex(RuntimeError, "on purpose"):
                crumb.generate(model, prompts, max_new_tokens=9, worker=worker)
            hook.remove()
            self.assertEqual(crumb.generate(model, prompts, max_new_tokens=9, worker=worker),
                             expected)
        with small.attention(model, "sdpa"):
            plain = model(torch.tensor(prompts[1:])).logits
        self.assertTrue(torch.equal(model(torch.tensor(prompts[1:])).logits, plain))


@unittest.skipIf(torch is None or small.transformers is None, "needs torch and transformers")
class PrefixTest(support.CrumbdTest):
    def test_a_second_call_has_the_prefix_in_its_cache(self):
        model, prompts = small.model_of("Qwen2", 64), prompts_of(700, 300)
        options = dict(socket_dir=self.folder, weights="generate", history="bf16",
                       max_new_tokens=20, begin_deadline=support.SECONDS)
        cold = crumb.generate(model, prompts, **options)
        warm = crumb.generate(model, prompts, **options)
        self.assertEqual([one.cached_tokens for one in cold], [0, 0])
        self.assertEqual([one.cached_tokens for one in warm], [384, 64])
        self.assertEqual([one.tokens for one in warm], [one.tokens for one in cold])
        none = crumb.generate(model, prompts, **{**options, "weights": "none", "publish": "none"})
        again = crumb.generate(model, prompts, **{**options, "weights": "none"})
        self.assertEqual([one.cached_tokens for one in again], [0, 0])
        self.assertEqual([one.tokens for one in none], [one.tokens for one in cold])


if __name__ == "__main__":
    unittest.main()

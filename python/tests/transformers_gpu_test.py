#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CrumbCache and crumb.generate on a GPU: transformers_gpu_test.py [--build DIR]

The references are the same models on the CPU, transformers' own attention over rows rounded to
BF16, and the same over pages that crumb.Transfer dequantizes. Models have random weights and
compute in F32, so that attention is the only difference. Requirements and --build are those of
gpu_test.py. Each difference that a bound is compared with is printed.
"""

import argparse
import copy
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import develop  # noqa: E402

OPTIONS = argparse.Namespace()
SKIPPED = 77
# Bounds of ||found - expected|| / ||expected|| over all logits; the measured values are printed.
# Equal BF16 rows, attended by tensor cores, which round probabilities to BF16.
SAME_ROWS = 1e-2
# INT2 rows: the GPU's and the CPU's quantization choose the same codes but for ties.
INT2_ROWS = 2e-2


class TransformersGpuTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import crumb
        import support
        import torch
        import transformers
        import transformers_cache_test as small
        from crumb.transformers import CrumbCache, open_worker
        cls.crumb, cls.torch, cls.transformers, cls.small = crumb, torch, transformers, small
        cls.CrumbCache, cls.open_worker = CrumbCache, staticmethod(open_worker)
        cls.seconds = support.SECONDS
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        crumbd = support.Crumbd(pathlib.Path(crumb.path_of("crumbd")).parent, folder.name)
        cls.addClassCleanup(crumbd.stop)
        crumbd.start()
        cls.folder = folder.name

    def alike(self, found, expected, bound, what):
        difference = self.small.difference(found.float().cpu(), expected.float().cpu())
        print(f"{self._testMethodName} {what}: {difference:.2e}, bound {bound:.0e}")
        self.assertLess(difference, bound)

    def families(self):
        for name, model in self.small.families():
            yield name, model, copy.deepcopy(model).cuda()

    def client(self):
        client = self.crumb.Client(self.folder)
        self.addCleanup(client.close)
        client.wait_connected(self.seconds)
        return client

    def test_short_contexts_have_the_tokens_of_sdpa(self):
        ids = self.small.prompt(200).cuda()
        for name, _, model in self.families():
            with self.CrumbCache(model, ids) as cache:
                tokens, found = self.small.generate(model, ids, cache, 40)
            for reference, bound in (("rounded", SAME_ROWS), ("sdpa", SAME_ROWS)):
                with self.small.attention(model, reference):
                    expected, logits = self.small.generate(model, ids, None, 40)
                self.alike(found, logits, bound, f"{name} {reference}")
                if reference == "sdpa":
                    self.assertTrue(self.torch.equal(tokens, expected), name)
            for graphs in (False, True):
                out = self.crumb.generate(model, [ids[0].tolist()], max_new_tokens=40,
                                          graphs=graphs)
                self.assertEqual(out[0].tokens, tokens[0, 200:].tolist(), (name, graphs))

    def test_int2_history_is_that_of_the_cpu(self):
        """A padded batch, whose generated tokens attend INT2 pages."""
        torch, ids = self.torch, self.small.prompt(700, rows=3)
        mask = torch.ones_like(ids)
        mask[1, :70], mask[2, :690] = 0, 0
        for name, on_cpu, model in self.families():
            with self.CrumbCache(on_cpu, ids, mask) as cache:
                steps, _ = self.small.generate(on_cpu, ids, cache, 8, attention_mask=mask)
            found = [self.teacher_forced(one, ids.to(one.device), mask.to(one.device),
                                         steps[:, 700:].to(one.device)) for one in (on_cpu, model)]
            self.alike(found[1], found[0], INT2_ROWS, name)

    def teacher_forced(self, model, ids, mask, steps):
        """Logits [rows, steps, vocabulary] behind a prompt and each of the tokens `steps`."""
        torch, logits = self.torch, []
        with torch.no_grad(), self.CrumbCache(model, ids, mask) as cache:
            for tokens in (ids, *steps.split(1, 1)):
                if tokens is not ids:
                    mask = torch.cat([mask, torch.ones_like(tokens)], 1)
                logits.append(model(tokens, attention_mask=mask, past_key_values=cache,
                                    logits_to_keep=1).logits)
        return torch.cat(logits, 1)

    def test_decode_attends_the_pages_that_it_published(self):
        """Against transformers' attention over rows that crumb.Transfer has dequantized."""
        torch, model = self.torch, self.small.model_of("Qwen3", 128).cuda()
        ids, steps = self.small.prompt(700).cuda(), self.small.prompt(14, seed=3).cuda()
        with self.CrumbCache(model, ids, socket_dir=self.folder, weights="decode",
                             begin_deadline=self.seconds) as cache:
            self.small.logits_of(model, ids, cache)
            found = torch.cat([self.small.logits_of(model, token, cache)
                               for token in steps.split(1, 1)])
            shapes = cache.worker.model
        pages = self.small.Rows(self.client(), shapes, torch.cat([ids, steps], 1)[0].cpu(), 7)
        reference, expected, history = self.transformers.DynamicCache(), [], 0
        pages.layers = [rows.cuda() for rows in pages.layers]
        with self.small.attention(model, "rounded"):
            self.small.logits_of(model, ids, reference)
            for length, token in enumerate(steps.split(1, 1), 700):
                end = (length + 1 - 256) // 64 * 64
                if end > history:
                    pages.put(reference, history, end)
                    history = end
                expected.append(self.small.logits_of(model, token, reference))
        self.alike(found, torch.cat(expected), INT2_ROWS, "Qwen3 128")
        with self.small.attention(model, "eager"):
            exact = self.small.logits_of(model, torch.cat([ids, steps], 1), None)[700:]
        self.assertGreater(self.small.difference(found, exact), 5 * INT2_ROWS)

    def test_a_prompt_longer_than_a_block(self):
        torch, on_cpu = self.torch, self.small.model_of("Llama", 64)
        model, ids = copy.deepcopy(on_cpu).cuda(), self.small.prompt(8500)
        with self.CrumbCache(on_cpu, ids) as cache:
            expected = self.small.logits_of(on_cpu, ids, cache)
        for prefill_tokens in (4096, 1000):
            with self.CrumbCache(model, ids.cuda(), prefill_tokens=prefill_tokens) as cache:
                found = self.small.logits_of(model, ids.cuda(), cache)
                self.assertEqual(cache.get_seq_length(), 8500)
            self.alike(found[:8192], expected[:8192], SAME_ROWS, f"block 1, {prefill_tokens}")
            self.alike(found[8192:], expected[8192:], INT2_ROWS, f"block 2, {prefill_tokens}")
        with self.CrumbCache(model, ids.cuda()) as cache, torch.no_grad():
            chunked, _ = self.small.generate(model, ids.cuda(), cache, prefill_chunk_size=3000)
        with self.CrumbCache(model, ids.cuda()) as cache, torch.no_grad():
            whole, _ = self.small.generate(model, ids.cuda(), cache)
        self.assertTrue(torch.equal(chunked, whole))

    def test_a_second_process_is_warm(self):
        """It attends pages of this one, and goes on as this process does with a warm cache."""
        model, ids = self.small.model_of("Qwen3", 64).cuda(), self.small.prompt(1000).cuda()
        options = dict(socket_dir=self.folder, weights="warm", begin_deadline=self.seconds)
        with self.CrumbCache(model, ids, **options) as cold:
            self.assertEqual(cold.cached_tokens, [0])
            self.small.generate(model, ids, cold)
        with self.CrumbCache(model, ids, **options) as warm:
            self.assertEqual(warm.cached_tokens, [704])
            expected, _ = self.small.generate(model, ids, warm)
        for _ in range(2):
            found = subprocess.run([sys.executable, __file__, "--warm", self.folder], check=True,
                                   stdout=subprocess.PIPE, text=True).stdout.split()
            self.assertEqual(found, ["704", *map(str, expected[0, 1000:].tolist())])

    def test_generate_in_more_prompts_than_places(self):
        model = self.small.model_of("Llama", 128).cuda()
        lengths = (300, 5, 900, 64, 120, 700, 1)
        prompts = [self.small.prompt(length, seed=length)[0].tolist() for length in lengths]
        alone = [self.crumb.generate(model, [prompt], max_new_tokens=70, graphs=False)[0].tokens
                 for prompt in prompts]
        end = alone[2][35]
        for graphs in (False, True):
            found = self.crumb.generate(model, prompts, max_new_tokens=70, batch=3, graphs=graphs,
                                        prefill_tokens=256, eos_token_id=end)
            for one, tokens in zip(found, alone):
                stop = tokens.index(end) + 1 if end in tokens else 70
                self.assertEqual((one.tokens, one.ended), (tokens[:stop], end in tokens))
        sampled = [self.crumb.generate(model, prompts, max_new_tokens=20, temperature=0.8,
                                       top_p=0.9, seed=seed, batch=4) for seed in (1, 1, 2)]
        self.assertEqual(sampled[0], sampled[1])
        self.assertNotEqual(sampled[0], sampled[2])

    def test_a_bf16_model_generates(self):
        model, ids = self.small.model_of("Qwen3", 128).bfloat16().cuda(), self.small.prompt(700)
        with self.CrumbCache(model, ids.cuda()) as cache:
            found = self.small.logits_of(model, ids.cuda(), cache)
        with self.small.attention(model, "sdpa"):
            expected = self.small.logits_of(model, ids.cuda(), None)
        self.alike(found, expected, self.small.BF16_MODEL, "sdpa")
        out = self.crumb.generate(model, [ids[0].tolist()] * 2, max_new_tokens=8)
        self.assertEqual(out[0].tokens, out[1].tokens)

    def test_exact_history(self):
        """Pages in BF16 are the rows themselves."""
        model, ids = self.small.model_of("Qwen2", 64).cuda(), self.small.prompt(700, rows=2).cuda()
        with self.CrumbCache(model, ids, history="bf16") as cache:
            tokens, found = self.small.generate(model, ids, cache, 80)
        with self.small.attention(model, "rounded"):
            expected, logits = self.small.generate(model, ids, None, 80)
        self.assertTrue(self.torch.equal(tokens, expected))
        self.alike(found, logits, SAME_ROWS, "Qwen2 64")
        out = self.crumb.generate(model, ids.tolist(), max_new_tokens=80, history="bf16")
        self.assertEqual([one.tokens for one in out], tokens[:, 700:].tolist())

    def test_a_digest_does_not_depend_on_the_device(self):
        from crumb.transformers import weights_digest
        model = self.small.model_of("Llama", 64)
        on_cpu = weights_digest(model)
        self.assertEqual(weights_digest(model.cuda()), on_cpu)

    def test_what_is_refused(self):
        model, ids = self.small.model_of("Llama", 64).cuda(), self.small.prompt(40).cuda()
        with self.assertRaisesRegex(self.crumb.InvalidArgument, "GpuSettings"):
            self.CrumbCache(model, page_bytes_max=1 << 30)
        with self.CrumbCache(model, ids) as cache, self.assertRaises(self.crumb.Error):
            model.generate(ids, past_key_values=cache, max_new_tokens=4, num_beams=2)
        with self.CrumbCache(model, ids) as cache, self.assertRaises(self.crumb.Unimplemented):
            cache.crop(-1)
        small = self.crumb.GpuSettings(pages=1)
        with self.CrumbCache(model, gpu=small) as cache:
            with self.assertRaises(self.crumb.ResourceExhausted):
                self.small.generate(model, self.small.prompt(700).cuda(), cache, 4)


def warm(folder):
    """The second process: prints the cached tokens of a prompt, and the tokens that follow it."""
    import support
    import transformers_cache_test as small
    from crumb.transformers import CrumbCache
    model, ids = small.model_of("Qwen3", 64).cuda(), small.prompt(1000).cuda()
    with CrumbCache(model, ids, socket_dir=folder, weights="warm",
                    begin_deadline=support.SECONDS) as cache:
        tokens, _ = small.generate(model, ids, cache)
        print(cache.cached_tokens[0], *tokens[0, 1000:].tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    sys.path.insert(0, str(HERE))
    if OPTIONS.warm is not None:
        warm(OPTIONS.warm)
        return 0
    try:
        import torch
        import transformers  # noqa: F401
        if not torch.cuda.is_available():
            raise ImportError("torch sees no CUDA device")
    except ImportError as missing:
        print(f"Skipped: needs a CUDA device, torch with CUDA, and transformers: {missing}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        if OPTIONS.build is not None:
            staged = str(develop.stage(OPTIONS.build, pathlib.Path(folder)))
            sys.path.insert(0, staged)
            os.environ["PYTHONPATH"] = staged  # the second process reads it
        result = unittest.main(argv=[sys.argv[0], "-v", *rest], exit=False).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())

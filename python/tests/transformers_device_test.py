# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CrumbCache and generate over a GpuWorker, without a GPU: device_stand_in.py computes on the CPU,
so that the same model over a Worker is the reference. transformers_gpu_test.py needs a GPU."""

import unittest
import unittest.mock

import crumb
import support
import transformers_cache_test as small

torch = small.torch
if torch is not None and small.transformers is not None:
    import device_stand_in
    from crumb.transformers import CrumbCache, open_worker

# Bound of ||found - expected|| / ||expected|| over logits: the same rows, but matrix products of
# other shapes.
SAME = 1e-4
BLOCK = 384  # tokens of a prefill block here


@unittest.skipIf(torch is None or small.transformers is None, "needs torch and transformers")
class DeviceTest(support.CrumbdTest):
    def setUp(self):
        stand_in = device_stand_in.on_cpu()
        self.device = stand_in.__enter__()
        self.addCleanup(stand_in.__exit__, None, None, None)

    def workers(self, model, crumbd=None, **settings):
        """A Worker and a GpuWorker of a model. settings: of crumb.GpuSettings."""
        clients = [None, None] if crumbd is None else [self.client(), self.client()]
        cpu = open_worker(model, clients[0], weights=crumbd, begin_deadline=support.SECONDS)
        on_gpu = device_stand_in.worker_of(cpu, clients[1], **settings)
        self.addCleanup(cpu.close)
        self.addCleanup(on_gpu.close)
        return cpu, on_gpu

    def in_blocks(self, model):
        """Workers whose prefill blocks are short."""
        shape = open_worker(model)
        shape.close()
        model_of = crumb.Model(**{**vars(shape.model), "prefill_block": BLOCK})
        cpu = crumb.Worker(None, model_of)
        on_gpu = crumb.GpuWorker(None, model_of, gpu=crumb.GpuSettings(prompts=2))
        self.addCleanup(cpu.close)
        self.addCleanup(on_gpu.close)
        return cpu, on_gpu

    def test_generation_is_that_over_a_worker(self):
        ids = small.prompt(400, rows=3)
        mask = torch.ones_like(ids)
        mask[1, :70], mask[2, :390] = 0, 0
        for name, model in small.families():
            cpu, on_gpu = self.workers(model)
            found = []
            for worker in (cpu, on_gpu):
                with self.subTest(name), CrumbCache(model, ids, mask, worker=worker) as cache:
                    found.append(small.generate(model, ids, cache, attention_mask=mask))
            (expected, logits), (tokens, others) = found
            self.assertTrue(torch.equal(tokens, expected))
            self.assertLess(small.difference(others, logits), SAME)

    def test_a_bf16_model(self):
        model, ids = small.model_of("Llama", 64).bfloat16(), small.prompt(200)
        found = []
        for worker in self.workers(model):
            with CrumbCache(model, ids, worker=worker) as cache:
                found.append(small.logits_of(model, ids, cache).float())
        self.assertLess(small.difference(found[1], found[0]), small.BF16_MODEL)

    def test_prompts_are_cut_into_pieces(self):
        """At the ends of blocks, after prefill_tokens, and where `prompts` sequences are in it; the
        output has every column where it belongs."""
        model, ids = small.model_of("Qwen3", 64), small.prompt(800, rows=3)
        mask = torch.ones_like(ids)
        mask[2, :700] = 0
        cpu, on_gpu = self.in_blocks(model)
        with torch.no_grad():
            with CrumbCache(model, ids, mask, worker=cpu) as cache:
                expected = model(ids, attention_mask=mask, past_key_values=cache,
                                 output_hidden_states=True)
            self.device.log.clear()
            with CrumbCache(model, ids, mask, worker=on_gpu, prefill_tokens=500) as cache:
                found = model(ids, attention_mask=mask, past_key_values=cache,
                              output_hidden_states=True)
        self.assertEqual(self.device.log, [[384], [384], [32, 384], [1], [384], [32, 100], [1, 1]])
        fresh = mask.bool()
        self.assertLess(small.difference(found.logits[fresh], expected.logits[fresh]), SAME)
        self.assertEqual(len(found.hidden_states), len(expected.hidden_states))
        for one, other in zip(found.hidden_states, expected.hidden_states):
            self.assertEqual(one.shape, other.shape)
            self.assertLess(small.difference(one[fresh], other[fresh]), SAME)

    def test_a_piece_that_fails_leaves_the_pieces_before_it(self):
        model, ids = small.model_of("Llama", 64), small.prompt(600)
        cpu, on_gpu = self.in_blocks(model)
        calls = []

        def fail(*_):
            calls.append(0)
            if len(calls) == 2:
                raise RuntimeError("on purpose")

        with torch.no_grad(), CrumbCache(model, ids, worker=on_gpu) as cache:
            hook = model.model.layers[1].register_forward_hook(fail)
            with self.assertRaisesRegex(RuntimeError, "on purpose"):
                model(ids, past_key_values=cache)
            hook.remove()
            self.assertEqual(cache.get_seq_length(), BLOCK)
            rest = model(ids[:, BLOCK:], past_key_values=cache).logits[0]
        with CrumbCache(model, ids, worker=cpu) as cache:
            alone = small.logits_of(model, ids, cache)[BLOCK:]
            self.assertLess(small.difference(rest, alone), SAME)

    def test_chunked_prefill_needs_memory_for_all_rows(self):
        model, ids = small.model_of("Llama", 64), small.prompt(200, rows=3)
        _, two = self.workers(model, prompts=2)
        with CrumbCache(model, ids, worker=two) as cache, \
                self.assertRaises(crumb.ResourceExhausted):
            small.generate(model, ids, cache, prefill_chunk_size=64)
        cpu, three = self.workers(model, prompts=3)
        found = []
        for worker in (cpu, three):
            with CrumbCache(model, ids, worker=worker) as cache:
                found.append(small.generate(model, ids, cache, prefill_chunk_size=64))
        self.assertTrue(torch.equal(found[0][0], found[1][0]))
        self.assertLess(small.difference(found[1][1], found[0][1]), SAME)

    def test_tokens_behind_the_prompt(self):
        model, ids = small.model_of("Qwen2", 64), small.prompt(130)
        found = []
        for worker in self.workers(model):
            with CrumbCache(model, worker=worker) as cache:
                found.append(torch.cat([small.logits_of(model, piece, cache)
                                        for piece in (ids, ids[:, :3], ids[:, :1])]))
                with self.assertRaisesRegex(crumb.InvalidArgument, "must be known before"):
                    small.logits_of(model, ids, cache)
                self.assertEqual(cache.get_seq_length(), 134)
        self.assertLess(small.difference(found[1], found[0]), SAME)

    def test_a_long_sequence_gets_larger_tables(self):
        model, ids = small.model_of("Llama", 64, num_hidden_layers=1), small.prompt(300)
        _, on_gpu = self.workers(model)
        with unittest.mock.patch.object(crumb.transformers._passes, "TABLE_PAGES", 2), \
                unittest.mock.patch.object(crumb.transformers._cache, "ROW_TOKENS", 64), \
                CrumbCache(model, worker=on_gpu) as cache:
            tokens, _ = small.generate(model, ids, cache)
        self.assertEqual(tokens.shape, (1, 308))
        self.assertEqual({options.pages for options in self.device.opened}, {8})

    def test_pages_without_memory_stay_unpublished(self):
        model, ids = small.model_of("Llama", 64), small.prompt(100)
        _, on_gpu = self.workers(model)
        with CrumbCache(model, ids, worker=on_gpu) as cache, unittest.mock.patch.object(
                type(self.device), "crumb_device_batch_finish", autospec=True,
                return_value=device_stand_in.RESOURCE_EXHAUSTED) as refused:
            small.generate(model, ids, cache)
            cache.finish()
        refused.assert_called_once()

    def test_a_warm_cache_computes_the_rest(self):
        model, ids = small.model_of("Llama", 64), small.prompt(700, rows=2)
        mask = torch.ones_like(ids)
        mask[1, :130] = 0
        cpu, on_gpu = self.workers(model, "warm")
        with CrumbCache(model, ids, mask, worker=cpu) as cold:
            expected, logits = small.generate(model, ids, cold, attention_mask=mask)
            cold.finish(support.SECONDS)
        self.device.log.clear()
        with CrumbCache(model, ids, mask, worker=on_gpu) as warm:
            self.assertEqual(warm.cached_tokens, [384, 256])
            tokens, found = small.generate(model, ids, warm, attention_mask=mask)
        self.assertEqual(self.device.log[:2], [[316, 314], [1, 1]])
        with CrumbCache(model, ids, mask, worker=cpu) as warm:
            expected, logits = small.generate(model, ids, warm, attention_mask=mask)
        self.assertTrue(torch.equal(tokens, expected))
        self.assertLess(small.difference(found, logits), SAME)

    def test_workers_elsewhere_are_refused(self):
        model = small.model_of("Llama", 64)
        _, on_gpu = self.workers(model)
        with unittest.mock.patch.object(crumb.transformers._model, "torch_device",
                                        lambda ordinal: torch.device("cuda", ordinal)):
            with self.assertRaisesRegex(crumb.InvalidArgument, "keeps pages on cuda:0"):
                CrumbCache(model, worker=on_gpu)
        with self.assertRaisesRegex(crumb.InvalidArgument, "page_bytes_max"):
            open_worker(model, gpu=crumb.GpuSettings(pages=10))

    def test_memory_is_sized_by_the_sequences(self):
        sized, given = crumb.transformers._model.sized, crumb.GpuSettings(prompts=3, loads=9)
        self.assertEqual(sized(crumb.GpuSettings(), [100, 1000, 64], "int2"),
                         crumb.GpuSettings(pages=22, sequences=3, prompts=2))
        self.assertEqual(sized(given, [100], "bf16"),
                         crumb.GpuSettings(pages=1, bf16_pages=3, sequences=1, prompts=3, loads=9))

    def test_generate(self):
        model = small.model_of("Qwen3", 64)
        prompts = [small.prompt(length, seed=length)[0].tolist() for length in (300, 5, 120, 64)]
        cpu, on_gpu = self.workers(model, "loop", prompts=2)
        options = dict(max_new_tokens=20, batch=3)  # the last prompt leaves two places empty
        expected = crumb.generate(model, prompts, worker=cpu, **options)
        found = crumb.generate(model, prompts, worker=on_gpu, prefill_tokens=100, **options)
        self.assertEqual([one.tokens for one in found], [one.tokens for one in expected])
        self.assertEqual([len(one.tokens) for one in found], [20] * 4)


if __name__ == "__main__":
    unittest.main()

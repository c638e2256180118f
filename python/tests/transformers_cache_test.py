# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.transformers over small models with random weights.

The reference is the same model with transformers' eager attention: over its own rows rounded to
BF16 while the context is short, and over dequantized pages, which crumb.Transfer reads from crumbd,
once there is history. The models compute in F32, so that attention is the only difference.
"""

import contextlib
import itertools
import unittest

import crumb
import support

torch = support.installed("torch")
transformers = support.installed("transformers")
if torch is not None and transformers is not None:
    torch.set_num_threads(1)  # threads of so small models only wait for each other
    from crumb.transformers import CrumbCache, check_supported, open_worker, weights_digest

# Bounds of ||found - expected|| / ||expected|| over all logits; in parentheses the measured values.
# Equal BF16 rows, summed in another order (4e-5): single rows round to the other neighbour.
SAME_ROWS = 1e-3
# Rows that the reference keeps in F32 and the cache in BF16 (3e-3): 2^-9 a row, in three layers.
BF16_ROWS = 8e-3
# A model that computes in BF16, whose every sum is rounded (9e-3).
BF16_MODEL = 3e-2
# INT2 rows (1.5e-3): the rows of the reference are rounded to BF16 after dequantization. The error
# of quantization itself is 0.16 to 0.25 here.
INT2_ROWS = 5e-3
VOCABULARY = 500


def shape(head_dim):
    return dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
                max_position_embeddings=4096, initializer_range=0.08, pad_token_id=0,
                bos_token_id=None, eos_token_id=None)


def model_of(kind, head_dim, **options):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**shape(head_dim), **options})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def families():
    for kind, head_dim in (("Llama", 64), ("Qwen2", 128), ("Qwen3", 256)):
        yield f"{kind} {head_dim}", model_of(kind, head_dim)


def prompt(tokens, rows=1, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)


def difference(found, expected):
    return float((found - expected).norm() / expected.norm())


def rounded_eager(module, query, key, value, mask, scaling, **options):
    """Eager attention over rows rounded to BF16."""
    query, key, value = (rows.bfloat16().to(rows.dtype) for rows in (query, key, value))
    key, value = (rows.repeat_interleave(module.num_key_value_groups, 1) for rows in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def attention(model, name):
    """The model with another attention implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionInterface.register("rounded", rounded_eager)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def generate(model, ids, cache=None, tokens=8, **options):
    """(token ids, logits [tokens, batch, vocabulary]) of greedy generation."""
    out = model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False,
                         return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits)


def logits_of(model, ids, cache):
    """Logits [tokens, vocabulary] of one pass over [1, tokens] ids."""
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True).logits[0]


class Rows:
    """K and V of a prompt's leading pages as BF16 rows, dequantized by crumb.Transfer."""

    def __init__(self, client, model, ids, pages):
        shapes = (2, pages, crumb.PAGE_TOKENS, model.kv_heads, model.head_dim)
        self.layers = [torch.zeros(shapes, dtype=torch.bfloat16) for _ in range(model.layers)]
        of = crumb.PagedRows.of
        with crumb.Transfer(client, model) as transfer:
            transfer.use_cache(crumb.PagedCache(
                [(of(rows[0], "bthd"), of(rows[1], "bthd")) for rows in self.layers], pages,
                crumb.PAGE_TOKENS))
            space = transfer.keyspace()
            keys = transfer.keys(space, ids[:pages * crumb.PAGE_TOKENS])
            with transfer.acquire(space, keys, support.SECONDS) as lease:
                assert lease.pages == pages, lease.reason
                with transfer.load(lease.token, keys, 0, pages, range(pages),
                                   support.SECONDS) as load:
                    load.layers()

    def put(self, cache, begin, end):
        """Writes positions [begin, end) of a DynamicCache that has them, or ends at `begin`."""
        for number, rows in enumerate(self.layers):
            k, v = rows.flatten(1, 2)[:, begin:end].float().transpose(1, 2).unsqueeze(1)
            layer = cache.layers[number] if number < len(cache.layers) else None
            if layer is None or layer.get_seq_length() == begin:
                cache.update(k, v, number)
            else:
                layer.keys[:, :, begin:end], layer.values[:, :, begin:end] = k, v


@unittest.skipIf(torch is None or transformers is None, "needs torch and transformers")
class ShortContextTest(unittest.TestCase):
    """Without crumbd: contexts within sink and recent window; inputs that the cache refuses."""

    def test_logits_are_those_of_eager_attention_over_bf16_rows(self):
        ids = prompt(200)
        for name, model in families():
            with self.subTest(name):
                with CrumbCache(model) as cache:
                    tokens, found = generate(model, ids, cache, 40)
                for reference, tolerance in (("rounded", SAME_ROWS), ("eager", BF16_ROWS)):
                    with attention(model, reference):
                        expected, logits = generate(model, ids, None, 40)
                    self.assertTrue(torch.equal(tokens, expected))
                    self.assertLess(difference(found, logits), tolerance)

    def test_a_bf16_model(self):
        model, ids = model_of("Llama", 64).bfloat16(), prompt(200)
        with CrumbCache(model) as cache:
            found = logits_of(model, ids, cache)
        with attention(model, "eager"):
            expected = logits_of(model, ids, None)
        self.assertEqual(found.dtype, torch.bfloat16)
        self.assertLess(difference(found.float(), expected.float()), BF16_MODEL)

    def test_results_do_not_depend_on_how_the_prompt_is_cut(self):
        model, ids = model_of("Qwen3", 64), prompt(700)
        with CrumbCache(model) as cache:
            expected, logits = generate(model, ids, cache)
        with CrumbCache(model, ids) as cache:
            tokens, found = generate(model, ids, cache, prefill_chunk_size=150)
        self.assertTrue(torch.equal(tokens, expected))
        self.assertLess(difference(found, logits), 1e-4)
        with CrumbCache(model) as cache, self.assertRaisesRegex(crumb.InvalidArgument,
                                                                "must be known before"):
            generate(model, ids, cache, prefill_chunk_size=150)

    def test_rows_of_a_padded_batch_are_those_of_single_sequences(self):
        model, ids = model_of("Llama", 64), prompt(400, rows=3)
        mask = torch.ones_like(ids)
        mask[1, :70], mask[2, :390] = 0, 0
        alone = []
        for row, pads in enumerate((0, 70, 390)):
            with CrumbCache(model) as cache:
                alone.append(generate(model, ids[row:row + 1, pads:], cache))
        for options in ({}, {"prefill_chunk_size": 64}):
            with CrumbCache(model, ids, mask) as cache:
                tokens, found = generate(model, ids, cache, attention_mask=mask, **options)
            for row, (expected, logits) in enumerate(alone):
                self.assertEqual(tokens[row, 400:].tolist(), expected[0, -8:].tolist())
                self.assertLess(difference(found[:, row], logits[:, 0]), 1e-4)

    def test_passes_by_hand(self):
        """Without generate, masks and positions the cache supplies positions itself."""
        model, ids = model_of("Qwen2", 64), prompt(130)
        with CrumbCache(model) as cache:
            whole = logits_of(model, ids, cache)
            more = logits_of(model, ids[:, :3], cache)
        with CrumbCache(model, ids) as cache:
            pieces = [logits_of(model, piece, cache) for piece in ids.split(50, 1)]
            self.assertEqual(cache.get_seq_length(), 130)
            with torch.no_grad():
                again = model.model(ids[:, :3], None, None, cache).last_hidden_state
                again = model.lm_head(again)[0]
        self.assertLess(difference(torch.cat(pieces), whole), 1e-4)
        self.assertLess(difference(again, more), 1e-4)

    def test_a_failed_pass_leaves_the_cache_as_it_was(self):
        model, ids = model_of("Llama", 64), prompt(100)

        def fail(*_):
            raise RuntimeError("on purpose")

        with CrumbCache(model, ids) as cache:
            logits_of(model, ids[:, :60], cache)
            for module in (model.model.layers[1], model.model.norm):  # before and after all layers
                hook = module.register_forward_hook(fail)
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    logits_of(model, ids[:, 60:], cache)
                hook.remove()
                self.assertEqual(cache.get_seq_length(), 60)
            found = logits_of(model, ids[:, 60:], cache)
        with CrumbCache(model) as cache:
            expected = logits_of(model, ids, cache)[60:]
        self.assertLess(difference(found, expected), 1e-4)

    def test_other_caches_compute_as_with_sdpa(self):
        model, ids = model_of("Qwen3", 64), prompt(80, rows=2)
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        model.set_attn_implementation("sdpa")
        expected, logits = generate(model, ids, attention_mask=mask)
        with CrumbCache(model) as cache:
            self.assertEqual(model.config._attn_implementation, "crumb")
            generate(model, ids, cache, attention_mask=mask)
            tokens, found = generate(model, ids, attention_mask=mask)
        self.assertTrue(torch.equal(found, logits) and torch.equal(tokens, expected))

    def test_models_that_cannot_be_served(self):
        small = dict(num_hidden_layers=2)
        window = dict(use_sliding_window=True, sliding_window=64, max_window_layers=1)
        for name, pattern, model in (
                ("window", "sliding_attention", model_of("Qwen2", 64, **window)),
                ("all windows", "sliding_attention", model_of("Mistral", 64, sliding_window=64)),
                ("gemma", "sliding_attention", model_of("Gemma2", 64, **small)),
                ("latent", "MLA", model_of("DeepseekV3", 64, **small)),
                ("head_dim", "head_dim 32", model_of("Llama", 32)),
                ("meta", "on the CPU", model_of("Llama", 64).to("meta"))):
            with self.subTest(name):
                for attempt in (check_supported, open_worker, CrumbCache):
                    with self.assertRaisesRegex(crumb.InvalidArgument, pattern):
                        attempt(model)

    def test_inputs_that_cannot_be_served(self):
        model, ids = model_of("Llama", 64), prompt(40, rows=2)
        right = torch.ones_like(ids)
        right[0, 30:] = 0
        with self.assertRaisesRegex(crumb.InvalidArgument, "pad on the left"):
            CrumbCache(model, ids, right)
        with self.assertRaisesRegex(crumb.InvalidArgument, "token in every row"):
            CrumbCache(model, ids, torch.zeros_like(ids))
        with self.assertRaisesRegex(crumb.InvalidArgument, "token ids"):
            CrumbCache(model, ids[0])
        with self.assertRaisesRegex(crumb.InvalidArgument, "KV heads"):
            CrumbCache(model, worker=open_worker(model_of("Llama", 128)))
        passes = (("pad on the left", dict(attention_mask=right)),
                  ("no other pattern", dict(attention_mask=torch.ones(2, 1, 40, 40).bool())),
                  ("position_ids", dict(position_ids=torch.arange(40)[None] * 2)),
                  ("begins at column 5", dict(position_ids=torch.arange(40)[None] + 5)),
                  ("attention weights", dict(output_attentions=True)),
                  ("not those of the prompts", dict(input_ids=ids + 1)),
                  ("prompts end at 40", dict(input_ids=torch.cat([ids, ids[:, :3]], 1))),
                  ("rows of their own", dict(input_ids=ids[:1])),
                  ("input_ids", dict(input_ids=None, inputs_embeds=torch.zeros(2, 40, 128))))
        with torch.no_grad(), CrumbCache(model, ids) as cache:
            for pattern, inputs in passes:
                with self.subTest(pattern):
                    pattern = "that of the prompts" if "left" in pattern else pattern
                    with self.assertRaisesRegex(crumb.InvalidArgument, pattern):
                        model(**{"input_ids": ids, "past_key_values": cache, **inputs})
            expected = model(ids, past_key_values=cache).logits  # nothing has changed
            self.assertEqual(expected.shape, (2, 40, VOCABULARY))
            with self.assertRaisesRegex(crumb.InvalidArgument, "make a cache for all tokens"):
                model(ids, past_key_values=cache)
            with self.assertRaisesRegex(crumb.InvalidArgument, "does not go back"):
                generate(model, ids, cache)
            other = model_of("Llama", 64)
            with self.assertRaisesRegex(crumb.FailedPrecondition, "that it was made for"):
                other(ids, past_key_values=cache)
            with CrumbCache(other), self.assertRaisesRegex(crumb.InvalidArgument, "another model"):
                other(ids, past_key_values=cache)
            with attention(model, "sdpa"), self.assertRaisesRegex(crumb.FailedPrecondition,
                                                                  "set_attn_implementation"):
                model(ids[:, :1], past_key_values=cache)
            for call in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([0]))):
                with self.assertRaises(crumb.Unimplemented):
                    call()

    def test_beams_are_refused(self):
        model, ids = model_of("Llama", 64), prompt(40)
        for options in (dict(num_beams=2), dict(num_return_sequences=2, do_sample=True)):
            with CrumbCache(model, ids) as cache, self.assertRaises(crumb.Error):
                model.generate(ids, past_key_values=cache, max_new_tokens=4, **options)

    def test_digests_distinguish_weights(self):
        model = model_of("Llama", 64)
        before = weights_digest(model)
        self.assertEqual(weights_digest(model_of("Llama", 64)), before)
        self.assertNotEqual(weights_digest(model_of("Llama", 64).bfloat16()), before)
        moved = model_of("Llama", 64)
        moved.config._name_or_path = "/another/folder"
        self.assertEqual(weights_digest(moved), before)
        for change in ({"rms_norm_eps": 1e-2}, {"hidden_act": "gelu"}):
            self.assertNotEqual(weights_digest(model_of("Llama", 64, **change)), before, change)
        with torch.no_grad():
            model.model.layers[2].self_attn.k_proj.weight[5, 7] += 1e-3
        self.assertNotEqual(weights_digest(model), before)
        dynamic = model_of("Llama", 64, rope_parameters={
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        with crumb.Client("/nonexistent") as client:
            with self.assertRaisesRegex(crumb.InvalidArgument, "dynamic"):
                open_worker(dynamic, client)


@unittest.skipIf(torch is None or transformers is None, "needs torch and transformers")
class HistoryTest(support.CrumbdTest):
    """With crumbd: prefixes that other caches have published, and attention over INT2 history."""

    versions = itertools.count()

    def fresh(self, **options):
        """Options of a cache whose pages no other test has."""
        return {"socket_dir": self.folder, "weights": f"v{next(self.versions)}",
                "begin_deadline": support.SECONDS, **options}

    def test_a_warm_cache_computes_the_rest_of_the_prompt(self):
        ids = prompt(700)
        for name, model in families():
            with self.subTest(name):
                options = self.fresh()
                with CrumbCache(model, ids, **options) as cold:
                    self.assertEqual(cold.cached_tokens, [0])
                    generate(model, ids, cold)
                with CrumbCache(model, ids, **options) as warm:
                    self.assertEqual(warm.cached_tokens, [384])
                    found = logits_of(model, ids[:, 384:], warm)
                    shapes = warm.worker.model
                    self.assertEqual(warm.worker.counters()["hit_tokens_host"], 384)
                reference = transformers.DynamicCache()
                Rows(self.client(), shapes, ids[0], 6).put(reference, 0, 384)
                with attention(model, "rounded"):
                    expected = logits_of(model, ids[:, 384:], reference)
                with attention(model, "eager"):
                    exact = logits_of(model, ids, None)[384:]
                self.assertLess(difference(found, expected), INT2_ROWS)
                # The reference without quantization is farther away than the tolerance.
                self.assertGreater(difference(found, exact), 10 * INT2_ROWS)

    def test_decode_attends_int2_history(self):
        model, ids, steps = model_of("Qwen3", 64), prompt(700), prompt(14, seed=3)
        options = self.fresh()
        with CrumbCache(model, ids, **options) as cache:
            logits_of(model, ids, cache)
            found = torch.cat([logits_of(model, token, cache) for token in steps.split(1, 1)])
            shapes = cache.worker.model
            evicted = cache.worker.counters()["windows_evicted"]
        pages = Rows(self.client(), shapes, torch.cat([ids, steps], 1)[0], 7)
        reference, expected, history = transformers.DynamicCache(), [], 0
        with attention(model, "rounded"):
            logits_of(model, ids, reference)
            for length, token in enumerate(steps.split(1, 1), 700):
                end = (length + 1 - 256) // 64 * 64
                if end > history:
                    pages.put(reference, history, end)
                    history = end
                expected.append(logits_of(model, token, reference))
        self.assertEqual((history, evicted >= 6), (448, True))
        self.assertLess(difference(found, torch.cat(expected)), INT2_ROWS)

    def test_generate_takes_exact_pages_and_gives_the_same_tokens(self):
        model, ids = model_of("Llama", 64), prompt(700, rows=2)
        padded = torch.ones_like(ids)
        padded[1, :130] = 0
        for name, mask, cached in (("padded", padded, [384, 256]), ("whole", None, [384, 384])):
            with self.subTest(name):
                self.take_exact_pages(model, ids, mask, cached)

    def take_exact_pages(self, model, ids, mask, cached):
        options = self.fresh(history="bf16")
        with CrumbCache(model, ids, mask, **options) as cold:
            expected, logits = generate(model, ids, cold, attention_mask=mask)
        for chunked in ({}, {"prefill_chunk_size": 100}):
            with CrumbCache(model, ids, mask, **options) as warm:
                self.assertEqual(warm.cached_tokens, cached)
                self.assertEqual(warm.get_seq_length(), 384)
                tokens, found = generate(model, ids, warm, attention_mask=mask, **chunked)
                warm.finish(support.SECONDS)
                warm.finish()
            self.assertTrue(torch.equal(tokens, expected))
            self.assertLess(difference(found, logits), SAME_ROWS)

    def test_a_conversation_goes_on_with_a_new_cache_of_one_worker(self):
        model, ids = model_of("Llama", 64), prompt(400)
        with self.client() as client, open_worker(model, client, **{
                name: value for name, value in self.fresh().items() if name != "socket_dir"
        }) as worker:
            with CrumbCache(model, ids, worker=worker) as cache:
                tokens, _ = generate(model, ids, cache, 70)
            worker.wait_published(support.SECONDS)
            longer = torch.cat([tokens, prompt(300, seed=4)], 1)
            with CrumbCache(model, longer, worker=worker) as cache:
                self.assertEqual(cache.cached_tokens, [448])  # including pages of the output
                generate(model, longer, cache)
                self.assertEqual(cache.get_seq_length(), 777)
                cache.reset()
                self.assertEqual((cache.get_seq_length(), cache.cached_tokens), (0, []))
                # A prompt that the cache meets in the model's first pass is computed as a whole.
                self.assertEqual(logits_of(model, longer, cache).shape, (770, VOCABULARY))
                self.assertEqual(cache.cached_tokens, [0])

    def test_without_crumbd_a_prompt_is_computed(self):
        model, ids = model_of("Llama", 64), prompt(100)
        cache = CrumbCache(model, ids, socket_dir=self.folder + "/nothing", weights="none")
        self.addCleanup(cache.close)
        self.assertEqual(cache.cached_tokens, [0])
        self.assertEqual(generate(model, ids, cache)[0].shape, (1, 108))

    def test_publish_none_leaves_no_page(self):
        model, ids, options = model_of("Llama", 64), prompt(700), self.fresh()
        for publish in ("none", "prompt", "all"):
            with CrumbCache(model, ids, publish=publish, **options) as cache:
                self.assertEqual(cache.cached_tokens, [384 if publish == "all" else 0])
                generate(model, ids, cache)


if __name__ == "__main__":
    unittest.main()

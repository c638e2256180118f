#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""python/bench/long_context on the CPU: documents and answers against a search through the tokens,
pages against torch, optimizers against torch's, the model against transformers. Needs torch and
transformers; long_context_test.py runs by itself or in engines_transformers_test."""

import argparse
import json
import pathlib
import sys
import tempfile
import unittest

import safetensors.torch
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python/bench/long_context"), str(ROOT / "bench")]
import crumb  # noqa: E402
import questions  # noqa: E402
import run_facts  # noqa: E402
import score  # noqa: E402
import sequences  # noqa: E402
import tasks  # noqa: E402
import train  # noqa: E402
from model import Decoder, Shape, causal_attention, load, save  # noqa: E402

SMALL = tasks.Vocabulary(symbols=256, words=64)
RUN_FIELDS = {"command", "commit", "machine", "torch", "weights_sha256"}  # fields of every result
torch.set_num_threads(1)  # the machine may be busy


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def random_model(layers=2):
    """A model whose every projection is random, so that no attention is without effect."""
    model = Decoder(Shape(SMALL.size, hidden_size=128, intermediate_size=256,
                          num_hidden_layers=layers))
    model.initialize(generator(3))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.copy_(torch.randn(value.shape, generator=generator(4)) /
                            value.shape[1]**0.5)
    return model.eval()


def behind(tokens, first):
    """The symbols that follow `first`."""
    return [b for a, b in zip(tokens, tokens[1:])
            if a == first and tasks.FIRST_SYMBOL <= b < SMALL.first_word]


def searched(question, tokens):
    """The expected answers of a question, by a search through the document."""
    asked = [step.token for step in question.steps if step.token is not None][1:]
    if question.task == "common-words":
        counts = {word: tokens.count(word) for word in set(tokens) if word >= SMALL.first_word}
        return [sorted(counts, key=counts.get)[-tasks.COMMON_WORDS:]]
    if question.task == "chain":
        found = [asked[0]]
        while behind(tokens, found[-1]):
            found += behind(tokens, found[-1])
        return [[name] for name in found[1:]]
    if question.task == "multi-value":
        return [behind(tokens, asked[0])]
    return [behind(tokens, name) for name in asked]


class TasksTest(unittest.TestCase):
    def test_answers_are_those_that_a_search_finds(self):
        counts = questions.counts_of(6000, SMALL)
        for kind, count in counts.items():
            documents = tasks.make_documents(generator(), 3, 6000, count, SMALL)
            for row in range(3):
                tokens = documents.tokens[row].tolist()
                self.assertEqual(tokens[0], tasks.BEGIN)
                asked = questions.questions_of(documents, row, count)
                self.assertLessEqual(len(asked), questions.QUESTIONS_MAX)
                for question in asked:
                    with self.subTest(kind=kind, task=question.task):
                        self.assertEqual([sorted(right) for right in searched(question, tokens)],
                                         [sorted(right) for right in question.expected])
                by_task = {}
                for question in asked:
                    by_task[question.task] = by_task.get(question.task, 0) + question.items()
                self.assertEqual(set(by_task.values()), {20})
        self.assertEqual(counts["dense"].needles, SMALL.names_max)

    def test_records_that_do_not_fit_are_refused(self):
        for counts in (tasks.Counts(40, 0, 0, 0), tasks.Counts(1, 0, 0, 0, SMALL.symbols)):
            with self.assertRaisesRegex(ValueError, "does not fit"):
                tasks.make_documents(generator(), 1, 120, counts, SMALL)

    def test_targets_of_training_stand_behind_their_positions(self):
        for dense in (False, True):
            counts = train.counts_of(512, dense, SMALL)
            batch = tasks.training_batch(generator(), 4, 512, counts, SMALL)
            self.assertEqual(batch.tokens.shape, (4, 512))
            self.assertEqual(set(batch.answers), {"multi-key", "common-words"} if dense else
                             set(tasks.TASKS) - {"multi-key"})
            for task, (at, targets) in batch.answers.items():
                if task == "common-words":
                    self.assertEqual(at.tolist(), [511])
                    continue
                following = batch.tokens[:, at + 1]
                self.assertTrue((targets == following[..., None]).any(-1).all(), task)
                self.assertTrue((targets < SMALL.first_word).all(), task)


class QuestionsTest(unittest.TestCase):
    def test_a_reader_without_error_has_all_items_right_and_another_one_none(self):
        for count in questions.counts_of(3000, SMALL).values():
            documents = tasks.make_documents(generator(), 1, 3000, count, SMALL)
            asked = questions.questions_of(documents, 0, count)
            for offset, expected in ((0, True), (7, False)):
                read = [[] for _ in asked]

                def advance(numbers, tokens):
                    logits = torch.zeros(len(numbers), SMALL.size + 8)
                    for row, (number, token) in enumerate(zip(numbers, tokens)):
                        question, done = asked[number], read[number]
                        done.append(token)
                        step = question.steps[len(done) - 1]
                        if step.answers:
                            before = sum(1 for s in question.steps[:len(done) - 1] if s.answers)
                            for right in question.expected[before]:
                                logits[row, right + offset] = 1
                    return logits

                given = questions.ask(asked, advance)
                for question, answers in zip(asked, given):
                    right = question.right(answers)
                    self.assertEqual(len(right), question.items())
                    if expected:
                        self.assertTrue(all(right), question.task)
                    elif question.task not in ("multi-value", "common-words"):
                        self.assertFalse(any(right), question.task)

    def test_an_answer_is_read_back(self):
        question = questions.Question("chain", [questions.Step(1, 0), questions.Step(5, 1),
                                                questions.Step(None, 1)], [[6], [8]])
        read = []

        def advance(numbers, tokens):
            read.extend(tokens)
            logits = torch.zeros(1, 16)
            logits[0, tokens[0] + 2] = 1
            return logits

        self.assertEqual(questions.ask([question], advance), [[[7], [9]]])
        self.assertEqual(read, [1, 5, 7])
        self.assertEqual(question.right([[7], [9]]), [False, False])

    def test_intervals(self):
        low, high = questions.wilson(500, 500)
        self.assertAlmostEqual(low, 0.99238, places=4)
        self.assertAlmostEqual(high, 1.0)
        low, high = questions.wilson(250, 500)  # a table says 0.456 to 0.544
        self.assertAlmostEqual(low, 0.4563, places=3)
        self.assertAlmostEqual(high, 0.5437, places=3)
        base = [[True] * 4] * 10
        self.assertEqual(questions.paired_difference(base, base), (0, 0, 0))
        worse, low, high = questions.paired_difference([[True, True, True, False]] * 10, base)
        self.assertEqual((worse, low, high), (25, 25, 25))
        worse, low, high = questions.paired_difference([[False] * 4] + [[True] * 4] * 9, base)
        self.assertEqual(worse, 10)
        self.assertLess(low, 5)
        self.assertGreater(high, 20)


class SequencesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = random_model()
        cls.counts = questions.counts_of(900, SMALL)["sparse"]
        made = tasks.make_documents(generator(), 1, 900 // 64 * 64, cls.counts, SMALL)
        cls.tokens = made.tokens[0]
        cls.asked = questions.questions_of(made, 0, cls.counts)

    def logits(self, document):
        found = []

        def advance(numbers, tokens):
            found.append(document.advance(numbers, tokens))
            return found[-1]

        with torch.no_grad(), sequences.closing(document):
            document.fork(len(self.asked))
            questions.ask(self.asked, advance)
        return found

    def paged(self, history):
        described = crumb.Model("random", "random", layers=2, kv_heads=2, q_heads=4, head_dim=128,
                                history=history)
        worker = crumb.Worker(None, described)
        self.addCleanup(worker.close)
        with torch.no_grad():
            return self.logits(sequences.PagedDocument(self.model, worker, self.tokens,
                                                       questions.QUESTIONS_MAX))

    def in_torch(self, rounding):
        with torch.no_grad():
            return self.logits(sequences.TorchDocument(self.model, self.tokens, rounding))

    def whole(self, number):
        """Logits behind the first two tokens of a question, all computed in one pass."""
        steps = self.asked[number].steps[:2]
        tokens = torch.cat([self.tokens, torch.tensor([step.token for step in steps])])
        with torch.no_grad():
            hidden = self.model.hidden(tokens[None], torch.arange(len(tokens)), causal_attention)
        return self.model.logits(hidden[0, -1])

    def assert_close(self, found, expected, most):
        self.assertLess(float((found - expected).norm() / expected.norm()), most)

    def test_forks_continue_the_document(self):
        in_torch, paged = self.in_torch(None), self.paged("bf16")
        for number in (0, 7, len(self.asked) - 2):
            expected = self.whole(number)
            self.assert_close(in_torch[1][number], expected, 1e-4)
            self.assert_close(paged[1][number], expected, 2e-2)

    def test_rounded_history_differs_more_with_fewer_bits(self):
        exact = self.in_torch(None)
        differences = [float((other[1] - exact[1]).norm() / exact[1].norm()) for other in (
            self.paged("bf16"), self.in_torch(sequences.int4_hadamard), self.paged("int2"))]
        self.assertLess(differences[0], 2e-2)
        self.assertGreater(differences[1], 2 * differences[0])
        self.assertGreater(differences[2], 2 * differences[1])

    def test_int4_rounds_to_the_nearest_of_sixteen_levels(self):
        rows = torch.randn(50, 2, 128, generator=generator(), dtype=torch.float64)
        matrix = sequences.hadamard(128, rows.device).double()
        self.assertLess(float((matrix @ matrix - torch.eye(128)).abs().max()), 1e-6)
        before = rows @ matrix
        error = (sequences.int4_hadamard(rows.float()).double() - rows) @ matrix
        step = (before.amax(-1) - before.amin(-1)) / 15
        self.assertLess(float((error.abs().amax(-1) / step).max()), 0.52)  # fp16 scale and minimum
        self.assertGreater(float((error.abs().amax(-1) / step).mean()), 0.4)


class ModelTest(unittest.TestCase):
    def test_transformers_computes_the_same(self):
        with tempfile.TemporaryDirectory() as folder:
            save(random_model(), pathlib.Path(folder))
            ours = load(pathlib.Path(folder), dtype=torch.float32)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.assertIsInstance(theirs, transformers.Qwen3ForCausalLM)
        tokens = torch.randint(SMALL.size, (1, 300), generator=generator())
        with torch.no_grad():
            found = ours.logits(ours.hidden(tokens, torch.arange(300), causal_attention))
            expected = theirs(tokens).logits
        self.assertLess(float((found - expected).norm() / expected.norm()), 1e-4)

    def test_weights_of_other_types_are_loaded(self):
        model = random_model()
        tensors = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
        for dtype in (torch.float32, torch.float16):
            with tempfile.TemporaryDirectory() as folder:
                save(model, pathlib.Path(folder))
                safetensors.torch.save_file(
                    {name: value.to(dtype) for name, value in tensors.items()},
                    pathlib.Path(folder) / "model.safetensors")
                loaded = load(pathlib.Path(folder), dtype=torch.float32).state_dict()
            for name, value in tensors.items():
                self.assertTrue(torch.equal(loaded[name.removeprefix("model.")],
                                            value.to(dtype).float()), (dtype, name))


class TrainTest(unittest.TestCase):
    def test_orthogonal_matrices_have_singular_values_near_one(self):
        for rows, columns in ((64, 64), (96, 32), (32, 96)):
            matrix = torch.randn(3, rows, columns, generator=generator())
            values = torch.linalg.svdvals(train.orthogonal(matrix).double())
            self.assertLess(float(values.max()), 1.3)
            self.assertGreater(float(values.quantile(0.1)), 0.5)

    def test_adam_is_that_of_torch(self):
        ours, theirs = (torch.nn.Parameter(torch.ones(20)) for _ in range(2))
        adam = train.Adam([ours], 0.01)
        reference = torch.optim.Adam([theirs], 0.01, train.ADAM_BETAS, eps=1e-10)
        for step in range(1, 30):
            ours.grad = torch.randn(20, generator=generator(step))
            theirs.grad = ours.grad.clone()
            first, second = (1 - beta**step for beta in train.ADAM_BETAS)
            adam.step(torch.tensor(second**0.5 / first))
            reference.step()
        self.assertLess(float((ours - theirs).detach().abs().max()), 1e-5)

    def test_a_short_training_learns_and_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            options = argparse.Namespace(
                out=pathlib.Path(folder), device="cpu", seed=1, stages="128:8:40:1",
                seconds_max=600.0, progress_seconds=0.0, eager=False)
            model = Decoder(Shape(SMALL.size, hidden_size=64, intermediate_size=64, head_dim=64,
                                  num_hidden_layers=1))
            model.initialize(generator())
            with self.assertRaisesRegex(SystemExit, "no progress"):
                train.train(model, options, SMALL)
            self.assertEqual(json.loads((options.out / "config.json").read_text())["head_dim"], 64)
            lines = self.progress_of(model, options)
            train.write_course(options, run_facts.of_run("cpu", ["torch"]), lines)
            course = json.loads((options.out / "training.json").read_text())
            self.assertEqual(course["weights_sha256"], run_facts.weights_digest(options.out))
        self.assertEqual(course["progress"], lines)
        self.assertLessEqual(RUN_FIELDS, set(course))
        self.assertEqual([line["step"] for line in lines[:3]], [1, 2, 3])
        self.assertLess(lines[-1]["loss"], lines[0]["loss"] - 1)

    @staticmethod
    def progress_of(model, options):
        model.initialize(generator())
        trainer, progress = train.Trainer(model), train.Progress(0.0)
        train.run_stage(trainer, train.stages_of(options.stages)[0], True, generator(), SMALL,
                        progress, options)
        return progress.lines


class RetrievalModelTest(unittest.TestCase):
    def test_the_trained_model_finds_needles(self):
        model = load(ROOT / "models/data/retrieval", dtype=torch.float32)
        vocabulary, shape = tasks.Vocabulary(), model.shape
        self.assertEqual(shape.vocab_size, vocabulary.size)
        worker = crumb.Worker(None, crumb.Model(
            "retrieval", "retrieval", layers=shape.num_hidden_layers,
            kv_heads=shape.num_key_value_heads, q_heads=shape.num_attention_heads,
            head_dim=shape.head_dim, history="bf16"))
        self.addCleanup(worker.close)
        for kind, counts in questions.counts_of(1984, vocabulary).items():
            made = tasks.make_documents(generator(9), 1, 1984, counts, vocabulary)
            asked = questions.questions_of(made, 0, counts)
            with torch.no_grad():
                for document in (
                        sequences.TorchDocument(model, made.tokens[0], None),
                        sequences.PagedDocument(model, worker, made.tokens[0],
                                                questions.QUESTIONS_MAX)):
                    with self.subTest(kind=kind, document=type(document).__name__):
                        with sequences.closing(document):
                            document.fork(len(asked))
                            given = questions.ask(asked, document.advance)
                        right = [right for question, answers in zip(asked, given)
                                 if question.task in ("single", "multi-query", "multi-key")
                                 for right in question.right(answers)]
                        self.assertGreaterEqual(sum(right) / len(right), 0.9)


class ScoreTest(unittest.TestCase):
    def test_every_method_scores_the_same_items_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            model, out = pathlib.Path(folder) / "model", pathlib.Path(folder) / "score.json"
            save(random_model(), model)
            sys.argv = ["score.py", str(model), "--json", str(out), "--device", "cpu",
                        "--lengths", "1024", "--documents", "1", "--vocabulary", "256,64",
                        "--calibration-length", "1024", "--calibration-sequences", "2",
                        "--rotations", str(model)]
            score.main()
            result = json.loads(out.read_text())
            rows = result["rows"]
            files = [model / "oscar.rotation", model / "crumb.rotation"]
            made = [file.stat().st_mtime_ns for file in files]
            sys.argv += ["--methods", "bf16,oscar,crumb"]
            score.main()
            self.assertEqual([file.stat().st_mtime_ns for file in files], made)
            again = json.loads(out.read_text())["rows"]
        self.assertEqual(again, [row for row in rows if row["method"] in score.PAGED and
                                 row["method"] != "hadamard"])
        self.assertEqual({(row["method"], row["task"]) for row in rows},
                         {(method, task) for method in score.METHODS for task in tasks.TASKS})
        self.assertEqual({row["items"] for row in rows}, {20})
        self.assertLessEqual(RUN_FIELDS | {"calibration_seconds"}, set(result))
        for row in rows:
            self.assertEqual("points_below_bf16" in row, row["method"] != "bf16")


if __name__ == "__main__":
    unittest.main()

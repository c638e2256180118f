# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Questions about documents of tasks.py as scripts, and how answers are scored.

A script is the input of a sequence behind a document, token by token, and where an answer is taken
from the distribution of the next token. An item is one expected answer token. Answers are free: a
step without a token of its own reads the model's own last answer.
"""

import dataclasses
import math
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

import tasks

SPARSE = tasks.Counts(single=20, multi_value=5, multi_query=5, chains=4)
DENSE_SINGLE = 20
QUESTIONS_MAX = 35  # about a document of either kind


def counts_of(length: int, vocabulary: tasks.Vocabulary) -> Dict[str, tasks.Counts]:
    """The contents of documents that are scored, by kind: 20 items of each task. In dense ones
    three quarters of the room are needles, as far as there are names."""
    room = min(length // tasks.RECORD_TOKENS * 3 // 4, vocabulary.names_max)
    return {"sparse": SPARSE,
            "dense": tasks.Counts(DENSE_SINGLE, 0, 0, 0, distractors=room - DENSE_SINGLE)}


class Step(NamedTuple):
    """token: the input; None: the last answer. answers: how many of the most likely next tokens
    are answers; 0: none is taken."""

    token: Optional[int]
    answers: int


@dataclasses.dataclass(frozen=True)
class Question:
    """expected: for each step that takes answers, the tokens that are right."""

    task: str
    steps: Sequence[Step]
    expected: Sequence[Sequence[int]]

    def items(self) -> int:
        """Expected answer tokens."""
        return sum(len(right) for right in self.expected)

    def right(self, given: Sequence[Sequence[int]]) -> List[bool]:
        """Whether each expected token was given at its step."""
        return [token in answers for answers, expected in zip(given, self.expected)
                for token in expected]


def questions_of(documents: tasks.Documents, row: int, counts: tasks.Counts) -> List[Question]:
    """All questions about one document of a batch."""
    needles = documents.needles[row].tolist()
    made: List[Question] = []
    task = "multi-key" if counts.distractors else "single"
    for name, value in needles[:counts.single]:
        made.append(Question(task, [Step(tasks.ASK, 0), Step(name, 1)], [[value]]))
    for i in range(counts.multi_query):
        begin = counts.single + i * tasks.NAMES_PER_QUESTION
        asked = needles[begin:begin + tasks.NAMES_PER_QUESTION]
        steps = [Step(tasks.ASK, 0)]
        for j, (name, _) in enumerate(asked):
            steps += [Step(None, 0)] * (j > 0) + [Step(name, 1)]
        made.append(Question("multi-query", steps, [[value] for _, value in asked]))
    for name, *values in documents.multi_value[row].tolist():
        made.append(Question("multi-value", [Step(tasks.ASK, 0), Step(name, len(values))],
                             [values]))
    for value, *names in documents.chains[row].tolist():
        steps = [Step(tasks.ASK, 0), Step(value, 1)] + [Step(None, 1)] * (len(names) - 1)
        made.append(Question("chain", steps, [[name] for name in names]))
    if not counts.distractors:
        common = documents.common[row].tolist()
        made.append(Question("common-words", [Step(tasks.COMMON, len(common))], [common]))
    return made


Advance = Callable[[List[int], List[int]], torch.Tensor]


def ask(questions: Sequence[Question], advance: Advance) -> List[List[List[int]]]:
    """The answers to questions, each of which continues a sequence of its own.

    advance: reads one token each of the sequences of these numbers, and returns the logits of the
    next ones, [sequences, vocabulary].
    """
    given: List[List[List[int]]] = [[] for _ in questions]
    for step in range(max(len(question.steps) for question in questions)):
        active = [i for i, question in enumerate(questions) if step < len(question.steps)]
        tokens = []
        for i in active:
            token = questions[i].steps[step].token
            tokens.append(given[i][-1][0] if token is None else token)
        most = max(questions[i].steps[step].answers for i in active)
        logits = advance(active, tokens)
        if most > 0:
            best = logits.topk(most, dim=-1)[1].tolist()
            for i, answers in zip(active, best):
                wanted = questions[i].steps[step].answers
                if wanted > 0:
                    given[i].append(answers[:wanted])
    return given


def wilson(right: int, items: int, z: float = 1.96) -> "tuple[float, float]":
    """The 95 % interval of Wilson for a fraction of independent items."""
    fraction, width = right / items, z * z / items
    middle = (fraction + width / 2) / (1 + width)
    half = z / (1 + width) * math.sqrt(fraction * (1 - fraction) / items +
                                       z * z / (4 * items * items))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_difference(ours: Sequence[Sequence[bool]], base: Sequence[Sequence[bool]],
                      draws: int = 10000, seed: int = 1) -> "tuple[float, float, float]":
    """Points by which `ours` is below `base`, with the 95 % interval of a bootstrap over documents.

    ours, base: for each document whether its items are right, in the same order.
    """
    sizes = torch.tensor([len(items) for items in base], dtype=torch.float64)
    gaps = torch.tensor([sum(b) - sum(a) for a, b in zip(ours, base)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(base), (draws, len(base)), generator=generator)
    samples = 100 * gaps[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(100 * gaps.sum() / sizes.sum()), low, high


def summary(documents: Sequence[Sequence[bool]]) -> Dict[str, float]:
    """The score with Wilson's interval, from lists of items by document."""
    right, items = sum(map(sum, documents)), sum(map(len, documents))
    low, high = wilson(right, items)
    return {"right": right, "items": items, "documents": len(documents), "score": right / items,
            "low": low, "high": high}

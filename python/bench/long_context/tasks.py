# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Documents and questions over a vocabulary of their own, after the task families of RULER.

A document is a stream of words that hides records. A record is two symbols, followed by a word: a
name and a value (a needle), or a name and the next one (a link of a chain). Which symbols are names
and which are values differs between documents. docs/quality/long_context.md defines the tasks and
says where they differ from RULER's.

    token ids   in Vocabulary()  meaning
    0           0                BEGIN of a document
    1           1                ASK: begin of a question about symbols
    2           2                COMMON: the question which words are common
    symbols     64 to 3,135      names and values
    words       3,136 to 3,647   everything between records
"""

import dataclasses
from typing import Dict, List, Tuple

import torch

BEGIN, ASK, COMMON = 0, 1, 2
FIRST_SYMBOL = 64  # ids below are markers or unused

RECORD_TOKENS = 3        # two tokens and a word behind them
VALUES_PER_NAME = 4      # values of a name with several values
NAMES_PER_QUESTION = 4   # names of a question about several names
CHAIN_NAMES = 5          # a symbol, and the names that follow from it one after the other
COMMON_WORDS = 20        # words that appear COMMON_WEIGHT times as often as each other word
COMMON_WEIGHT = 10
TASKS = ("single", "multi-key", "multi-value", "multi-query", "chain", "common-words")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Numbers of tokens of each kind."""

    symbols: int = 3072
    words: int = 512

    @property
    def names_max(self) -> int:
        """Most names with one value in a document; at least as many symbols are left to be values
        or belong to other records."""
        return self.symbols // 2

    @property
    def first_word(self) -> int:
        return FIRST_SYMBOL + self.symbols

    @property
    def size(self) -> int:
        return self.first_word + self.words


@dataclasses.dataclass(frozen=True)
class Counts:
    """A document hides names with one value, with several, chains, and distractors (names
    with one value that nothing asks for)."""

    single: int
    multi_value: int
    multi_query: int  # questions, each about NAMES_PER_QUESTION names
    chains: int
    distractors: int = 0

    @property
    def needles(self) -> int:
        """Names with one value."""
        return self.single + self.multi_query * NAMES_PER_QUESTION + self.distractors

    @property
    def records(self) -> int:
        """All records."""
        return (self.needles + self.multi_value * VALUES_PER_NAME + self.chains * CHAIN_NAMES)

    @property
    def question_tokens(self) -> int:
        """Tokens of all questions with their answers, as `training_batch` writes them."""
        return (3 * self.single + 3 * self.multi_value + 7 * self.chains +
                (1 + 2 * NAMES_PER_QUESTION) * self.multi_query)


@dataclasses.dataclass
class Documents:
    """A batch of documents of one length and the same counts.

    tokens: [batch, length]. needles: [batch, needles, 2], names and values; those asked for come
    first: single ones, then those of multi-query questions. multi_value: [batch, n, 1 + 4], a name
    and its values. chains: [batch, n, 1 + 5], the symbols of a chain. common: [batch, 20] words.
    """

    tokens: torch.Tensor
    needles: torch.Tensor
    multi_value: torch.Tensor
    chains: torch.Tensor
    common: torch.Tensor


def _chosen(generator: torch.Generator, rows: int, of: int, count: int) -> torch.Tensor:
    """[rows, count]: distinct numbers below `of` in each row, in random order."""
    order = torch.rand(rows, of, generator=generator, device=generator.device)
    return order.argsort(dim=1)[:, :count]


def make_documents(generator: torch.Generator, batch: int, length: int, counts: Counts,
                   vocabulary: Vocabulary = Vocabulary()) -> Documents:
    """Random documents on the generator's device. Raises ValueError if the records do not fit."""
    slots = (length - RECORD_TOKENS) // RECORD_TOKENS
    chained = counts.chains * (1 + CHAIN_NAMES)
    several = counts.multi_value * (1 + VALUES_PER_NAME)
    distinct = counts.needles + several + chained
    if (counts.records > slots or counts.needles > vocabulary.names_max or
            distinct >= vocabulary.symbols):
        raise ValueError(f"{counts} does not fit into {length} tokens")
    device = generator.device

    common = _chosen(generator, batch, vocabulary.words, COMMON_WORDS)
    weights = torch.ones(batch, vocabulary.words, device=device)
    weights.scatter_(1, common, float(COMMON_WEIGHT))
    tokens = vocabulary.first_word + torch.multinomial(weights, length, replacement=True,
                                                       generator=generator)
    tokens[:, 0] = BEGIN

    symbols = FIRST_SYMBOL + _chosen(generator, batch, vocabulary.symbols, vocabulary.symbols)
    # Values of needles may be equal, but are not names.
    drawn = torch.randint(distinct, vocabulary.symbols, (batch, counts.needles),
                          generator=generator, device=device)
    needles = torch.stack([symbols[:, :counts.needles], symbols.gather(1, drawn)], dim=2)
    multi_value = symbols[:, counts.needles:counts.needles + several].view(
        batch, counts.multi_value, 1 + VALUES_PER_NAME)
    chains = symbols[:, distinct - chained:distinct].view(batch, counts.chains, 1 + CHAIN_NAMES)

    # The links of a chain lie in their order; everything else lies anywhere.
    records = torch.cat([
        torch.stack([chains[..., :-1], chains[..., 1:]], dim=3).flatten(1, 2), needles,
        torch.stack([multi_value[..., :1].expand(-1, -1, VALUES_PER_NAME), multi_value[..., 1:]],
                    dim=3).flatten(1, 2)], dim=1)
    slot = _chosen(generator, batch, slots, counts.records)
    links = counts.chains * CHAIN_NAMES
    slot[:, :links] = slot[:, :links].view(batch, counts.chains, CHAIN_NAMES).sort(dim=2)[0].view(
        batch, links)
    shift = torch.randint(1, RECORD_TOKENS + 1, (batch, 1), generator=generator, device=device)
    first = slot * RECORD_TOKENS + shift
    tokens.scatter_(1, first, records[..., 0])
    tokens.scatter_(1, first + 1, records[..., 1])
    return Documents(tokens, needles, multi_value, chains, vocabulary.first_word + common)


@dataclasses.dataclass
class TrainingBatch:
    """Documents with all their questions behind them.

    tokens: [batch, length]. answers: task -> (positions [n] whose next token is an answer, targets
    [batch, n, k] any of which is right).
    """

    tokens: torch.Tensor
    answers: Dict[str, "tuple[torch.Tensor, torch.Tensor]"]

    def rows(self, begin: int, end: int) -> "TrainingBatch":
        """Some of its sequences, without a copy."""
        return TrainingBatch(self.tokens[begin:end],
                             {task: (at, targets[begin:end])
                              for task, (at, targets) in self.answers.items()})

    def clone(self) -> "TrainingBatch":
        """A copy."""
        return TrainingBatch(self.tokens.clone(),
                             {task: (at.clone(), targets.clone())
                              for task, (at, targets) in self.answers.items()})

    def copy_(self, other: "TrainingBatch") -> None:
        """Takes the values of a batch of the same shape."""
        self.tokens.copy_(other.tokens)
        for task, (at, targets) in other.answers.items():
            self.answers[task][0].copy_(at)
            self.answers[task][1].copy_(targets)


def training_batch(generator: torch.Generator, batch: int, length: int, counts: Counts,
                   vocabulary: Vocabulary = Vocabulary()) -> TrainingBatch:
    """Documents and questions, `length` tokens in all. The order of questions is random."""
    document = length - counts.question_tokens - 1
    made = make_documents(generator, batch, document, counts, vocabulary)
    device = generator.device
    ask = torch.full((batch, 1), ASK, device=device)
    blocks: List[Tuple[str, torch.Tensor]] = []  # a question with its answers, [batch, n]
    singles = "multi-key" if counts.distractors else "single"
    for i in range(counts.single):
        blocks.append((singles, torch.cat([ask, made.needles[:, i]], 1)))
    for i in range(counts.multi_query):
        begin = counts.single + i * NAMES_PER_QUESTION
        asked = made.needles[:, begin:begin + NAMES_PER_QUESTION].flatten(1)
        blocks.append(("multi-query", torch.cat([ask, asked], 1)))
    for i in range(counts.multi_value):
        blocks.append(("multi-value", torch.cat([ask, made.multi_value[:, i]], 1)))
    for i in range(counts.chains):
        blocks.append(("chain", torch.cat([ask, made.chains[:, i]], 1)))
    order = torch.randperm(len(blocks), generator=generator, device=device).tolist()
    parts, at = [made.tokens], document
    positions: Dict[str, List[int]] = {}
    targets: Dict[str, List[torch.Tensor]] = {}
    for block in order:
        task, tokens = blocks[block]
        if task == "multi-value":  # any of the values is right; one of them stands behind the name
            answered, rights = [1], [tokens[:, 2:]]
            tokens = tokens[:, :3]
        elif task == "chain":
            answered = list(range(1, tokens.shape[1] - 1))
            rights = [tokens[:, i + 1:i + 2] for i in answered]
        else:
            answered = list(range(1, tokens.shape[1], 2))
            rights = [tokens[:, i + 1:i + 2] for i in answered]
        positions.setdefault(task, []).extend(at + i for i in answered)
        targets.setdefault(task, []).extend(rights)
        parts.append(tokens)
        at += tokens.shape[1]
    parts.append(torch.full((batch, 1), COMMON, device=device))
    positions["common-words"], targets["common-words"] = [at], [made.common]
    answers = {task: (torch.tensor(positions[task], device=device), torch.stack(targets[task], 1))
               for task in TASKS if task in positions}
    return TrainingBatch(torch.cat(parts, 1), answers)

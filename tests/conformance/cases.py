# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The cases of requests that may share pages or not, and the interface of the engine under test.

Every case runs a first request, which fills the cache, and a second one on a new worker. The second
one has to take exactly the leading tokens that the case allows from the cache: fewer is a lost hit,
one more is a wrong hit.
"""

import dataclasses
import hashlib
from typing import Protocol

PAGE_TOKENS = 64
PROMPT_TOKENS = 640


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """The settings that an engine is started with. Each field but the last separates pages."""

    model: str = "conformance"
    weights: str = "digest-of-the-weights"
    weight_format: str = "bf16"   # dtype that the model computes in
    history: str = "int2"         # format of history pages: "int2" or "bf16"
    method: str = "hadamard"      # how INT2 codes are chosen: "hadamard" or "identity"
    rope: str = "theta=1000000"
    tenant: str = "tenant-a"
    tensor_parallel: int = 1      # ranks that share the KV heads: pages do not depend on it


@dataclasses.dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    lora: str = ""
    cache_salt: str = ""
    # (first token, digest of the image): the pages from there on depend on the image.
    images: tuple[tuple[int, str], ...] = ()
    output: tuple[int, ...] = ()           # tokens that the model generates, behind the prompt
    rejected_drafts: tuple[int, ...] = ()  # proposed behind the prompt in one pass, and rejected


@dataclasses.dataclass(frozen=True)
class Result:
    cached_tokens: int  # leading tokens of the prompt that came from the cache
    digest: str         # digest of the attention output of the last computed token


class Engine(Protocol):
    """The four calls that an engine's connector implements."""

    window_tokens: int  # last tokens of a prompt that are computed whatever is cached

    def start(self, options: WorkerOptions) -> None:
        """Starts a worker that has no pages of its own, on the same cache."""

    def run(self, request: Request) -> Result:
        """Runs one request to its end. Its full pages are in the cache when this returns."""

    def stop(self) -> None:
        """Ends the worker."""


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    first: WorkerOptions
    first_request: Request
    second: WorkerOptions
    second_request: Request
    shared_tokens: int  # leading tokens that the second request may take from the first one's pages
    same_output: bool = False  # the two requests compute the same


def tokens(name, count=PROMPT_TOKENS):
    """Tokens that depend on the name, so that no case hits the pages of another one."""
    digest = hashlib.shake_128(name.encode()).digest(2 * count)
    return tuple(int.from_bytes(digest[2 * i:2 * i + 2], "little") for i in range(count))


def must_hit(name, second=WorkerOptions(), first=WorkerOptions()):
    # The output is that of a decode step: while a prompt is computed, its tokens attend BF16 rows.
    request = Request(tokens(name), output=tokens(name + " output", 1))
    return Case(name, first, request, second, request, PROMPT_TOKENS, same_output=True)


def must_miss(name, worker=None, request=None, shared_tokens=0):
    """A case whose second request differs in these fields of the worker or the request."""
    base = Request(tokens(name))
    return Case(name, WorkerOptions(), base,
                dataclasses.replace(WorkerOptions(), **(worker or {})),
                dataclasses.replace(base, **(request or {})), shared_tokens)


def another_image(name):
    """Placeholder tokens, equal in both requests, stand for another image from the third page on."""
    first = Request(tokens(name), images=((2 * PAGE_TOKENS + 5, "image-1"),))
    second = dataclasses.replace(first, images=((2 * PAGE_TOKENS + 5, "image-2"),))
    return Case(name, WorkerOptions(), first, WorkerOptions(), second, 2 * PAGE_TOKENS)


def rejected_draft(name):
    """The page behind the prompt holds the generated tokens, not the proposed ones."""
    prompt = tokens(name)
    drafts = tokens(name + " drafts", 4)
    output = tokens(name + " output", 2 * PAGE_TOKENS)
    with_drafts = drafts + output
    first = Request(prompt, output=output, rejected_drafts=drafts)
    second = Request(prompt + with_drafts + tokens(name + " rest", 5 * PAGE_TOKENS))
    return Case(name, WorkerOptions(), first, WorkerOptions(), second, PROMPT_TOKENS)


def generated(name):
    """The counterpart of rejected_draft: a prompt that goes on with the generated tokens."""
    prompt = tokens(name)
    output = tokens(name + " output", 2 * PAGE_TOKENS)
    first = Request(prompt, output=output, rejected_drafts=tokens(name + " drafts", 4))
    second = Request(prompt + output + tokens(name + " rest", 5 * PAGE_TOKENS))
    return Case(name, WorkerOptions(), first, WorkerOptions(), second,
                PROMPT_TOKENS + 2 * PAGE_TOKENS)


CASES = (
    must_hit("same prompt"),
    must_hit("another tensor-parallel degree", second=WorkerOptions(tensor_parallel=2)),
    must_hit("a smaller tensor-parallel degree", first=WorkerOptions(tensor_parallel=2)),
    generated("generated tokens"),
    must_miss("another model", worker={"model": "conformance-2"}),
    must_miss("another weight digest", worker={"weights": "another-digest"}),
    must_miss("another dtype", worker={"weight_format": "fp8"}),
    must_miss("another page format", worker={"history": "bf16"}),
    must_miss("another method", worker={"method": "identity"}),
    must_miss("another RoPE setting", worker={"rope": "theta=10000"}),
    must_miss("another tenant", worker={"tenant": "tenant-b"}),
    must_miss("another LoRA", request={"lora": "adapter-1"}),
    must_miss("another cache salt", request={"cache_salt": "salt-1"}),
    another_image("another image"),
    rejected_draft("a rejected draft token"),
)


def expected_tokens(case, engine):
    """Tokens of whole shared pages, without the last tokens, which are always computed."""
    reusable = min(case.shared_tokens, len(case.second_request.tokens) - engine.window_tokens)
    return max(reusable, 0) // PAGE_TOKENS * PAGE_TOKENS


def run_alone(engine, options, request):
    engine.start(options)
    try:
        return engine.run(request)
    finally:
        engine.stop()


def check(case, engine):
    """Runs a case; returns the failure, empty if there is none."""
    first = run_alone(engine, case.first, case.first_request)
    if first.cached_tokens != 0:
        return f"the first request took {first.cached_tokens} tokens from an empty cache"
    second = run_alone(engine, case.second, case.second_request)
    expected = expected_tokens(case, engine)
    if second.cached_tokens > expected:
        return f"wrong hit: {second.cached_tokens} tokens are cached, at most {expected} may be"
    if second.cached_tokens < expected:
        return f"lost hit: {second.cached_tokens} tokens are cached, {expected} must be"
    if case.same_output and second.digest != first.digest:
        return "the output over cached pages differs from the computed one"
    # Else a cache that keeps nothing would pass.
    again = run_alone(engine, case.first, case.first_request)
    if again.cached_tokens == 0:
        return "the first request repeated is no hit: the cache keeps nothing"
    return ""


class Forgetful:
    """An engine whose connector forgets fields: the suite has to notice every one."""

    def __init__(self, engine, worker=(), request=()):
        self.engine = engine
        self.worker = {name: getattr(WorkerOptions(), name) for name in worker}
        self.request = {name: getattr(Request(()), name) for name in request}
        self.window_tokens = engine.window_tokens

    def start(self, options):
        self.engine.start(dataclasses.replace(options, **self.worker))

    def run(self, request):
        return self.engine.run(dataclasses.replace(request, **self.request))

    def stop(self):
        self.engine.stop()


class KeepsRejectedDrafts(Forgetful):
    """Takes rejected tokens for part of the sequence."""

    def run(self, request):
        return self.engine.run(dataclasses.replace(
            request, output=request.rejected_drafts + request.output, rejected_drafts=()))


class SeparatesDegrees(Forgetful):
    """Puts the tensor-parallel degree into the keyspace."""

    def start(self, options):
        self.engine.start(dataclasses.replace(
            options, model=f"{options.model}-tp{options.tensor_parallel}"))


# Connectors with one mistake each, and the cases that have to fail with it, and no other.
MISTAKES = {
    "forgets the model": (lambda e: Forgetful(e, worker=["model"]), {"another model"}),
    "forgets the weights": (lambda e: Forgetful(e, worker=["weights"]), {"another weight digest"}),
    "forgets the dtype": (lambda e: Forgetful(e, worker=["weight_format"]), {"another dtype"}),
    "forgets the page format": (lambda e: Forgetful(e, worker=["history"]),
                                {"another page format"}),
    "forgets the method": (lambda e: Forgetful(e, worker=["method"]), {"another method"}),
    "forgets RoPE": (lambda e: Forgetful(e, worker=["rope"]), {"another RoPE setting"}),
    "forgets the tenant": (lambda e: Forgetful(e, worker=["tenant"]), {"another tenant"}),
    "forgets the LoRA": (lambda e: Forgetful(e, request=["lora"]), {"another LoRA"}),
    "forgets the salt": (lambda e: Forgetful(e, request=["cache_salt"]), {"another cache salt"}),
    "forgets images": (lambda e: Forgetful(e, request=["images"]), {"another image"}),
    "keeps rejected drafts": (KeepsRejectedDrafts, {"a rejected draft token", "generated tokens"}),
    "separates degrees": (SeparatesDegrees, {"another tensor-parallel degree",
                                             "a smaller tensor-parallel degree"}),
}

#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Sends an OpenAI server two prompts about one document, and shows how much of the second one was
cached: prefix_hits.py [--url http://127.0.0.1:8000] [--document FILE]

Restart the server in between (--pause), and the hit comes from crumbd: vLLM's own cache is empty
then. The server must run with --enable-prompt-tokens-details to report cached tokens. Needs nothing
but Python.
"""

import argparse
import json
import pathlib
import time
import urllib.request

PROMPTS = ("Summary of this document in one sentence:",
           "The problem that it solves, in one sentence:")
REQUEST_SECONDS = 600


def call(url, body=None):
    """The response to a GET, or with a body to a POST, as it arrives."""
    return urllib.request.urlopen(urllib.request.Request(
        url, json.dumps(body).encode() if body is not None else None,
        {"Content-Type": "application/json"}), timeout=REQUEST_SECONDS)


def events(response):
    """The JSON objects of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[len(b"data: "):])


def complete(url, model, prompt, max_tokens):
    """Streams a completion. Returns it, the seconds to its first token, and how many tokens the
    prompt has and were cached (None: the server does not say)."""
    begin, first, text, usage = time.monotonic(), None, "", {}
    with call(f"{url}/v1/completions", {
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}}) as response:
        for event in events(response):
            if event["choices"] and first is None:
                first = time.monotonic() - begin
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details")
    cached = None if details is None else details.get("cached_tokens") or 0
    return text.strip(), first, usage.get("prompt_tokens", 0), cached


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--document", type=pathlib.Path, help="default: a page of Crumb's docs")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--pause", action="store_true", help="wait for Enter between the prompts")
    options = parser.parse_args()
    document = options.document or pathlib.Path(__file__).parents[2] / "docs/architecture.md"
    text = document.read_text(encoding="utf-8")
    with call(f"{options.url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    for number, instruction in enumerate(PROMPTS):
        if number and options.pause:
            input("Restart the server now if you like, then press Enter: ")
        completion, first, prompt, cached = complete(
            options.url, model, f"{text}\n\n{instruction}", options.max_tokens)
        known = "an unknown number" if cached is None else cached
        print(f"{instruction}\n  {completion}\n  first token after {first:.2f} s; "
              f"{known} of {prompt} tokens of the prompt were cached", flush=True)


if __name__ == "__main__":
    main()

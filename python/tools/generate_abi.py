#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the ctypes declarations of the C interface: generate_abi.py FOLDER OUTPUT.py

The headers in FOLDER are its one definition. This program reads the subset of C that they
use (integer macros, structs of scalars, pointers and arrays, typedefs of integers and functions,
function declarations) and fails on anything else, so that nothing is left out silently.
tests/abi_test.py compares the result with a C compiler's reading of these headers.
"""

import pathlib
import re
import sys

# The headers of the C interface, each behind those that it includes.
HEADERS = ("crumb.h", "crumb_transfer.h", "crumb_blocks.h", "crumb_device.h")
SCALARS = {
    "int": "c_int", "float": "c_float", "size_t": "c_size_t", "uint8_t": "c_uint8",
    "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64", "uint64_t": "c_uint64",
}
IDENTIFIER = r"[A-Za-z_]\w*"


class Interface:
    """The declarations of several headers, in their order."""

    def __init__(self, texts):
        self.constants = {}
        self.aliases = {}    # typedef of an integer: name -> ctypes scalar
        self.opaque = set()  # structs that only pointers name
        self.callbacks = {}  # name -> [result, *parameters] as ctypes expressions
        self.structs = {}    # name -> [(member, ctypes expression)]
        self.functions = {}  # name -> (result, [parameters])
        self.body = []       # names of callbacks and structs in order
        for text in texts:
            self._read(text)

    def _read(self, text):
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        text = text.replace("\\\n", " ")
        for line in re.findall(r"^#define (.*)$", text, re.MULTILINE):
            self._define(line.strip())
        text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
        text = re.sub(r'extern "C" \{', "", text)
        for statement in self._statements(text):
            self._declare(" ".join(statement.split()))

    def _statements(self, text):
        """Pieces of `text` that end with a semicolon outside of braces."""
        depth, begin = 0, 0
        for at, letter in enumerate(text):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if letter == ";" and depth == 0:
                yield text[begin:at]
                begin = at + 1
        rest = text[begin:].strip()
        if rest not in ("", "}"):  # the closing brace of extern "C"
            raise ValueError(f"not a declaration: {rest[:80]!r}")

    def _define(self, line):
        number = re.fullmatch(rf"({IDENTIFIER}) (\d+)", line)
        if number:
            self.constants[number[1]] = int(number[2])
            return
        # The include guard, the visibility attribute and macros with parameters are no constants.
        if not re.fullmatch(rf"CRUMB_(?:[A-Z]+_)?H_|CRUMB_API\b.*|{IDENTIFIER}\(.*", line):
            raise ValueError(f"not a constant: #define {line}")

    def _declare(self, statement):
        function = re.fullmatch(rf"CRUMB_API (.*?)({IDENTIFIER}) ?\((.*)\)", statement)
        struct = re.fullmatch(rf"typedef struct {IDENTIFIER} \{{(.*)\}} ({IDENTIFIER})", statement)
        opaque = re.fullmatch(rf"typedef struct ({IDENTIFIER}) ({IDENTIFIER})", statement)
        callback = re.fullmatch(rf"typedef (.*?) ?\(\*({IDENTIFIER})\)\((.*)\)", statement)
        alias = re.fullmatch(rf"typedef ({IDENTIFIER}) ({IDENTIFIER})", statement)
        if function:
            parameters = [self._parameter(p) for p in self._split(function[3])]
            self.functions[function[2]] = (self._type(function[1]), parameters)
        elif struct:
            self.structs[struct[2]] = [member for text in struct[1].split(";") if text.strip()
                                       for member in self._members(text.strip())]
            self.body.append(struct[2])
        elif opaque:
            self.opaque.add(opaque[2])
        elif callback:
            parameters = [self._parameter(p) for p in self._split(callback[3])]
            self.callbacks[callback[2]] = [self._type(callback[1]), *parameters]
            self.body.append(callback[2])
        elif alias and alias[1] in SCALARS:
            self.aliases[alias[2]] = SCALARS[alias[1]]
        else:
            raise ValueError(f"not understood: {statement[:120]!r}")

    @staticmethod
    def _split(parameters):
        """Parameters at the top level of a list; the commas of a nested function are not theirs."""
        pieces, depth = [""], 0
        for letter in parameters:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                pieces.append("")
            else:
                pieces[-1] += letter
        pieces = [piece.strip() for piece in pieces]
        return [] if pieces in ([""], ["void"]) else pieces

    def _parameter(self, text):
        nested = re.fullmatch(rf"(.*?) ?\(\*{IDENTIFIER}\)\((.*)\)", text)
        if nested:
            parts = [self._type(nested[1]), *(self._parameter(p) for p in self._split(nested[2]))]
            return f"CFUNCTYPE({', '.join(parts)})"
        name = re.search(rf"{IDENTIFIER}$", text)
        return self._type(text[:name.start()])

    def _members(self, text):
        """Members of `const char* a`, `uint32_t a, b` or `uint8_t id[CRUMB_KEY_BYTES]`."""
        first, *more = (piece.strip() for piece in text.split(","))
        match = re.fullmatch(rf"(.*?)({IDENTIFIER})(?:\[({IDENTIFIER}|\d+)\])?", first)
        if not match or (more and (match[3] or "*" in match[1])):
            raise ValueError(f"not a member: {text!r}")
        kind = self._type(match[1])
        if match[3]:
            count = self.constants[match[3]] if match[3] in self.constants else int(match[3])
            kind = f"{kind} * {count}"
        return [(name, kind) for name in (match[2], *more)]

    def _type(self, text):
        words = text.replace("*", " * ").split()
        stars = words.count("*")
        base = [word for word in words if word not in ("*", "const")]
        if len(base) != 1:
            raise ValueError(f"not a type: {text!r}")
        name = base[0]
        if name == "void":
            return "c_void_p" if stars else "None"
        if name == "char":
            return {1: "c_char_p", 2: "POINTER(c_char_p)"}[stars]
        if name in self.callbacks and not stars:
            return name
        if name in self.structs:
            return {0: name, 1: f"POINTER({name})"}[stars]
        if name not in self.opaque | self.aliases.keys() | SCALARS.keys():
            raise ValueError(f"an unknown type: {text!r}")
        if stars:  # handles and buffers, whose sizes the functions' contracts state
            return "c_void_p"
        return self.aliases.get(name) or SCALARS[name]


def read_headers(folder):
    """The texts of the C interface's headers."""
    return [(folder / name).read_text(encoding="utf-8") for name in HEADERS]


def generate(texts):
    """The module's text for the texts of headers."""
    interface = Interface(texts)
    lines = ['"""Generated from the C interface by tools/generate_abi.py: not to be edited."""', "",
             "from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int,",
             "                    c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64,",
             "                    c_void_p)",
             "from typing import Any, Dict, List, Tuple", ""]
    lines += [f"{name} = {value}" for name, value in interface.constants.items()]
    for name in interface.body:
        if name in interface.callbacks:
            lines += ["", f"{name} = CFUNCTYPE({', '.join(interface.callbacks[name])})"]
            continue
        lines += ["", "", f"class {name}(Structure):", "    _fields_ = ["]
        lines += [f'        ("{member}", {kind}),' for member, kind in interface.structs[name]]
        lines += ["    ]"]
    lines += ["", "", "# Function name: (type of the result, types of the parameters).",
              "FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {"]
    for name, (result, parameters) in interface.functions.items():
        lines.append(f'    "{name}": ({result}, [{", ".join(parameters)}]),')
    lines += ["}", "", f"STRUCTS = ({', '.join(interface.structs)},)", ""]
    return "\n".join(lines)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: generate_abi.py FOLDER OUTPUT.py")
    module = generate(read_headers(pathlib.Path(sys.argv[1])))
    with open(sys.argv[2], "w", encoding="utf-8") as output:
        output.write(module)


if __name__ == "__main__":
    main()

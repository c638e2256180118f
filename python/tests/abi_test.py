# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the package's declarations of the C interface with a C++ compiler's reading of its
headers, and with the functions that the library exports."""

import ctypes
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import support
from crumb import _abi, _library, client

sys.path.insert(0, str(support.ROOT / "python/tools"))
import generate_abi  # noqa: E402

API = support.ROOT / "client/api"
# Prints a JSON object: sizes and offsets of structs, kinds of functions' results and parameters.
PROGRAM = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
@INCLUDES@
template <typename T> void Kind() {
  if constexpr (std::is_void_v<T>) std::printf("\\"void\\"");
  else std::printf("\\"%s%zu\\"", std::is_pointer_v<T> ? "p" : std::is_floating_point_v<T> ? "f"
                   : std::is_signed_v<T> ? "i" : "u", sizeof(T));
}
template <typename R, typename... A> void Describe(const char* name, R (*)(A...)) {
  std::printf(",\\n\\"%s\\": [", name);
  Kind<R>();
  ((std::printf(", "), Kind<A>()), ...);
  std::printf("]");
}
int main() {
  std::printf("{\\"\\": []");
@LINES@
  std::printf("}\\n");
}
"""


def kind_of(ctype):
    """A ctypes type in the words of PROGRAM."""
    if ctype is None:
        return "void"
    size = ctypes.sizeof(ctype)
    if ctype in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(
            ctype, (ctypes._Pointer, ctypes._CFuncPtr)):
        return f"p{size}"
    if ctype is ctypes.c_float:
        return f"f{size}"
    return f"{'i' if ctype(-1).value < 0 else 'u'}{size}"


def lines():
    for struct in _abi.STRUCTS:
        name = struct.__name__
        yield f'  std::printf(",\\n\\"{name}\\": [%zu", sizeof({name}));'
        for member, _ in struct._fields_:
            yield (f'  std::printf(", [%zu, %zu]", offsetof({name}, {member}), '
                   f"sizeof((({name}*)nullptr)->{member}));")
        yield '  std::printf("]");'
    for name in _abi.FUNCTIONS:
        yield f'  Describe("{name}", &{name});'
    for name, value in vars(_abi).items():
        if name.startswith("CRUMB_"):
            yield f'  static_assert({name} == {value}, "{name}");'


class AbiTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "abi.cc"
            includes = "\n".join(f'#include "{name}"' for name in generate_abi.HEADERS)
            source.write_text(PROGRAM.replace("@INCLUDES@", includes)
                              .replace("@LINES@", "\n".join(lines())))
            # The functions are not called: they need not be there when the program is linked.
            program = pathlib.Path(folder) / "abi"
            subprocess.run(["g++", "-std=c++20", "-Wno-invalid-offsetof", "-I", API,
                            "-Wl,--unresolved-symbols=ignore-all", "-o", program, source],
                           check=True)
            out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        cls.compiled = json.loads(out)

    def test_structs_have_the_compilers_sizes_and_offsets(self):
        self.assertGreater(len(_abi.STRUCTS), 8)
        for struct in _abi.STRUCTS:
            size, *members = self.compiled[struct.__name__]
            with self.subTest(struct.__name__):
                self.assertEqual(ctypes.sizeof(struct), size)
                ours = [[getattr(struct, name).offset, ctypes.sizeof(kind)]
                        for name, kind in struct._fields_]
                self.assertEqual(ours, members)

    def test_functions_have_the_compilers_parameters(self):
        for name, (result, parameters) in _abi.FUNCTIONS.items():
            with self.subTest(name):
                self.assertEqual([kind_of(kind) for kind in (result, *parameters)],
                                 self.compiled[name])

    def test_every_exported_function_is_declared(self):
        exported = subprocess.run(["nm", "-D", "--defined-only", _library.c._name], check=True,
                                  capture_output=True, text=True).stdout
        names = {line.split()[-1] for line in exported.splitlines() if " T " in line}
        self.assertEqual(names, set(_abi.FUNCTIONS))

    def test_every_number_has_its_name_in_the_enums(self):
        for enum, prefix in ((client.Miss, "CRUMB_MISS_"), (client.Tier, "CRUMB_TIER_"),
                             (client.PutOutcome, "CRUMB_PUT_")):
            numbers = {name.removeprefix(prefix): value for name, value in vars(_abi).items()
                       if name.startswith(prefix)}
            members = {member.name: member.value for member in enum}
            with self.subTest(enum.__name__):
                self.assertGreater(len(numbers), 3)
                self.assertEqual({**members, **numbers}, members)
                self.assertLessEqual(set(members) - set(numbers), {"UNKNOWN"})

    def test_the_package_was_made_from_these_headers(self):
        self.assertEqual(set(generate_abi.HEADERS), {path.name for path in API.glob("*.h")})
        made = generate_abi.generate(generate_abi.read_headers(API))
        self.assertEqual(pathlib.Path(_abi.__file__).read_text(encoding="utf-8"), made)

    def test_what_the_generator_does_not_understand_fails(self):
        first, *others = generate_abi.read_headers(API)
        for more in ("CRUMB_API int crumb_new(unknown_t value);", "#define CRUMB_X (1 << 3)",
                     "typedef union crumb_u { int a; } crumb_u;",
                     "typedef struct crumb_s { int a : 3; } crumb_s;", "int crumb_hidden(void);"):
            with self.subTest(more), self.assertRaises(ValueError):
                generate_abi.generate([
                    re.sub(r"(?=#ifdef __cplusplus\n\})", more + "\n", first), *others])


if __name__ == "__main__":
    unittest.main()

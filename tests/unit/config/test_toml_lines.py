"""Lines of keys in TOML files, as errors quote them."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.core.config.sources import key_lines, line_of

FILE = '''\
# a comment
max_steps = 3   # [not, a, table]

names = [
  "a]",
  # [not.a.table]
  "b",
]
text = """
[not.a.table]
key = 1
"""
[model]
name = "q"
rope.scale = 1
limits = { low = 1, high = 2 }
[[env]]
id = "x"

  [env.sampling]
  temperature = 1
[[env]]
[[env.parts]]
q = 1
[[env.parts]]
'q 2' = 1
[["a.b"]]
c = []
[last]
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("max_steps",), 2),
        (("names",), 4),
        (("names", "1"), 4),
        (("text",), 9),
        (("model", "name"), 14),
        (("model", "rope", "scale"), 15),
        (("model", "limits", "high"), 16),
        (("env", "0"), 17),
        (("env", "0", "id"), 18),
        (("env", "0", "sampling", "temperature"), 21),
        (("env", "1"), 22),
        (("env", "1", "parts", "0", "q"), 24),
        (("env", "1", "parts", "1", "q 2"), 26),
        (("a.b", "0", "c"), 28),
        (("last",), 29),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_the_line_of_each_key(path: tuple[str, ...], line: int, ends: str) -> None:
    text = FILE.replace("\n", ends)
    tomllib.loads(text)
    assert line_of(path, key_lines(text)) == line


def test_a_key_that_is_not_written_has_the_line_of_what_holds_it() -> None:
    assert line_of(("model", "other"), key_lines("a = 1\n[model]\n")) == 2
    assert line_of((), key_lines("")) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), max_size=8))
def test_every_value_of_a_written_file_is_found(tables: list[tuple[str, bool, int]]) -> None:
    """Each value is the number of the line that it was written on."""
    written: list[str] = []
    kinds: dict[str, bool] = {}
    for name, is_list, keys in tables:
        if name in kinds and not (is_list and kinds[name]):
            continue  # TOML has each table once
        kinds[name] = is_list
        written.append(f"[[{name}]]" if is_list else f"[{name}]")
        for key in range(keys):
            written += [f"k{key} = [", f"  {len(written) + 1},", "]"] if key % 2 else [f"k{key} = {len(written) + 1}"]
    text = "\n".join(written)
    lines = key_lines(text)
    for name, table in tomllib.loads(text).items():
        for place, entry in enumerate(table if isinstance(table, list) else [table]):
            for key, value in entry.items():
                path = (name, str(place), key) if isinstance(table, list) else (name, key)
                assert lines[path] == (value[0] if isinstance(value, list) else value)

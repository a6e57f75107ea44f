"""Mutations of real code: valid Python, one function, one change, the same for the same seed."""

import ast
import difflib
import inspect
import textwrap

import pytest

from lightning_ray.tasks.mutations import choose, mutations

SOURCE = '''\
"""A shop: prices."""
LIMIT = 3


class Basket:
    def total(self, prices, tax=1):
        """The sum."""
        result = 0  # so far: üñí
        for price in prices:
            if price > 0 and price != 7:
                result = result + price
        return result * tax


def first(items, name):
    if name in items:
        return find(items, name)
    raise KeyError(name)
'''


def test_every_mutation_is_valid_and_stays_within_its_function():
    found = mutations(SOURCE)
    assert {each.kind for each in found} == {"operator", "condition", "constant", "return", "arguments", "removal"}
    for each in found:
        changed = each.apply(SOURCE)
        ast.parse(changed)
        lines = [line for line in difflib.ndiff(SOURCE.splitlines(), changed.splitlines()) if line[:1] in "+-"]
        assert 1 <= len(lines) <= 2, lines
        assert each.function in ("Basket.total", "first")
        assert changed.startswith('"""A shop: prices."""\nLIMIT = 3\n') and '"""The sum."""' in changed


@pytest.mark.parametrize(("line", "expected"), [
    (10, "if price > 0 or price != 7:"), (10, "if price >= 0 and price != 7:"), (10, "if price > 0 and price == 7:"),
    (10, "if not (price > 0 and price != 7):"), (11, "result = result - price"), (11, "pass"),
    (12, "return result + tax"), (12, "return None"), (16, "if name not in items:"), (17, "return find(name, items)"),
    (8, "result = 1  # so far: üñí"), (8, "pass  # so far: üñí"),
])
def test_expected_changes_are_among_them(line, expected):
    changed = {each.apply(SOURCE).splitlines()[line - 1].strip() for each in mutations(SOURCE) if each.line == line}
    assert expected in changed


def test_columns_are_bytes_and_form_feeds_end_no_line():
    source = "def f(a, b):\n    x = 'é\f'; return a + b\n"
    assert "def f(a, b):\n    x = 'é\f'; return a - b\n" in {each.apply(source) for each in mutations(source)}


def test_real_code_gives_many_and_all_parse():
    source = inspect.getsource(textwrap)
    found = mutations(source)
    assert len(found) > 60
    for each in found[::10]:
        ast.parse(each.apply(source))


def test_choice_is_seeded_and_spread():
    found = mutations(SOURCE)
    chosen = choose(found, 6, "a")
    assert chosen == choose(found, 6, "a") and len(set(chosen)) == 6
    assert sorted(each.function for each in chosen) == ["Basket.total"] * 3 + ["first"] * 3
    assert len(choose(found, 1000, "a")) == len(found)

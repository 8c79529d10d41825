"""Stop strings: the same cut wherever the text is split, nothing lost, nothing leaked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.server.stops import StopFinder


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What is shown of pieces, and which stop was found."""
    finder = StopFinder(stops)
    shown = "".join(map(finder.push, pieces))
    return shown + ("" if finder.found else finder.finish()), finder.found


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["O P Q"], ["a O", " P", " Q b"], "a "),
        (["\n"], ["short"], "short"),
        (["\n", "Alice:"], ["well", ", Al", "ice is", " here\nx"], "well, Alice is here"),
        (["ab"], ["a", "a", "a"], "aaa"),
        (["aab"], ["a", "a", "a", "b"], "a"),
        ([], ["x", ""], "x"),
        (["é!"], ["caf", "é", "?"], "café?"),
    ],
)
def test_cases(stops, pieces, shown):
    """Stops over many pieces, partial matches that come to nothing, endings."""
    assert run(stops, pieces)[0] == shown


text = st.text("ab\n", max_size=12)


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(text, max_size=6))
def test_any_split_gives_the_same(stops, pieces):
    """However a text is split, what is shown is what comes before the first stop to be complete."""
    whole = "".join(pieces)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    expected = whole[: min(ends)[1]] if ends else whole
    assert run(stops, pieces)[0] == expected
    assert run(stops, list(whole))[0] == expected


@given(st.text("ab", min_size=1, max_size=5), st.lists(text, max_size=6))
def test_only_what_may_become_a_stop_is_held(stop, pieces):
    """After every piece the held text is an ending that begins the stop, and the longest such."""
    finder, shown, seen = StopFinder([stop]), "", ""
    for piece in pieces:
        shown, seen = shown + finder.push(piece), seen + piece
        if finder.found:
            break
        held = seen.removeprefix(shown)
        longest = max(n for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert held == seen[len(seen) - longest :]

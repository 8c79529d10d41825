"""The ledger of one turn: what each segment of a step cost, and what drafting gave in return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colibri.session import Session

# The segments of a speculative step, and what goes on between them.
DRAFT, VERIFY, ABSORB, PLAIN = "draft", "verify", "absorb", "plain"
PICK, TEXT = "pick", "text"
SEGMENTS = (DRAFT, VERIFY, ABSORB, PLAIN, PICK, TEXT)
_LAPPED = frozenset(SEGMENTS[:4])  # segments whose seconds decide how deep to draft
_LAPS = 32  # the latest are kept: several steps' worth

Lap = tuple[str, int, float]  # segment, rows, seconds


@dataclass(slots=True)
class Segment:
    """Sums over one turn. pick is Python's choosing and bookkeeping, text the caller's own time."""

    name: str
    forwards: int = 0
    rows: int = 0
    tokens: int = 0  # emitted thanks to this segment
    seconds: float = 0.0
    core: dict[str, int] = field(default_factory=dict)  # the core's counters, csrc/colibri.h


@dataclass(frozen=True, slots=True)
class Balance:
    """C_step / A(n): the seconds of a mean step with drafts, against the tokens it gave."""

    steps: int
    draft: float
    verify: float
    absorb: float
    tokens: float  # the acceptance length, A
    plain: float | None  # seconds of a plain step in the same turn

    @property
    def step(self) -> float:
        """C_step."""
        return self.draft + self.verify + self.absorb

    @property
    def gain(self) -> float | None:
        """How many times faster than plain steps the drafts made the text; below 1: slower.

        None without a plain step, or where the clock stood still.
        """
        return self.plain * self.tokens / self.step if self.plain and self.step else None

    def lines(self) -> list[str]:
        """The equation with this turn's numbers."""
        draft, verify, absorb, step = (
            f"{1000 * seconds:.2f}" for seconds in (self.draft, self.verify, self.absorb, self.step)
        )
        per_token = 1000 * self.step / self.tokens
        first = (
            f"a step with drafts (of {self.steps}): draft {draft} + verify {verify} + absorb "
            f"{absorb} = {step} ms for {self.tokens:.2f} tokens: {per_token:.2f} ms a token"
        )
        if self.plain is None or self.gain is None:
            return [first, "there was no plain step to compare it with"]
        verdict = "paid" if self.gain >= 1 else "did not pay"
        plain = f"a plain step: {1000 * self.plain:.2f} ms a token"
        return [first, f"{plain}: drafting {verdict}, {self.gain:.2f} times as fast"]


class Ledger:
    """A stopwatch: exactly one segment runs at a time, so their seconds add up to the whole."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.segments = {name: Segment(name) for name in SEGMENTS}
        self.offered: list[int] = []  # drafts judged, by position after the pending token
        self.accepted: list[int] = []  # of those, the ones that stood
        self.proposed = 0  # drafts that were verified, judged or not
        self.wall = 0.0  # all segments and `others` together
        self.others = 0.0  # seconds of other turns' steps in between
        self._clock = clock
        self._laps: deque[Lap] = deque(maxlen=_LAPS)
        self._open = self.segments[PICK]
        self._rows = 0
        self._work: Callable[[], dict[str, dict[str, int]]] = dict
        self._before: dict[str, dict[str, int]] = {}
        self._begun = self._since = 0.0

    # ---- during the turn ----------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        """The turn starts now."""
        self._work, self._before = session.work, session.work()
        self._open = self.segments[PICK]
        self._begun = self._since = self._clock()

    def enter(self, name: str, rows: int = 0) -> None:
        """Close the open segment and open another; rows > 0: it is one forward of so many rows."""
        now, closed = self._clock(), self._open
        spent = now - self._since
        closed.seconds += spent
        if closed.name in _LAPPED:
            self._laps.append((closed.name, self._rows, spent))
        self._since, self._rows = now, rows
        self._open = segment = self.segments[name]
        if rows:
            segment.forwards += 1
            segment.rows += rows

    def waited(self, seconds: float) -> None:
        """Other turns ran for `seconds`, which are not charged to the open segment."""
        self.others += seconds
        self._since += seconds

    def emitted(self, name: str, tokens: int) -> None:
        """Tokens were committed thanks to a segment."""
        self.segments[name].tokens += tokens

    def judged(self, proposed: int, judged: int, accepted: int) -> None:
        """Of `proposed` drafts the first `judged` were decided and the first `accepted` stood."""
        self.proposed += proposed
        while len(self.offered) < judged:
            self.offered.append(0)
            self.accepted.append(0)
        for i in range(judged):
            self.offered[i] += 1
            self.accepted[i] += i < accepted

    def laps(self) -> list[Lap]:
        """Parts of steps closed since the last call, in order; not pick and text."""
        laps = list(self._laps)
        self._laps.clear()
        return laps

    def end(self) -> None:
        """The turn is over: what the core counted for each kind of work is the segment's."""
        self.enter(PICK)
        self.wall += self._since - self._begun
        for name, now in self._work().items():
            core, before = self.segments[name].core, self._before[name]
            for counter, value in now.items():
                core[counter] = core.get(counter, 0) + value - before[counter]

    # ---- after it -----------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds so far, of all segments closed."""
        return sum(segment.seconds for segment in self.segments.values())

    @property
    def tokens(self) -> int:
        """Tokens emitted."""
        return sum(segment.tokens for segment in self.segments.values())

    @property
    def main_forwards(self) -> int:
        """Passes of the main model."""
        return self.segments[VERIFY].forwards + self.segments[PLAIN].forwards

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens the main model's passes gave, per pass; None before the first."""
        tokens = self.segments[VERIFY].tokens + self.segments[PLAIN].tokens
        return tokens / self.main_forwards if self.main_forwards else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step with drafts: those that stood and the one after; None: no such step."""
        verify = self.segments[VERIFY]
        return verify.tokens / verify.forwards if verify.forwards else None

    def balance(self) -> Balance | None:
        """The cost equation of this turn; None when nothing was drafted."""
        draft, verify, absorb, plain = (self.segments[name] for name in SEGMENTS[:4])
        if not verify.forwards or not verify.tokens:
            return None
        steps = verify.forwards
        return Balance(
            steps=steps,
            draft=draft.seconds / steps,
            verify=verify.seconds / steps,
            absorb=absorb.seconds / steps,
            tokens=verify.tokens / steps,
            plain=plain.seconds / plain.forwards if plain.forwards else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "wall_seconds": self.wall,
            "others_seconds": self.others,
            "tokens": self.tokens,
            "tokens_per_forward": self.tokens_per_forward,
            "acceptance_length": self.acceptance_length,
            "proposed": self.proposed,
            "offered_by_position": list(self.offered),
            "accepted_by_position": list(self.accepted),
            "segments": {
                segment.name: {
                    **segment.core,  # its forwards and rows count the main model's alone
                    "forwards": segment.forwards,
                    "rows": segment.rows,
                    "tokens": segment.tokens,
                    "seconds": segment.seconds,
                }
                for segment in self.segments.values()
            },
        }

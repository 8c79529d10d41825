"""One answer: the prompt read, tokens decoded, pieces shown, everything counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from colibri import stats
from colibri.answer import MARK, REASONING, TEXT, Piece, Prompt, Splitter
from colibri.errors import Cancelled
from colibri.ledger import Ledger
from colibri.sampling import Sampler
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.stats import ERROR, INTERRUPTED, STOP, Receipt
from colibri.verification import Mode

if TYPE_CHECKING:
    from colibri.engine import Engine, Slot

Progress = Callable[[str, int, int], None]  # (what, done, total)


class Step(NamedTuple):
    """Tokens and pieces of one decoding step.

    A chunk of the prompt gives neither, nor does a pause; the last Step has no tokens, and a piece
    if a character was left unfinished. Row i of the session's `logits` decided token i; they last
    until its next step.
    """

    tokens: list[int]
    pieces: list[Piece]


@dataclass
class _Clock:
    """Moments of one turn, in seconds."""

    begun: float = 0.0
    prefilled: float = 0.0
    waited: float = 0.0  # of the seconds between these two: for other turns
    first: float | None = None


class Turn:
    """One answer. Iterating yields its pieces; afterwards `receipt` has the numbers.

    `steps` is the same in smaller bites, for whoever has other turns to run in between and tells
    `waited` how long those took. What `others` have read of the prompt is copied.

    Cancelling ends the iteration within a layer of the core at most, with the finish reason
    "interrupted" and a session that holds the prompt so far and the tokens yielded.
    """

    def __init__(
        self,
        engine: Engine,
        slot: Slot,
        prompt: Prompt,
        sampler: Sampler,
        max_tokens: int | None,
        progress: Progress | None,
        others: Callable[[], Iterable[Session]] = tuple,
    ) -> None:
        self.engine = engine
        self.session = slot.session
        self.prompt = prompt
        self.sampler = sampler
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.receipt: Receipt | None = None
        self.ledger = Ledger()  # what has been counted so far
        self._progress, self._others = progress, others
        self._cancelled = False
        self._read = self._reused = 0  # prompt tokens run, and those that were there already
        self._pieces: dict[str, list[str]] = {TEXT: [], REASONING: [], MARK: []}
        self._splitter = Splitter(engine.tokenizer, prompt)
        self._clock = _Clock()
        self._drafter, self._depth = engine.speculation(slot, sampler.params)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces[TEXT])

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._pieces[REASONING])

    @property
    def reasoned(self) -> int:
        """How many of `token_ids` were reasoning or its tags; they come first."""
        return self._splitter.reasoned

    def cancel(self) -> None:
        """End the turn soon; any thread or signal handler may call this."""
        self._cancelled = True
        self.session.cancel()

    def waited(self, seconds: float) -> None:
        """Other turns ran for so long between two `steps`: neither prompt nor segments took it."""
        if self.receipt or not self._clock.begun:  # over but for the last piece, or yet to begin
            return
        if self._clock.prefilled:
            self.ledger.waited(seconds)
        else:
            self._clock.waited += seconds

    def __iter__(self) -> Iterator[Piece]:
        """Run the turn, once."""
        for step in self.steps():
            yield from step.pieces

    def steps(self, pause: bool = False) -> Generator[Step, None, None]:
        """Run the turn, once; yields after every chunk of the prompt and every step.

        With `pause` also before every step, whose rows are then the session's `staged`.
        """
        splitter = self._splitter
        self.session.cancel(False)
        if self._cancelled:  # looked at after that: a cancel between the two is not lost
            self.session.cancel()
        self._clock.begun = perf_counter()
        before = self.session.counters()
        between = None
        try:
            self._reused = self.session.reuse(self.prompt.ids)
            for _ in self._prefill(self.prompt.ids[self._reused :]):
                yield Step([], [])
            between = self.session.counters()
            with closing(self._decode(pause)) as blocks:
                for tokens in blocks:
                    yield Step(tokens, self._show(splitter.push(tokens)))
        except Cancelled:
            self.finish_reason = INTERRUPTED
        except GeneratorExit:  # whoever iterates has enough
            self.finish_reason = STOP
            raise
        except BaseException:
            self.finish_reason = ERROR
            raise
        finally:
            self.session.cancel(False)
            self.receipt = self._settle(before, between or self.session.counters())
        yield Step([], self._show(splitter.finish()))

    def _prefill(self, ids: list[int]) -> Iterator[int]:
        tell = self._progress
        progress = tell and (lambda done, total: tell("reading the prompt", done, total))
        for ran in self.session.read(ids, progress=progress, others=self._others):
            self._read, self._reused = ran, self.session.length - ran
            yield ran
        self._clock.prefilled = perf_counter()

    def _decode(self, pause: bool) -> Generator[list[int], None, None]:
        blocks = spec_decode(
            self.session,
            self.session.logits[0],
            self.sampler,
            self._drafter,
            self._depth,
            Limits(self.max_tokens or self.session.context, self.engine.stops),
            self.ledger,
            self.engine.settings.mode,
            pause,
        )
        with closing(blocks):  # or a turn that is left early is settled before its ledger ends
            while True:
                try:
                    tokens = next(blocks)
                except StopIteration as end:
                    self.finish_reason = end.value
                    return
                if self._clock.first is None:
                    self._clock.first = perf_counter()
                self.token_ids += tokens
                yield tokens

    def _show(self, pieces: Iterable[Piece]) -> list[Piece]:
        shown = list(pieces)
        for piece in shown:
            self._pieces[piece.kind].append(piece.text)
        return shown

    def _settle(self, before: dict[str, int], between: dict[str, int]) -> Receipt:
        engine, clock = self.engine, self._clock
        after = self.session.counters()
        prefilled = clock.prefilled or perf_counter()
        return Receipt(
            model=str(engine.container.directory),
            isa=engine.model.isa,
            io=engine.plan.io if engine.plan else "mmap",
            slots_per_layer=round(engine.plan.slots_per_layer, 2) if engine.plan else 0,
            threads=engine.model.threads,
            load_seconds=engine.load_seconds,
            context=self.session.context,
            prompt_tokens=len(self.prompt.ids),
            reused_tokens=self._reused,
            prefill_tokens=self._read,
            prompt_seconds=prefilled - clock.begun - clock.waited,
            answer_tokens=len(self.token_ids),
            answer_seconds=self.ledger.wall - self.ledger.others,
            first_token_seconds=None if clock.first is None else clock.first - clock.begun,
            prompt_counters=_difference(between, before),
            answer_counters=_difference(after, between),
            sampling=self.sampler.params,
            recommended=engine.recommended,
            seed=self.sampler.seed,
            max_tokens=self.max_tokens,
            drafter=self._drafter.name if self._drafter else None,
            mode=Mode.COUPLED.value if self.sampler.follows else engine.settings.mode,
            finish_reason=self.finish_reason,
            ledger=self.ledger,
            peak_bytes=stats.peak_bytes(),
            reasoning_alone=bool(self.reasoning and not self.text),
            notes=tuple(self.sampler.warnings),
        )


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}

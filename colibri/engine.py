"""A model ready to answer: container, weights, tokenizer, template and stops put together.

engine = Engine.open(settings)
turn = engine.answer(engine.conversation([{"role": "user", "content": "Hello"}]))
for piece in turn:
    print(piece.text, end="")
print(turn.receipt)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from colibri import chat, context, demo, generation, stats
from colibri.answer import REASONING, TEXT, Piece, Prompt, Splitter
from colibri.container import Container
from colibri.depth import DepthPolicy, depth_policy
from colibri.drafting import Drafter, MtpDrafter, NgramDrafter
from colibri.errors import Cancelled, ConfigError, ContextFull, UsageError
from colibri.knobs import Settings
from colibri.ledger import Ledger
from colibri.memory import budget, physical_cores
from colibri.model import Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.stats import INTERRUPTED, Receipt
from colibri.tokenizer import Tokenizer
from colibri.verification import Mode

ROWS = 128  # rows of one prefill step; more would cost scratch, fewer would read experts more often
ERROR = "error"

Progress = Callable[[str, int, int], None]  # (what, done, total)


def model_directory(settings: Settings) -> Path:
    """The model that was named, else the demo; UsageError when it is no directory."""
    if settings.model is None:
        return demo.MODEL
    path = Path(settings.model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{path} is a file; give the directory that holds config.json")
    hint = " If it is the prompt, write --prompt before it." if " " in settings.model else ""
    raise UsageError(f"there is no model directory {settings.model!r}.{hint}")


class Engine:
    """One loaded model. `open` it, make a Prompt of text or of a conversation, then `answer`.

    `stops` end every answer: the union of what config.json, generation_config.json and the
    tokenizer say. `context` is the size of the sessions it makes.
    """

    def __init__(self, container: Container, model: Model, settings: Settings, size: int) -> None:
        self.container = container
        self.model = model
        self.settings = settings
        self.context = size
        self.tokenizer = Tokenizer.load(container.directory)
        self.template = chat.Template.load(container.directory)
        self.stops = container.config.eos_token_ids | self.tokenizer.eos_ids
        self.sampling, self.recommended = generation.sampling(settings, container.directory)
        self.load_seconds = 0.0
        self._session: Session | None = None
        self._drafting: WeakKeyDictionary[Session, dict[bool, Any]] = WeakKeyDictionary()
        if self.tokenizer.vocab_used > container.config.vocab_size:
            raise ConfigError(
                f"{container.directory}: tokenizer.json has {self.tokenizer.vocab_used} tokens, "
                f"the model {container.config.vocab_size}; they do not belong together"
            )

    @classmethod
    def open(cls, settings: Settings, progress: Progress | None = None) -> "Engine":
        """Load a model; errors name the file, the knob or both numbers of a limit."""
        begun = perf_counter()
        container = Container.open(model_directory(settings))
        mtp = settings.mtp and container.has_mtp and settings.draft != 0
        memory = budget(settings.ram)
        size = context.choose(container, mtp, settings.context, memory)
        model = Model.open(
            container,
            threads=settings.threads or physical_cores(),
            isa=settings.isa,
            mtp=mtp,
            progress=progress and (lambda done, total: progress("loading layer", done, total)),
        )
        engine = cls(container, model, settings, size)
        memory.require(
            model.dense_bytes + engine.session.bytes,
            f"{container.directory} with a context of {size} tokens",
            "Ask for a smaller --ctx or raise --ram.",
        )
        engine.load_seconds = perf_counter() - begun
        return engine

    @property
    def session(self) -> Session:
        """The engine's own session; it keeps its tokens and caches between turns."""
        if self._session is None:
            self._session = self.new_session()
        return self._session

    def new_session(self) -> Session:
        """Another conversation's caches."""
        return Session(self.model, self.context, ROWS)

    # ---- prompts ----------------------------------------------------------------------------

    def conversation(self, messages: list[dict[str, Any]]) -> Prompt:
        """Messages ({"role", "content"}) in the model's template; markup in them stays text."""
        thinking, effort = self.settings.thinking, self.settings.effort
        ids = self.template.render(messages, self.tokenizer, thinking=thinking, effort=effort)
        return Prompt(ids)

    def raw(self, text: str) -> Prompt:
        """Text to be continued without a template (chat.raw_prompt); all that comes is text."""
        return Prompt(chat.raw_prompt(text, self.tokenizer), markup=False)

    # ---- answers ----------------------------------------------------------------------------

    def answer(
        self,
        prompt: Prompt,
        session: Session | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> "Turn":
        """A turn that has not begun; iterate it. ContextFull when the prompt leaves no room."""
        session = session or self.session
        count = len(prompt.ids)
        if count >= session.context:
            most = self.container.config.max_position_embeddings
            remedy = f"--ctx raises it, to {most} at most" if session.context < most else ""
            raise ContextFull(
                f"the prompt has {count} tokens and the context holds {session.context}, "
                f"answer included. {remedy or 'This model has no larger one; shorten the prompt'}."
            )
        room = session.context - count
        return Turn(
            self,
            session,
            prompt,
            Sampler(sampling or self.sampling, self.tokenizer.vocab_used),
            min(max_tokens or self.settings.max_tokens or room, room),
            progress,
        )

    def speculation(
        self, session: Session, sampling: SamplingParams
    ) -> tuple[Drafter | None, DepthPolicy | None]:
        """Who drafts for a session and how deep, as the settings say; both learn over its turns."""
        if self.settings.draft == 0:
            return None, None
        # A clock must not choose a token: only where any depth gives the same text may it decide.
        clock_free = not sampling.greedy and self.settings.mode != Mode.COUPLED
        pairs = self._drafting.setdefault(session, {})
        if clock_free not in pairs:
            mtp = self.model.has_mtp
            policy = depth_policy(self.settings.draft, clock_free=clock_free, guarded=mtp)
            pairs[clock_free] = (MtpDrafter(session) if mtp else NgramDrafter(), policy)
        return pairs[clock_free]


@dataclass
class _Clock:
    """Moments of one turn, in seconds."""

    begun: float = 0.0
    prefilled: float = 0.0
    first: float | None = None


class Turn:
    """One answer. Iterating yields its pieces; afterwards `receipt` has the numbers.

    Cancelling ends the iteration between two layers of the core, with the finish reason
    "interrupted" and a session that holds the prompt so far and the tokens yielded.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        prompt: Prompt,
        sampler: Sampler,
        max_tokens: int,
        progress: Progress | None,
    ) -> None:
        self.engine = engine
        self.session = session
        self.prompt = prompt
        self.sampler = sampler
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.receipt: Receipt | None = None
        self._progress = progress
        self._cancelled = False
        self._pieces: dict[str, list[str]] = {TEXT: [], REASONING: []}
        self._ledger = Ledger()
        self._clock = _Clock()
        self._drafter, self._depth = engine.speculation(session, sampler.params)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces[TEXT])

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._pieces[REASONING])

    def cancel(self) -> None:
        """End the turn soon; any thread or signal handler may call this."""
        self._cancelled = True
        self.session.cancel()

    def __iter__(self) -> Iterator[Piece]:
        """Run the turn, once."""
        splitter = Splitter(self.engine.tokenizer, self.prompt)
        self.session.cancel(self._cancelled)
        self._clock.begun = perf_counter()
        before = self.session.counters()
        reused, between = 0, before
        try:
            reused = self.session.reuse(self.prompt.ids)
            logits = self._prefill(self.prompt.ids[reused:])
            between = self.session.counters()
            for tokens in self._decode(logits):
                yield from self._show(splitter.push(tokens))
        except Cancelled:
            self.finish_reason = INTERRUPTED
        except BaseException:
            self.finish_reason = ERROR
            raise
        finally:
            self.session.cancel(False)
            self.receipt = self._settle(reused, before, between)
        yield from self._show(splitter.finish())

    def _prefill(self, ids: list[int]) -> np.ndarray:
        say = self._progress
        logits = self.session.prefill(ids, say and (lambda a, b: say("reading the prompt", a, b)))
        self._clock.prefilled = perf_counter()
        return logits

    def _decode(self, logits: np.ndarray) -> Iterator[list[int]]:
        blocks = spec_decode(
            self.session,
            logits,
            self.sampler,
            self._drafter,
            self._depth,
            Limits(self.max_tokens, self.engine.stops),
            self._ledger,
            self.engine.settings.mode,
        )
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

    def _show(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._pieces[piece.kind].append(piece.text)
            yield piece

    def _settle(self, reused: int, before: dict[str, int], between: dict[str, int]) -> Receipt:
        engine, clock = self.engine, self._clock
        after = self.session.counters()
        prefilled = clock.prefilled or perf_counter()
        return Receipt(
            model=str(engine.container.directory),
            isa=engine.model.isa,
            threads=engine.model.threads,
            load_seconds=engine.load_seconds,
            context=self.session.context,
            prompt_tokens=len(self.prompt.ids),
            reused_tokens=reused,
            prompt_seconds=prefilled - clock.begun,
            answer_tokens=len(self.token_ids),
            answer_seconds=self._ledger.wall,
            first_token_seconds=None if clock.first is None else clock.first - clock.begun,
            prompt_counters=_difference(between, before),
            answer_counters=_difference(after, between),
            sampling=self.sampler.params,
            recommended=engine.recommended,
            seed=self.sampler.seed,
            max_tokens=self.max_tokens,
            drafter=self._drafter.name if self._drafter else None,
            mode=engine.settings.mode,
            finish_reason=self.finish_reason,
            ledger=self._ledger,
            peak_bytes=stats.peak_bytes(),
            notes=tuple(self.sampler.warnings),
        )


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}

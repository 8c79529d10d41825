"""A model ready to answer: container, weights, tokenizer, template and stops put together.

engine = Engine.open(settings)
turn = engine.answer(engine.chat([{"role": "user", "content": "Hello"}]))
for piece in turn:
    print(piece.text, end="")
print(turn.receipt)
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from colibri import context, demo, generation
from colibri.amounts import memory_size
from colibri.answer import Prompt
from colibri.chat import Template, opens_thinking, raw_prompt
from colibri.container import Container
from colibri.depth import DepthPolicy, depth_policy
from colibri.drafting import Drafter, MtpDrafter, NgramDrafter
from colibri.errors import ContextFull, UsageError
from colibri.foreign import gguf_fault
from colibri.form import FormSampler, Guide
from colibri.knobs import Settings
from colibri.memory import RESERVE, Budget, available, budget, physical_cores
from colibri.mirror import directories
from colibri.model import PILOT_SLOTS, Model
from colibri.paths import expanded
from colibri.plan import Demand, Plan, fitting_context, make_plan
from colibri.reading import choose
from colibri.sampling import Sampler, SamplingParams
from colibri.scratch import Scratch
from colibri.session import Session, more_rows, rows_of
from colibri.state import State
from colibri.tokenizer import Tokenizer
from colibri.turn import Progress, Turn
from colibri.verification import Mode

_SEVERAL = 4  # conversations of a server that was not told how many, memory permitting


def model_directory(settings: Settings) -> Path:
    """The model that was named, else the demo; UsageError when it is no directory."""
    if settings.model is None:
        return demo.MODEL
    if not settings.model.strip():
        raise UsageError("MODEL is empty (a variable not set?); leave it out to run the demo")
    path = expanded(settings.model, "MODEL")
    if path.is_dir():
        _require_no_gguf(path)
        return path
    if path.exists():
        gguf = " (GGUF is not read)" if path.suffix.lower() == ".gguf" else ""
        raise UsageError(f"{path} is a file{gguf}; give the directory that holds config.json")
    raise UsageError(f"there is no model directory {settings.model!r}.{_meant(settings.model)}")


def _require_no_gguf(directory: Path) -> None:
    fault = gguf_fault(path.name for path in directory.glob("*.*"))
    if fault:
        raise UsageError(f"{directory}: {fault}")


def _meant(name: str) -> str:
    """What was perhaps meant by the name of a directory that is not there."""
    if " " in name:
        return " If it is a prompt: colibri run --prompt TEXT."
    hub = re.fullmatch(r"(?:hf://)?(\w[\w.-]*/[\w.-]+(?:@\w+)?)", name)
    if hub:
        return f" If it is a name on a hub: colibri convert hf://{hub[1]} DIR brings it here."
    return ""


@dataclass(eq=False)
class Slot:
    """Room for one conversation: its session, and the drafters that learn with it."""

    session: Session
    drafting: dict[bool, tuple[Drafter, DepthPolicy | None]] = field(default_factory=dict)


class Engine:
    """One loaded model. `open` it, make a Prompt with `chat` or `raw`, then `answer`.

    `stops` end every answer: the union of what config.json, generation_config.json and the
    tokenizer say. `context` is the size of the slots it makes; `slot` is its own.
    """

    def __init__(
        self, container: Container, model: Model, settings: Settings, size: int, rows: int
    ) -> None:
        self.container = container
        self.model = model
        self.settings = settings
        self.tokenizer = Tokenizer.load(container.directory)
        self.template = Template.load(container.directory)
        self.stops = container.config.eos_token_ids | self.tokenizer.eos_ids
        self.sampling, self.recommended = generation.sampling(settings, container.directory)
        self.load_seconds = 0.0
        self.plan: Plan | None = None
        self._free = available()  # before anything is loaded
        self._shape(size, rows)
        self.conversations = 1  # slots the plan has room for
        self.tokenizer.require_rows(container.config.vocab_size, container.directory)

    @classmethod
    def open(
        cls, settings: Settings, progress: Progress | None = None, conversations: int | None = 1
    ) -> "Engine":
        """Load a model; errors name the file, the knob or both numbers of a limit.

        `conversations`: the slots that memory is set aside for; None: a few, as memory allows.
        """
        begun = perf_counter()
        container = Container.open(model_directory(settings), directories(settings.mirror))
        mtp = settings.mtp and container.has_mtp and settings.draft != 0
        memory = budget(settings.ram)
        size = context.choose(container, mtp, settings.context, memory, settings.kv_dtype)
        model = Model.open(
            container,
            threads=settings.threads or physical_cores(),
            isa=settings.isa,
            mtp=mtp,
            load=False,
        )
        rows = rows_of(container.bytes, memory.bytes)
        engine = cls(container, model, settings, size, rows)
        if settings.context is None:
            engine._fit_context(memory)
        engine.conversations = conversations or engine._several(memory)
        engine._widen_steps(memory)
        engine._divide(memory)  # a refusal comes before what takes minutes
        model.load(progress and (lambda done, total: progress("loading layer", done, total)))
        state = State(settings.state, lambda text: None)  # what is not kept is measured again
        engine.plan = engine._divide(memory, lambda: choose(container, state))
        pilot = "router" if engine.plan.pilot else "off"
        model.set_residency(engine.plan.io, engine.plan.slots_per_layer, pilot)
        engine.load_seconds = perf_counter() - begun
        return engine

    def _fit_context(self, memory: Budget) -> None:
        """Shorten a context that nobody asked for to what fits."""

        def demand(size: int) -> Demand:
            session = self._session(size, self._rows)
            return replace(self.demand(), caches=session.bytes, scratch=session.scratch.bytes)

        size, io = self.context, self.settings.io
        fits = fitting_context(size, demand, memory.bytes, io)
        if fits < size:
            self._shape(fits, self._rows)

    def _several(self, memory: Budget) -> int:
        """Conversations of a server that was not told how many: a few, in a quarter of the room."""
        demand = self.demand()
        room = memory.bytes - demand.fixed + demand.caches
        return max(1, min(_SEVERAL, room // 4 // self.slot.session.bytes))

    def _widen_steps(self, memory: Budget) -> None:
        """Steps of more rows, where there is memory for them."""

        def taken(rows: int) -> int:
            session = self._session(self.context, rows)
            return session.bytes * self.conversations + session.scratch.bytes

        least, room = self._rows, memory.bytes - self.demand().dense - RESERVE
        rows = more_rows(least, room, taken)
        if rows > least:
            self._shape(self.context, rows)

    def _shape(self, context: int, rows: int) -> None:
        """Slots of such a context and steps of so many rows; all of them share one scratch."""
        self.context, self._rows = context, rows
        self._scratch = Scratch(self.model, context, min(rows, context))
        self.slot = self.new_slot()

    def _divide(self, memory: Budget, streamed: Callable[[], str] = lambda: "direct") -> Plan:
        """What goes where; UsageError when it does not fit. `streamed` as make_plan has it."""
        return make_plan(self.demand(), memory.bytes, self.settings.io, streamed)

    @property
    def _short_of_memory(self) -> bool:
        """Whether the context is what memory allowed, and less than anyone would have chosen."""
        least = min(context.LEAST, self.container.config.max_position_embeddings)
        return self.settings.context is None and self.context < least

    @property
    def notes(self) -> list[str]:
        """What differs from what a user may think: of container, plan, settings without effect."""
        settings, template, plan = self.settings, self.template, self.plan
        notes = [*self.container.notes, *(plan.notes if plan else ())]
        if plan and plan.footprint > self._free.available:
            notes.append(
                f"with this --ram {memory_size(plan.footprint)} are held and only "
                f"{memory_size(self._free.available)} are free ({self._free.source}): the system "
                "may end this process; lower --ram"
            )
        if plan and plan.io.startswith("mmap") and settings.spec and "spec" in settings.given:
            notes.append("--spec has no effect: all experts are left to the page cache")
        if settings.thinking is not None and not template.has_thinking_switch:
            flag = "--think" if settings.thinking else "--no-think"
            notes.append(f"this model's chat template has no thinking switch: {flag} has no effect")
        if settings.effort and not template.has_effort:
            notes.append("this model's chat template knows no effort: --effort has no effect")
        return notes

    def demand(self) -> Demand:
        """What the model and its slots ask for."""
        return Demand.of(
            self.container.config,
            dense=self.model.dense_bytes or context.dense_bytes(self.container, self.model.has_mtp),
            caches=self.slot.session.bytes * self.conversations,
            scratch=self._scratch.bytes,
            container=self.container.bytes,
            slot=self.model.slot_bytes(),
            mtp_slot=self.model.slot_bytes(mtp=True),
            spares=PILOT_SLOTS if self.settings.spec else 0,
            conversations=self.conversations,
        )

    def new_slot(self) -> Slot:
        """Room for another conversation."""
        return Slot(self._session(self.context, self._rows, self._scratch))

    def _session(self, context: int, rows: int, scratch: Scratch | None = None) -> Session:
        return Session(self.model, context, rows, scratch, self.settings.kv_dtype)

    # ---- prompts ----------------------------------------------------------------------------

    def chat(self, messages: list[dict[str, Any]]) -> Prompt:
        """Messages ({"role", "content"}) in the model's template; markup in them stays text.

        ContextFull for more text than the context can hold, here and in `raw`.
        """
        settings = self.settings
        ids = self.template.render(
            messages, self.tokenizer, settings.thinking, settings.effort, room=self.require_room
        )
        return Prompt(ids)

    def raw(self, text: str) -> Prompt:
        """Text to be continued without a template, as raw_prompt has it; all is text."""
        return Prompt(raw_prompt(text, self.tokenizer, self.require_room), markup=False)

    # ---- answers ----------------------------------------------------------------------------

    def answer(
        self,
        prompt: Prompt,
        slot: Slot | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        progress: Progress | None = None,
        others: Callable[[], Iterable[Session]] = tuple,
    ) -> Turn:
        """A turn that has not begun; iterate it.

        `max_tokens` None: as the settings say. `others`: of this engine's sessions, those whose
        rows of the prompt may be copied. ContextFull when the prompt leaves no room,
        UsageError when it is empty, or for a limit below 1.
        """
        if not prompt.ids:
            raise UsageError("the prompt is empty; the chat template made nothing of the messages")
        limit = self.settings.max_tokens if max_tokens is None else max_tokens
        if limit is not None and limit < 1:
            raise UsageError(f"max_tokens is {limit}; expected 1 or more, or None")
        slot = slot or self.slot
        self.require_room(len(prompt.ids))
        sampler = self._sampler(prompt, sampling or self.sampling)
        return Turn(self, slot, prompt, sampler, limit, progress, others)

    def _sampler(self, prompt: Prompt, params: SamplingParams) -> Sampler:
        tokenizer = self.tokenizer
        if not prompt.guided:
            return Sampler(params, tokenizer.vocab_used)
        reasons = prompt.markup and opens_thinking(prompt.ids, tokenizer)
        form, calls, begun = prompt.form, prompt.calls, prompt.begun
        guide = Guide(form, tokenizer, self.stops, reasons, calls, begun)
        return FormSampler(params, guide, tokenizer.vocab_used)

    def require_room(self, count: int, nbytes: int | None = None) -> None:
        """ContextFull, with both numbers, when so many prompt tokens leave no room to answer.

        nbytes: of text not yet encoded, which will be `count` tokens or more.
        """
        if count >= self.context:
            most = self.container.config.max_position_embeddings
            size = f"{nbytes} bytes, at least {count} tokens," if nbytes else f"{count} tokens"
            fault = f"the prompt has {size} and the context holds {self.context}, answer included"
            if self.context == most:
                raise ContextFull(fault, "This model has no larger one", "; shorten the prompt")
            if self._short_of_memory:
                less = ", or use --kv-dtype f16" if self.settings.kv_dtype == "f32" else ""
                raise ContextFull(
                    fault, f"There is memory for no more; free some, raise --ram{less}"
                )
            raise ContextFull(fault, f"--ctx raises it, to {most} at most")

    def speculation(
        self, slot: Slot, sampling: SamplingParams
    ) -> tuple[Drafter | None, DepthPolicy | None]:
        """Who drafts in a slot and how deep, as the settings say; both learn over its turns."""
        if self.settings.draft == 0:
            return None, None
        # A clock must not choose a token: only where any depth gives the same text may it decide.
        clock_free = not sampling.greedy and self.settings.mode != Mode.COUPLED
        if clock_free not in slot.drafting:
            mtp = self.model.has_mtp
            size = self.container.bytes
            policy = depth_policy(
                self.settings.draft, clock_free=clock_free, guarded=mtp, nbytes=size
            )
            drafter = MtpDrafter(slot.session) if mtp else NgramDrafter()
            slot.drafting[clock_free] = drafter, policy
        return slot.drafting[clock_free]

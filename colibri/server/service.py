"""From a request to a job of the scheduler: the prompt, the sampling, the parser of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from colibri.answer import Prompt
from colibri.chat import opens_thinking
from colibri.engine import Engine, Slot
from colibri.errors import ContextFull, UsageError
from colibri.sampling import SamplingParams
from colibri.server import tools
from colibri.server.asked import Asked, ChatAsked, CompletionAsked
from colibri.server.metrics import Metrics
from colibri.server.refusal import FULL, Refusal
from colibri.server.scheduler import Scheduler
from colibri.server.tools import ToolParser
from colibri.server.watch import Watch

DEMO_ID = "colibri-demo"


class Service:
    """One engine and all that serves it. `id` is the model's name in the API.

    `tell` is given a line for every answer, `ready` is called before there is work; both on the
    engine's thread. They must not fail. `slots` are those it begins with; none: with the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        tell: Callable[[str], None] = lambda text: None,
        ready: Callable[[], None] = lambda: None,
        slots: Sequence[Slot] = (),
    ) -> None:
        settings = engine.settings
        own = engine.container.directory.resolve().name if settings.model else DEMO_ID
        self.engine = engine
        self.id = settings.model_id or own
        self.metrics = Metrics()
        self.watch = Watch(engine, self.metrics, self.id, tell)
        self.scheduler = Scheduler(engine, settings.queue, self.watch, ready, slots)
        self._marks = tools.marks(engine.tokenizer)
        gauge, scheduler = self.metrics.gauge, self.scheduler
        gauge("colibri_active", "Requests being answered.", lambda: scheduler.active)
        gauge("colibri_waiting", "Requests in the queue.", lambda: scheduler.waiting)
        gauge("colibri_kept_tokens", "Tokens in kept caches.", lambda: sum(scheduler.kept))

    # ---- prompts ------------------------------------------------------------------------------

    def chat(self, asked: ChatAsked) -> tuple[Prompt, ToolParser | None]:
        """The conversation in the model's template; Refusal when that or the room is lacking."""
        self.require_model(asked.model or self.id)
        self._check_template(asked)
        self._check_tags(asked)
        settings, template = self.engine.settings, self.engine.template
        options = {} if asked.clear_thinking is None else {"clear_thinking": asked.clear_thinking}
        try:
            with _refused_if_full("messages"):
                ids = template.render(
                    asked.messages,
                    self.engine.tokenizer,
                    thinking=settings.thinking if asked.thinking is None else asked.thinking,
                    effort=asked.effort or settings.effort,
                    tools=asked.tools,
                    room=self.engine.require_room,
                    **options,
                )
        except UsageError as error:
            raise Refusal(f"{error}.", "messages") from None
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise Refusal(f"the chat template cannot take this: {error}", "messages") from None
        if not ids:
            raise Refusal("the chat template made nothing of these messages.", "messages")
        begun = self._force(asked, ids)
        with _refused_if_full("messages"):
            self.engine.require_room(len(ids))
        form = asked.form if begun is None else None
        if not asked.tools:
            return Prompt(ids, form=form), None
        parser = ToolParser(asked.parameters, self._marks.values(), begun, asked.strict)
        return Prompt(ids, True, self._marks, form, asked.calls, begun), parser

    def completion(self, asked: CompletionAsked) -> Prompt:
        """Text as `colibri run --raw` takes it, or token ids as they are."""
        self.require_model(asked.model or self.id)
        if isinstance(asked.prompt, str):
            with _refused_if_full("prompt"):
                prompt = self.engine.raw(asked.prompt)
        else:
            used = self.engine.tokenizer.vocab_used
            bad = next((i for i in asked.prompt if not 0 <= i < used), None)
            if bad is not None:
                raise Refusal(f"prompt holds {bad}; token ids are 0 to {used - 1}.", "prompt")
            prompt = Prompt(list(asked.prompt), markup=False)
        if not prompt.ids:
            raise Refusal("prompt is empty, and this model has no prefix to begin with.", "prompt")
        with _refused_if_full("prompt"):
            self.engine.require_room(len(prompt.ids))
        return prompt

    def sampling(self, asked: Asked) -> SamplingParams:
        """The server's own parameters but for what the request says."""
        return replace(self.engine.sampling, **asked.sampling)

    def limit(self, asked: Asked) -> int | None:
        """Most tokens: the request's, at most the operator's."""
        limits = [n for n in (asked.max_tokens, self.engine.settings.max_tokens) if n]
        return min(limits, default=None)

    def _force(self, asked: ChatAsked, ids: list[int]) -> str | None:
        """A call that must be made is begun in the prompt; returns the name so far, if so."""
        if not asked.tools or asked.choice in ("auto", "none"):
            return None
        tokenizer = self.engine.tokenizer
        opening = tokenizer.id_of(tools.OPEN)
        if opening is None:
            raise Refusal(
                f"this model's tokenizer has no {tools.OPEN}, so no call can be forced; "
                'send tool_choice "auto".',
                "tool_choice",
                code="unsupported_parameter",
            )
        if opens_thinking(ids, tokenizer):
            ids.append(tokenizer.added["</think>"].id)
        name = asked.choice[0] if isinstance(asked.choice, tuple) else ""
        ids += [opening, *tokenizer.encode(name)]
        return name

    # ---- what is refused ----------------------------------------------------------------------

    def require_model(self, name: str) -> None:
        """Refusal of any model's name but the one there is."""
        if name != self.id:
            raise Refusal(
                f"there is no model {name[:200]!r} here; this server has {self.id!r}.",
                "model",
                status=404,
                code="model_not_found",
            )

    def _check_template(self, asked: ChatAsked) -> None:
        template = self.engine.template
        checks: Sequence[tuple[str, Any, bool, str]] = (
            (asked.switch, asked.thinking, template.has_thinking_switch, "switch for reasoning"),
            ("reasoning_effort", asked.effort, template.has_effort, "degrees of reasoning"),
            ("tools", asked.tools or None, template.has_tools, "place for tools"),
        )
        for name, value, known, what in checks:
            if value is not None and not known:
                raise Refusal(
                    f"this model's chat template has no {what}; leave {name} out.",
                    name,
                    code="unsupported_parameter",
                )

    def _check_tags(self, asked: ChatAsked) -> None:
        lacking = [tag for tag in tools.TAGS if tag not in self._marks.values()]
        if asked.tools and asked.strict and lacking:
            raise Refusal(
                f"this model's tokenizer has no {lacking[0]}, so no tool can be strict; "
                "leave strict out.",
                "tools",
                code="unsupported_parameter",
            )


@contextmanager
def _refused_if_full(param: str) -> Iterator[None]:
    """A context that cannot hold it all is the refusal of a field."""
    try:
        yield
    except ContextFull as error:
        raise Refusal(str(error), param, code=FULL) from None

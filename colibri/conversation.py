"""A conversation: what was said, and the last answer, which can be continued or asked for again."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from colibri import chat
from colibri.answer import REASONING, TEXT, Prompt, Splitter
from colibri.engine import Engine
from colibri.errors import StateError, UsageError
from colibri.stats import STOP
from colibri.turn import Progress, Turn


@dataclass
class Answer:
    """The last answer in tokens: its prompt, what came out, the seed, and why it ended."""

    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    seed: int = 0
    finish: str = ""


class Conversation:
    """Messages of one session of an engine, without the system message, and the last answer.

    A turn made by `ask`, `retry` or `more` belongs to it once it was given to `settle`, however it
    ended. Errors of making a turn (ContextFull, UsageError) change nothing.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        thinking: bool | None = None,
        effort: str | None = None,
    ) -> None:
        self.engine = engine
        self.system = system
        self.thinking = thinking
        self.effort = effort
        self.messages: list[dict[str, str]] = []
        self.answer = Answer()
        self._session = engine.slot.session

    @property
    def turns(self) -> int:
        """Questions asked."""
        return sum(message["role"] == "user" for message in self.messages)

    # ---- turns ------------------------------------------------------------------------------

    def ask(self, text: str, progress: Progress | None = None) -> Turn:
        """A question and its answer to be."""
        messages = [*self.messages, {"role": "user", "content": text}]
        return self._answer(messages, self.engine.sampling.seed, progress)

    def retry(self, progress: Progress | None = None) -> Turn:
        """The last question once more, with another seed."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UsageError("there is no question yet to ask again")
        return self._answer(messages, None, progress)

    def more(self, progress: Progress | None = None) -> Turn:
        """The last answer, going on where it was cut off."""
        answer = self.answer
        if not answer.prompt or answer.finish == STOP:
            raise UsageError("there is no answer that was cut off; /retry asks again")
        return self._turn(answer.prompt + answer.ids, answer.seed, progress)

    def settle(self, turn: Turn) -> None:
        """A turn ended: its tokens are part of the answer."""
        answer = self.answer
        answer.ids += turn.token_ids
        answer.finish = turn.finish_reason
        text, reasoning = self._split(answer)
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if text or reasoning:
            said = {"role": "assistant", "content": text, "reasoning_content": reasoning}
            self.messages.append(said)

    def reset(self) -> None:
        """Forget everything but the system message and how to think."""
        self.messages, self.answer = [], Answer()
        self._session.rewind(0)

    def _answer(
        self, messages: list[dict[str, str]], seed: int | None, progress: Progress | None
    ) -> Turn:
        ids = self._render(messages)
        turn = self._turn(ids, seed, progress)
        self.messages = messages
        self.answer = Answer(ids, [], turn.sampler.seed)
        return turn

    def _turn(self, ids: list[int], seed: int | None, progress: Progress | None) -> Turn:
        sampling = replace(self.engine.sampling, seed=seed)
        return self.engine.answer(Prompt(ids), sampling=sampling, progress=progress)

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        """The whole conversation in tokens; what the model wrote stays in the tokens it chose."""
        engine = self.engine
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = engine.template.render(
            [*system, *messages], engine.tokenizer, thinking=self.thinking, effort=self.effort,
            room=engine.require_room,
        )  # fmt: skip
        known = self.answer.prompt + self.answer.ids or self._session.tokens
        return chat.adopt(known, ids, engine.tokenizer)

    def _split(self, answer: Answer) -> tuple[str, str]:
        """Text and reasoning of an answer; whole characters also where it was cut and continued."""
        splitter = Splitter(self.engine.tokenizer, Prompt(answer.prompt))
        pieces = [*splitter.push(answer.ids), *splitter.finish()]
        text, reasoning = (
            "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in (TEXT, REASONING)
        )
        return text, reasoning

    # ---- saving -----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for saved.py."""
        return {
            "system": self.system,
            "thinking": self.thinking,
            "effort": self.effort,
            "messages": self.messages,
            "answer": asdict(self.answer),
        }

    def load(self, raw: dict[str, Any]) -> None:
        """Become what as_dict gave; StateError when something is missing."""
        try:
            system, thinking, effort = raw["system"], raw["thinking"], raw["effort"]
            messages = [{str(k): str(v) for k, v in message.items()} for message in raw["messages"]]
            if any(message["role"] not in ("user", "assistant") for message in messages):
                raise ValueError("a message has an unknown role")
            answer = Answer(**raw["answer"])
        except (KeyError, TypeError, ValueError, AttributeError) as why:
            raise StateError(f"the saved conversation lacks something: {why}") from why
        self.system, self.thinking, self.effort = system, thinking, effort
        self.messages, self.answer = messages, answer

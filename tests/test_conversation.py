"""Conversations: what was said stays said, cut answers go on, and caches are not lost."""

from __future__ import annotations

import pytest

from colibri.conversation import Conversation
from colibri.engine import Engine
from colibri.errors import ContextFull, StateError, UsageError
from colibri.knobs import Settings
from colibri.turn import Turn

STORY = "Tell me a story about a fox."


def opened(**flags: str) -> Engine:
    """The demo, greedy unless told otherwise."""
    return Engine.open(Settings.resolve({"temperature": "0", "threads": "1"} | flags, {}))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The demo, greedy."""
    return opened()


@pytest.fixture
def talk(engine) -> Conversation:
    """A conversation that has not begun."""
    engine.slot = engine.new_slot()
    return Conversation(engine)


def finish(talk: Conversation, turn: Turn, pieces: int = 1 << 30) -> str:
    """Run a turn to its end, or cancel it after so many pieces; returns what was shown."""
    shown = []
    for piece in turn:
        shown.append(piece.text)
        if len(shown) == pieces:
            turn.cancel()
    talk.settle(turn)
    return "".join(shown)


def test_answers_are_remembered(talk, engine):
    """A second question is asked after the first and its answer, and what was run is not again."""
    first = finish(talk, talk.ask(STORY))
    turn = talk.ask("What colour is snow?")
    second = finish(talk, turn)
    roles = [(m["role"], m["content"]) for m in talk.messages]
    expected = [("user", STORY), ("assistant", first), ("user", "What colour is snow?")]
    assert roles == [*expected, ("assistant", second)] and talk.turns == 2
    assert turn.receipt.prefill_tokens < 20
    messages = [{"role": role, "content": content} for role, content in roles[:3]]
    assert (
        "".join(p.text for p in engine.answer(engine.chat(messages), engine.new_slot())) == second
    )


def test_tokens_the_encoder_would_not_choose(talk, engine):
    """An answer whose text encodes to other tokens than the model wrote keeps its cache."""
    finish(talk, talk.ask(STORY))
    ids = talk.answer.ids
    letters = [t for letter in "Once upon" for t in engine.tokenizer.encode(letter)]
    talk.answer.ids = [*letters, *ids[2:]]
    assert engine.tokenizer.decode(talk.answer.ids) == engine.tokenizer.decode(ids)
    prompt = talk.ask("More.").prompt.ids
    known = [*talk.answer.prompt[:0], *letters]
    assert any(prompt[i : i + len(known)] == known for i in range(len(prompt)))


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_more_goes_on_with_an_interrupted_answer(talk, pieces):
    """What was kept and what more brings are together the answer that nobody interrupted."""
    whole = finish(talk, talk.ask(STORY))
    talk.reset()
    first = finish(talk, talk.ask(STORY), pieces)
    assert talk.answer.finish == "interrupted" and whole.startswith(first) and first != whole
    assert talk.messages[-1]["content"] == first
    assert first + finish(talk, talk.more()) == whole == talk.messages[-1]["content"]
    with pytest.raises(UsageError, match="no answer that was cut off"):
        talk.more()


def test_more_after_the_limit():
    """With a limit an answer comes in parts, sampled as one."""
    settings = {"temperature": "1", "seed": "3"}
    engine = opened(**settings)
    talk = Conversation(engine)
    whole = finish(talk, talk.ask(STORY))
    limited = Conversation(opened(**settings, max_tokens="9"))
    parts = [finish(limited, limited.ask(STORY))]
    while limited.answer.finish == "length":
        parts.append(finish(limited, limited.more()))
    assert len(parts) > 2 and "".join(parts) == whole
    assert limited.messages == talk.messages


def test_interrupted_before_the_first_token(talk):
    """The question stays; more and retry both answer it, and no empty answer is remembered."""
    turn = talk.ask("Tell me. " * 60)
    turn.cancel()
    assert finish(talk, turn) == "" and [m["role"] for m in talk.messages] == ["user"]
    more = finish(talk, talk.more())
    assert more and finish(talk, talk.retry()) == more and talk.turns == 1


def test_retry(talk):
    """The same question, its old answer forgotten; without a question there is none to ask."""
    with pytest.raises(UsageError, match="no question yet"):
        talk.retry()
    answer = finish(talk, talk.ask(STORY))
    turn = talk.retry()
    assert finish(talk, turn) == answer and turn.receipt.prefill_tokens <= 2
    assert len(talk.messages) == 2


def test_retry_draws_another_seed():
    """A seed that was given is for the first try."""
    talk = Conversation(opened(temperature="1", seed="3"))
    first = talk.ask(STORY)
    finish(talk, first)
    second = talk.retry()
    assert first.sampler.seed == 3 != second.sampler.seed == talk.answer.seed


def test_what_does_not_fit_changes_nothing(talk):
    """A question that leaves no room is refused, and the conversation is as before."""
    finish(talk, talk.ask(STORY))
    before = talk.as_dict()
    with pytest.raises(ContextFull):
        talk.ask("word " * 1200)
    assert talk.as_dict() == before


def test_system_message(talk, engine):
    """It comes first, and can change between turns."""
    talk.system = "Be brief."
    finish(talk, talk.ask(STORY))
    assert "Be brief." in engine.tokenizer.decode(talk.answer.prompt)
    talk.system = None
    assert "Be brief." not in engine.tokenizer.decode(talk.ask("More.").prompt.ids)


def test_reset(talk, engine):
    """Nothing said before is in the next prompt; the system message is."""
    talk.system = "Be brief."
    finish(talk, talk.ask(STORY))
    talk.reset()
    prompt = engine.tokenizer.decode(talk.ask("Hello.").prompt.ids)
    assert "fox" not in prompt and "Be brief." in prompt and engine.slot.session.length == 0


def test_saved_and_loaded(talk, engine):
    """A conversation becomes plain values and itself again, an interrupted answer included."""
    talk.system, talk.thinking, talk.effort = "Be brief.", False, "high"
    finish(talk, talk.ask(STORY), 3)
    other = Conversation(engine)
    other.load(talk.as_dict())
    assert other.as_dict() == talk.as_dict()
    assert finish(other, other.more()) == finish(talk, talk.more())


@pytest.mark.parametrize(
    "change",
    [
        {"messages": None},
        {"messages": [{}]},
        {"messages": [{"role": "tool"}]},
        {"answer": {"a": 1}},
    ],
)
def test_loading_what_is_no_conversation(talk, change):
    """Values that lack something are refused, and the conversation is as before."""
    before = talk.as_dict()
    with pytest.raises(StateError, match="lacks something"):
        talk.load(before | change)
    assert talk.as_dict() == before

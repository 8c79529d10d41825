"""`colibri chat`: lines in, answers out, and the commands in between."""

import os
import textwrap
from collections.abc import Callable
from difflib import get_close_matches
from errno import EACCES

from colibri import commands, saved, stats
from colibri.amounts import plural
from colibri.answer import REASONING
from colibri.conversation import Conversation
from colibri.engine import Engine
from colibri.errors import ColibriError, ContextFull, Exit, StateError, UsageError
from colibri.interrupt import Interrupts, ReadAborted, TerminationSignals, held
from colibri.knobs import BY_NAME
from colibri.lines import Lines
from colibri.resident import Resident
from colibri.saved import DamagedRows, Saved
from colibri.state import State, failed, make_directory
from colibri.status import status
from colibri.terminal import Terminal
from colibri.turn import Turn

EFFORTS = BY_NAME["effort"].kind.words


def require_place(state: State, name: str) -> bool:
    """Whether a session can be kept, as far as its directory tells; a warning when not."""

    def make() -> None:
        path = saved.directory_of(state, name)
        make_directory(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise failed(path, "written", PermissionError(EACCES, os.strerror(EACCES)))

    return state.keep(f"session {name!r}", make)


class Repl:
    """One chat. `run` reads lines until there are no more; what fails is told, and it goes on."""

    def __init__(
        self,
        engine: Engine,
        terminal: Terminal,
        lines: Lines,
        state: State,
        resident: Resident,
        signals: TerminationSignals | None = None,
    ) -> None:
        settings = engine.settings
        self.engine = engine
        self.terminal = terminal
        self.lines = lines
        self.talk = Conversation(engine, settings.system, settings.thinking, settings.effort)
        self.saved: Saved | None = None
        self._state = state
        self._resident = resident
        self._signals = signals or TerminationSignals()
        self._shows_reasoning = True
        self._last: Turn | None = None
        self._leaving = False  # one more Ctrl-C ends it
        self._failed = False
        self._unsaved = False  # what was said last is not in `saved` yet
        self._lost = False

    def run(self) -> int:
        """Until the end of input, /quit, Ctrl-C twice or a signal; returns the exit status."""
        try:
            status = self._talk()
        finally:
            self._save_or_tell()
        return self._signals.status or status or (Exit.ERROR if self._lost else Exit.OK)

    def _talk(self) -> int:
        while True:
            try:
                self._save_if_named()
                with self._signals.stopping(self.lines.stop):
                    line = self.lines.read()
                if line is None or (line.strip() and not self.take(line)):
                    break
                if not line.strip():
                    self._leaving = False
            except ReadAborted:
                break
            except KeyboardInterrupt:
                if self._leaving:
                    return Exit.INTERRUPTED
                self._leaving = True
                self._say("Ctrl-C once more ends the chat; so does /quit")
            except UsageError as error:
                self._fail(error)
        return Exit.ERROR if self._failed and not self.lines.typed else Exit.OK

    def take(self, line: str) -> bool:
        """One line: a command or a message. False ends the chat."""
        self._leaving = False
        command = commands.parse(line)
        if command and command[0] == "quit":
            return False
        try:
            if command:
                self._command(*command)
            else:
                self._turn(lambda: self.talk.ask(commands.message(line), self.terminal.progress))
        except ContextFull as error:
            self._fail(f"{self._full(error)} Or /reset: the conversation begins anew.")
        except ColibriError as error:
            self._fail(error)
        return True

    def close(self) -> None:
        """Stop reading experts, and let others have the saved conversation."""
        self._resident.stop()
        if self.saved:
            self.saved.close()

    # ---- turns ------------------------------------------------------------------------------

    def _turn(self, make: Callable[[], Turn]) -> None:
        """One answer, shown as it comes; interrupted, it is kept as far as it got."""
        self._resident.stop()
        turn = make()
        with Interrupts(turn.cancel) as interrupts:
            turn.session.watch(interrupts.fd)
            try:
                with self._signals.stopping(turn.cancel):
                    self._show(turn)
            finally:
                with held():
                    self._settle(turn)
                    self._leaving = interrupts.requested
                self._leaving = interrupts.requested  # one that waited counts
                self.terminal.clear()
                self.terminal.end()
        if turn.receipt:
            self.terminal.notes(turn.receipt.notes)
            self._say(status(turn.receipt, self.terminal.width))

    def _settle(self, turn: Turn) -> None:
        turn.session.watch(-1)
        self.talk.settle(turn)
        self._last = turn
        self._unsaved = True

    def _show(self, turn: Turn) -> None:
        hidden = spaces = 0
        for piece in turn:
            if piece.kind == REASONING and not self._shows_reasoning:
                hidden += 1
                spaces += piece.text.count(" ")
                self.terminal.progress("thinking,", spaces, None, "words")
                continue
            if hidden:
                self._tell_hidden(turn)
                hidden = 0
            self.terminal.show(piece)
        if hidden:
            self._tell_hidden(turn)

    def _tell_hidden(self, turn: Turn) -> None:
        self.terminal.clear()
        if self.terminal.watched:
            self._say(f"(thought {plural(len(turn.reasoning.split()), 'word')}; /think show)")

    # ---- saving -----------------------------------------------------------------------------

    def _save_if_named(self) -> None:
        """Save what is new, if the conversation has a name; a failure is tried again later."""
        if self.saved and self._unsaved:
            self._state.keep(f"session {self.saved.name!r}", self._save)

    def _save(self) -> None:
        """Save under its name, however much is new; Ctrl-C waits until that is done."""
        assert self.saved is not None
        self._unsaved = True
        with held():
            self.engine.slot.session.cancel(False)  # by a signal as its turn ended
            self.saved.save(self.engine.slot.session, self.talk.as_dict())
            self._unsaved = False

    def _save_or_tell(self) -> None:
        """The conversation ends: what is still unsaved is saved now, or an error says it is not."""
        if not self.saved or not self._unsaved:
            return
        with held():  # also while it is told
            try:
                self._save()
            except StateError as error:
                self._lost = True
                self._fail(f"session {self.saved.name!r} is not saved as it was left: {error}")

    # ---- commands ---------------------------------------------------------------------------

    def _command(self, name: str, argument: str) -> None:
        if name not in commands.NAMES:
            near = get_close_matches(name, commands.NAMES, 1)
            meant = f"; did you mean /{near[0]}?" if near else ";"
            raise UsageError(
                f"there is no command /{name}{meant} /help lists them. "
                "A message that begins with / is written with two"
            )
        getattr(self, f"_do_{name}")(argument)

    def _do_help(self, argument: str) -> None:
        self.terminal.warn(commands.help_text(self.terminal.width))

    def _do_reset(self, argument: str) -> None:
        self._save_or_tell()
        self.talk.reset()
        self._unsaved = False
        self._say("the conversation is forgotten")
        if self.saved:
            name = self.saved.name
            self._say(f"session {name!r} stays as it was; /save {name} replace begins it anew")
            self.saved.close()
            self.saved = None

    def _do_retry(self, argument: str) -> None:
        if self.engine.sampling.greedy:
            self._say("at temperature 0 the same question gives the same answer")
        self._turn(lambda: self.talk.retry(self.terminal.progress))

    def _do_more(self, argument: str) -> None:
        self._turn(lambda: self.talk.more(self.terminal.progress))

    def _do_system(self, argument: str) -> None:
        if argument:
            self.talk.system = None if argument == "off" else argument
        self.terminal.warn(self.talk.system or "there is no system message")

    def _do_think(self, argument: str) -> None:
        talk = self.talk
        if argument in ("show", "hide"):
            self._shows_reasoning = argument == "show"
            if self._shows_reasoning and self._last and self._last.reasoning:
                self._say(self._last.reasoning)
        elif argument in ("on", "off"):
            talk.thinking = argument == "on"
        elif argument in EFFORTS:
            talk.thinking, talk.effort = True, argument
        elif argument:
            raise UsageError(f"/think {argument}: expected on, off, low, high, max, show or hide")
        self._say(self.thinking())

    def _do_stats(self, argument: str) -> None:
        if not self._last or not self._last.receipt:
            raise UsageError("there was no turn yet")
        show = stats.full if argument == "full" else stats.table
        self.terminal.warn(show(self._last.receipt, self.terminal.note_width))

    def _do_save(self, argument: str) -> None:
        words = argument.split() or ([self.saved.name] if self.saved else [])
        if not words or words[1:] not in ([], ["replace"]):
            what = "a name is one word" if words else "give it a name"
            raise UsageError(f"{what}: /save NAME, or /save NAME replace")
        name = words[0]
        if not self.saved or self.saved.name != name:
            other = self._saved_as(name)
            if other.exists and not words[1:]:
                raise UsageError(
                    f"there is a session {name!r}: /load {name} takes it up, "
                    f"/save {name} replace replaces it"
                )
            other.lock()
            self._switch(other)
        assert self.saved is not None
        self._save()
        self._say(f"saved as {name!r}, from now on after every turn")

    def _do_load(self, argument: str) -> None:
        if not argument:
            found = saved.names(self._state)
            lines = [f"{name}  {moment}" for name, moment in found]
            self.terminal.warn("\n".join(lines) if lines else "nothing is saved")
            return
        if not self.resume(argument):
            raise UsageError(f"there is no saved session {argument!r}; /load lists them")

    # ---- saved conversations ----------------------------------------------------------------

    def resume(self, name: str, new: bool = False) -> bool:
        """Take up a saved conversation, and say so; `new` begins one when there is none."""
        other = self._saved_as(name)
        if not new and not other.exists:
            return False
        if self.saved and self._unsaved:
            self._save()  # or it is not let go of
        mine = self.saved if self.saved and self.saved.name == name else None
        if mine:
            mine.close()
        try:
            document = other.open()
            if document is not None:
                self._take_up(other)
        except BaseException:  # Ctrl-C too: what is open stays locked
            other.close()
            if mine:
                mine.lock()
            raise
        self._switch(other)
        self._unsaved = False
        kept = require_place(self._state, name)
        if document is None:
            after = "it is saved after every turn" if kept else "nowhere to keep it yet"
            self._say(f"session {name!r} is new; {after}")
        return True

    def _take_up(self, other: Saved) -> None:
        document = other.document
        assert document is not None
        talk = Conversation(self.engine)
        talk.load(document.conversation)
        given = self.engine.settings.given
        session = self.engine.slot.session
        count = len(document.tokens)
        try:
            ready = other.restore(session)
        except DamagedRows as error:
            self.terminal.warning(f"{error}; its tokens are read again")
            ready = 0
        for name in ("system", "thinking", "effort"):
            if name in given:
                setattr(talk, name, getattr(self.talk, name))
        self.talk = talk
        again = count - ready
        self._say(
            f"resumed {other.name!r}, saved {document.saved}: {plural(talk.turns, 'question')}, "
            f"{plural(count, 'token')}, "
            + (f"{again} of them to be read again" if again else "none of them read again")
        )

    def _saved_as(self, name: str) -> Saved:
        engine = self.engine
        digest, kv_dtype = engine.tokenizer.digest, engine.settings.kv_dtype
        return Saved(self._state, name, engine.container, digest, kv_dtype)

    def _switch(self, other: Saved) -> None:
        if self.saved and self.saved is not other:
            self.saved.close()
        self.saved = other

    # ---- words ------------------------------------------------------------------------------

    def thinking(self) -> str:
        """How the model thinks, in words."""
        template, talk = self.engine.template, self.talk
        if not template.has_thinking_switch and not template.has_effort:
            return "this model's template has no choice about reasoning"
        word = {None: "as the template has it", True: "on", False: "off"}[talk.thinking]
        effort = f", effort {talk.effort}" if talk.effort and template.has_effort else ""
        hidden = "" if self._shows_reasoning else ", hidden"
        return f"reasoning {word}{effort}{hidden}"

    def _say(self, text: str) -> None:
        """A quiet word beside the answers, dimmed where that is possible."""
        self.terminal.aside(text)

    def _full(self, error: ContextFull) -> str:
        """The error; of a conversation that went on for long it is not this message's length."""
        if not self.talk.turns:
            return str(error)
        said = ". ".join(filter(None, (error.fault, error.larger)))
        return f"the conversation is full: with what was said before, {said}."

    def _fail(self, error: ColibriError | str) -> None:
        self._failed = True
        self.terminal.clear()
        self.terminal.end()
        text, width = f"colibri: error: {error}", self.terminal.note_width
        self.terminal.warn(textwrap.fill(text, width - 1) if width else text)

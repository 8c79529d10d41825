"""Every knob: its flag, its environment names, its default. The one reader of the environment.

A flag wins over an environment variable, that over the default. An empty variable counts as unset.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colibri.errors import UsageError

PREFIX = "COLIBRI_"
DRAFT_LIMIT = 15
_UNITS = {"G": 1 << 30, "M": 1 << 20, "T": 1 << 40}


# ---- kinds of values ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number between two bounds, both allowed; `auto` names a word (or words) for None."""

    least: float
    most: float
    whole: bool = False
    auto: tuple[str, ...] = ()
    metavar: str = "N"

    @property
    def expects(self) -> str:
        """What a user should have written."""
        kind = "a whole number" if self.whole else "a number"
        word = f", or {self.auto[0]}" if self.auto else ""
        return f"{kind} from {self.least:g} to {_plain(self.most)}{word}"

    def parse(self, text: str) -> float | int | None:
        """The value; ValueError when it is not one."""
        if text.lower() in self.auto:
            return None
        pattern = r"[+-]?\d+" if self.whole else r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
        if not re.fullmatch(pattern, text, re.ASCII) or len(text) > 40:
            raise ValueError
        value = int(text) if self.whole else float(text)
        if not self.least <= value <= self.most:
            raise ValueError
        return value


@dataclass(frozen=True)
class Size:
    """An amount of memory in GiB (2^30 bytes), or with a unit: 512M, 24G, 1T."""

    metavar: str = "GiB"
    expects: str = "GiB such as 24 or 7.5, or a size such as 512M"

    def parse(self, text: str) -> int:
        """Bytes."""
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(?: ?([GMT])(?:i?B)?)?", text, re.A | re.I)
        if not found:
            raise ValueError
        size = int(float(found[1]) * _UNITS[(found[2] or "G").upper()])
        if not 1 << 20 <= size <= 1 << 50:
            raise ValueError
        return size


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def metavar(self) -> str:
        """The words, as --help shows them."""
        return "|".join(self.words)

    @property
    def expects(self) -> str:
        """What a user should have written."""
        return " or ".join([", ".join(self.words[:-1]), self.words[-1]])

    def parse(self, text: str) -> str:
        """The word, in lower case."""
        if text.lower() not in self.words:
            raise ValueError
        return text.lower()


@dataclass(frozen=True)
class Switch:
    """On or off."""

    metavar: str = ""
    expects: str = "1 or 0 (on/off, yes/no, true/false)"

    def parse(self, text: str) -> bool:
        """Whether it is on."""
        word = text.lower()
        if word in ("1", "on", "yes", "true"):
            return True
        if word in ("0", "off", "no", "false"):
            return False
        raise ValueError


@dataclass(frozen=True)
class Text:
    """Any text."""

    metavar: str = "TEXT"
    expects: str = "text"

    def parse(self, text: str) -> str:
        """The text itself; undecodable bytes of the command line are refused."""
        text.encode("utf-8")  # UnicodeEncodeError is a ValueError
        return text


# ---- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Knob:
    """One setting. `name` is its field of Settings; `also` are environment names people know.

    An empty `flag` means environment only. `shown` is the default as people read it.
    """

    name: str
    flag: str
    kind: Any
    help: str
    shown: str
    group: str
    also: tuple[str, ...] = ()
    off: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment names, the first one wins."""
        stem = (self.flag or self.name).strip("-").replace("-", "_").upper()
        return (PREFIX + stem, *self.also)

    def read(self, text: str, source: str) -> Any:
        """The value of `text`; UsageError names the source, the text and what was expected."""
        try:
            return self.kind.parse(text.strip() if not isinstance(self.kind, Text) else text)
        except ValueError:
            shown = ascii(text) if len(text) <= 60 else ascii(text[:57]) + "..."
            raise UsageError(f"{source} is {shown}; expected {self.kind.expects}") from None


MODEL, SAMPLING, PROMPT, MACHINE, SPECULATION, SERVER, OUTPUT, PROCESS = (
    "Model", "Sampling", "Prompt", "Machine", "Speculation", "Server", "Output", "Process",
)  # fmt: skip

KNOBS = (
    Knob("model", "", Text(), "Model directory, when the command line names none.",
         "the demo model in the package", MODEL, also=("COLI_MODEL",)),
    Knob("max_tokens", "--max-tokens", Number(1, 1 << 24, whole=True),
         "Stop after N generated tokens.", "the room left in the context", SAMPLING,
         also=("NGEN",)),
    Knob("temperature", "--temp", Number(0, 100, metavar="T"),
         "Sampling temperature; 0 always takes the likeliest token.",
         "the model's generation_config.json, else 1", SAMPLING, also=("COLI_TEMP",)),
    Knob("top_p", "--top-p", Number(0, 1, metavar="P"),
         "Sample from the likeliest tokens that together reach probability P.",
         "the model's generation_config.json, else 1", SAMPLING, also=("NUCLEUS",)),
    Knob("top_k", "--top-k", Number(0, 1 << 24, whole=True, metavar="K"),
         "Sample from the K likeliest tokens; 0: all.",
         "the model's generation_config.json, else 0", SAMPLING),
    Knob("min_p", "--min-p", Number(0, 1, metavar="P"),
         "Drop tokens less likely than P times the likeliest one.",
         "the model's generation_config.json, else 0", SAMPLING),
    Knob("seed", "--seed", Number(0, (1 << 63) - 1, whole=True),
         "Seed of the sampler: the same seed gives the same text.",
         "drawn anew, shown in the receipt", SAMPLING, also=("SEED",)),
    Knob("system", "--system", Text(), "System message put before the prompt.", "none", PROMPT),
    Knob("thinking", "--think", Switch(),
         "Let the model reason before it answers, or not, where its template has the choice.",
         "the template's own", PROMPT, also=("THINK",), off="--no-think"),
    Knob("effort", "--effort", Choice(("low", "high", "max")),
         "Reasoning effort, where the template knows it.", "the template's own", PROMPT),
    Knob("raw", "--raw", Switch(),
         "Continue the prompt without a chat template. GLM's prefix goes before it; a prompt that "
         "begins with the prefix is taken as it is, markup included.",
         "off", PROMPT),
    Knob("context", "--ctx", Number(16, 1 << 24, whole=True),
         "Tokens the context holds, prompt and answer together.",
         "up to 32768, less where the model's limit or memory says so", MACHINE, also=("CTX",)),
    Knob("kv_dtype", "--kv-dtype", Choice(("f32", "f16")),
         "Numbers in the caches: f16 takes half of a context's memory, and rounds each to 11 bits, "
         "so that the text may differ.",
         "f32", MACHINE),
    Knob("ram", "--ram", Size(),
         "Memory for dense weights, caches and experts together; the run is refused when the first "
         "two need more, with --io buffered or direct also when not one expert a layer fits beside "
         "them. (The page cache of --io mmap is not limited.)",
         "what is free, cgroup limits included", MACHINE, also=("RAM_GB",)),
    Knob("io", "--io", Choice(("auto", "mmap", "buffered", "direct")),
         "How experts are read: mmap leaves them to the page cache; buffered and direct keep the "
         "most used within --ram; auto is mmap for a small model, else the fastest on this disk, "
         "measured once. The text does not depend on it.",
         "auto", MACHINE),
    Knob("mirror", "--mirror", Text(metavar="DIRS"),
         "Directories, with : between them, that hold copies of expert files on other drives: the "
         "drives share the reads, except with --io mmap. The text does not depend on it.",
         "none", MACHINE),
    Knob("warm", "--warm", Switch(),
         "Begin with the experts that were in memory when this model last ended, where --io keeps "
         "experts within --ram.",
         "on while a chat or a server waits for its first message, off for run", MACHINE,
         off="--no-warm"),
    Knob("threads", "--threads", Number(1, 1024, whole=True),
         "Threads that compute. The text does not depend on it.",
         "the physical cores this process may use", MACHINE),
    Knob("isa", "", Choice(("scalar", "avx2", "avxvnni", "avx512", "neon")),
         "Instruction set of the kernels. The text does not depend on it.",
         "the best this processor has", MACHINE),
    Knob("draft", "--draft", Number(0, DRAFT_LIMIT, whole=True, auto=("auto", "-1")),
         f"Draft at most N tokens a step, {DRAFT_LIMIT} at most; 0: none, auto: as many as pay.",
         "auto", SPECULATION, also=("DRAFT",)),
    Knob("mtp", "--mtp", Switch(),
         "Draft with the model's own MTP layer; off: its weights are not read, and drafts come "
         "from what the text repeats.",
         "on", SPECULATION, also=("MTP",), off="--no-mtp"),
    Knob("mode", "--mode", Choice(("rejection", "coupled", "probabilistic")),
         "How drafts are verified when sampling (docs/speculation.md).", "coupled", SPECULATION),
    Knob("spec", "--spec", Switch(),
         "Read experts ahead, from an idle disk, as the next layer's router guesses them; it rests "
         "while its guesses are wrong.",
         "on", SPECULATION, also=("SPEC",), off="--no-spec"),
    Knob("host", "--host", Text(metavar="ADDRESS"),
         "Address to listen on. Beyond loopback (0.0.0.0: every interface) --api-key is required.",
         "127.0.0.1", SERVER),
    Knob("port", "--port", Number(0, 65535, whole=True),
         "Port to listen on; 0: any free one.", "8000", SERVER),
    Knob("api_key", "--api-key", Text(metavar="KEY"),
         "What clients must send as Authorization: Bearer KEY. The environment is the better place "
         "for it: others on this machine can see flags.",
         "none", SERVER),
    Knob("model_id", "--model-id", Text(metavar="NAME"),
         "The model's name in the API.", "the model directory's name", SERVER),
    Knob("conversations", "--conversations", Number(1, 64, whole=True, auto=("auto",)),
         "Conversations that are answered at once, and whose caches are kept; each has a context's "
         "memory.",
         "up to 4, as a quarter of the memory allows", SERVER),
    Knob("keep", "--keep", Switch(),
         "Save what the caches of all conversations hold when the server ends, in served of "
         "COLIBRI_STATE, and begin with it.",
         "off", SERVER),
    Knob("queue", "--queue", Number(0, 4096, whole=True),
         "Requests that may wait; more are refused with status 429.", "32", SERVER),
    Knob("allow_host", "--allow-host", Text(metavar="NAMES"),
         "Names, with commas between them, by which clients may call this machine (Host header).",
         "localhost, the machine's own name and any IP address", SERVER),
    Knob("allow_origin", "--allow-origin", Text(metavar="URLS"),
         "Origins, with commas between them, whose pages may call the API from a browser; *: all.",
         "the server's own page", SERVER),
    Knob("stats", "--stats", Choice(("line", "table", "full")),
         "Receipt on stderr: one line; a table (plain --stats); full: with the ledger of drafts.",
         "line", OUTPUT),
    Knob("quiet", "--quiet", Switch(), "Write nothing but the answer and errors.", "off", OUTPUT),
    Knob("state", "", Text(),
         "Directory of saved conversations, of what was typed in chats, of which experts were in "
         "memory, and of how each disk is best read; off keeps nothing.",
         "colibri in XDG_STATE_HOME, else in ~/.local/state", PROCESS),
    Knob("debug", "", Switch(), "Show the traceback of an error.", "off", PROCESS,
         also=("COLI_DEBUG",)),
)  # fmt: skip
BY_NAME = {knob.name: knob for knob in KNOBS}


# ---- the result ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Screen:
    """What the environment says about terminals: NO_COLOR, COLUMNS, TERM."""

    color: bool = True
    columns: int | None = None
    dumb: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Screen":
        """A COLUMNS that is no number is ignored, as shells leave odd ones behind."""
        width = environ.get("COLUMNS", "")
        columns = int(width) if re.fullmatch(r"\d{1,4}", width, re.ASCII) else 0
        return cls(
            color=not environ.get("NO_COLOR"),
            columns=columns or None,
            dumb=environ.get("TERM", "") in ("dumb", "unknown"),
        )


@dataclass(frozen=True)
class Settings:
    """All knobs, resolved. None: the default that the model or the machine decides.

    `ram` is in bytes. `given` names the knobs that a flag or a variable set.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    system: str | None = None
    thinking: bool | None = None
    effort: str | None = None
    raw: bool = False
    context: int | None = None
    kv_dtype: str = "f32"
    ram: int | None = None
    io: str = "auto"
    mirror: str | None = None
    warm: bool | None = None
    threads: int | None = None
    isa: str | None = None
    draft: int | None = None
    mtp: bool = True
    mode: str = "coupled"
    spec: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_id: str | None = None
    conversations: int | None = None
    keep: bool = False
    queue: int = 32
    allow_host: str | None = None
    allow_origin: str | None = None
    stats: str = "line"
    quiet: bool = False
    state: str | None = None
    debug: bool = False
    screen: Screen = field(default_factory=Screen)
    given: frozenset[str] = frozenset()

    @classmethod
    def resolve(
        cls, flags: Mapping[str, str | None] | None = None, environ: Mapping[str, str] = os.environ
    ) -> "Settings":
        """Merge flags (knob name: its text, None: not given), environment and defaults.

        Raises UsageError naming the flag or variable, its value and what was expected.
        """
        values: dict[str, Any] = {}
        for knob in KNOBS:
            found = _find(knob, flags or {}, environ)
            if found:
                values[knob.name] = knob.read(*found)
        given = frozenset(values)
        values["state"] = _state_directory(values.get("state"), environ)
        return cls(screen=Screen.read(environ), given=given, **values)


def _state_directory(asked: str | None, environ: Mapping[str, str]) -> str | None:
    """What was asked for, else the place the XDG rules give; None when there is none, or off."""
    if asked is not None:
        return None if asked == "off" else asked
    base, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if not base.startswith("/"):  # a relative one is to be ignored
        base = f"{home}/.local/state" if home.startswith("/") else ""
    return f"{base}/colibri" if base else None


def debug_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether tracebacks are wanted; asked before Settings exist, so it never raises."""
    knob = BY_NAME["debug"]
    found = _find(knob, {}, environ)
    try:
        return found is not None and knob.read(*found)
    except UsageError:
        return True  # which is the error to be told


def quieten_numpy() -> None:
    """Keep NumPy from starting a thread a core, which spin for a while: it multiplies nothing here.

    Only before NumPy is imported does it make a difference.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each COLIBRI_ variable that is no knob: probably a slip of the pen."""
    known = [knob.variables[0] for knob in KNOBS]
    strange = [name for name in sorted(environ) if name.startswith(PREFIX) and name not in known]
    return [f"{name} is not a knob{_suggest(name, known)}" for name in strange]


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f"; did you mean {near[0]}?" if near else ""


def _find(
    knob: Knob, flags: Mapping[str, str | None], environ: Mapping[str, str]
) -> tuple[str, str] | None:
    """The text that sets a knob and where it stands, or None."""
    text = flags.get(knob.name)
    if text is not None:
        return text, knob.flag or knob.name
    return next(((environ[name], name) for name in knob.variables if environ.get(name)), None)


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"

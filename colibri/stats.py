"""The receipt of one turn: everything in it was counted where it happened."""

import resource
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from colibri import amounts
from colibri.amounts import elapsed, file_size, memory_size, plural
from colibri.ledger import Ledger, Segment
from colibri.sampling import SamplingParams

STOP, LENGTH, CONTEXT = "stop", "length", "context"
INTERRUPTED, ERROR = "interrupted", "error"


@dataclass(frozen=True)
class Receipt:
    """Counts and seconds of one turn.

    `prompt` counts are of the prefill, `answer` counts of decoding; core counters are those of
    csrc/colibri.h. `first_token_seconds` runs from the start of the turn, None without a token.
    `slots_per_layer` experts of a layer, on average, may stay in memory; 0: the page cache decides.
    """

    model: str
    isa: str
    threads: int
    io: str
    slots_per_layer: float
    load_seconds: float
    context: int
    prompt_tokens: int
    reused_tokens: int  # of them, found in the cache
    prefill_tokens: int  # and run; all others, unless the turn ended before
    prompt_seconds: float
    answer_tokens: int
    answer_seconds: float
    first_token_seconds: float | None
    prompt_counters: dict[str, int]
    answer_counters: dict[str, int]
    sampling: SamplingParams
    recommended: frozenset[str]
    seed: int
    max_tokens: int | None
    drafter: str | None
    mode: str
    finish_reason: str
    ledger: Ledger
    peak_bytes: int
    reasoning_alone: bool = False  # the answer ended before any text that is not reasoning
    notes: tuple[str, ...] = ()

    @property
    def read_tokens(self) -> int:
        """Prompt tokens in the cache at the end: found there, or run."""
        return self.reused_tokens + self.prefill_tokens

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens run, per second; None when nothing was timed."""
        return _rate(self.prefill_tokens, self.prompt_seconds)

    @property
    def answer_rate(self) -> float | None:
        """Generated tokens per second of decoding, the showing of them included; the steps of
        other turns are left out, as they are of the prompt's seconds. None without a step: a first
        token comes of the prompt."""
        return _rate(self.answer_counters["forwards"] and self.answer_tokens, self.answer_seconds)

    @property
    def drafts(self) -> tuple[int, int]:
        """Drafts proposed and accepted."""
        return self.ledger.proposed, sum(self.ledger.accepted)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, rates and the ledger included."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain |= {
            "sampling": asdict(self.sampling) | {"seed": self.seed},
            "recommended": sorted(self.recommended),
            "notes": list(self.notes),
            "ledger": self.ledger.as_dict(),
            "prompt_tokens_per_second": self.prompt_rate,
            "answer_tokens_per_second": self.answer_rate,
            "drafts_proposed": self.drafts[0],
            "drafts_accepted": self.drafts[1],
        }
        return plain


def missed(counters: Mapping[str, int]) -> int:
    """Expert uses that found none in memory: read when asked for, or ahead of that."""
    return counters["expert_loads"] + counters["pilot_useful"]


def peak_bytes() -> int:
    """Largest resident size of this process so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


# ---- as people read it --------------------------------------------------------------------------


def line(receipt: Receipt, width: int | None = None) -> str:
    """The receipt in one line; in several of less than `width` columns, as in all of these."""
    proposed, accepted = receipt.drafts
    parts = [
        f"prompt {plural(receipt.prompt_tokens, 'token')}{_reused(receipt)}"
        f"{_per_second(receipt.prompt_rate)}",
        f"answer {plural(receipt.answer_tokens, 'token')}{_per_second(receipt.answer_rate)}",
        f"first after {_seconds(receipt.first_token_seconds)}",
    ]
    if proposed:
        parts.append(f"{accepted} of {proposed} drafts kept")
    parts.append(_finish(receipt))
    if not receipt.sampling.greedy:
        parts.append(f"seed {receipt.seed}")
    return _folded(", ".join(parts), width)


def table(receipt: Receipt, width: int | None = None) -> str:
    """The receipt in lines of "name  value"."""
    rows = _rows(receipt)
    return "\n".join(_folded(f"{name:<10} {value}", width, 11) for name, value in rows)


def full(receipt: Receipt, width: int | None = None) -> str:
    """The table, then the ledger: what each part of the steps cost, and what drafting gave."""
    ledger = receipt.ledger
    lines = []
    if ledger.offered:
        pairs = zip(ledger.accepted, ledger.offered, strict=True)
        lines += ["", "kept by position: " + ", ".join(f"{kept} of {of}" for kept, of in pairs)]
    balance = ledger.balance()
    lines += balance.lines() if balance else []
    words = [_folded(text, width, 2) for text in lines]
    return "\n".join([table(receipt, width), "", *_segments(ledger, width), *words])


def _folded(text: str, width: int | None, indent: int = 0) -> str:
    """In lines of less than `width` columns, whole words in each; None: as it is."""
    if width is None or len(text) < width:
        return text
    return textwrap.fill(
        text, width - 1, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _segments(ledger: Ledger, width: int | None) -> list[str]:
    """A line per segment and their sum; loaded are experts read, ahead or not, MB 10^6 bytes.

    Where that is too wide, a line per figure, with as many segments beside each other as fit.
    """
    heads = ["passes", "rows", "tokens", "     ms", "experts", "expert MB", "loaded",
             "read MB", "dense MB", "head MB", "index scores"]  # fmt: skip
    found = {name: _figures(segment) for name, segment in ledger.segments.items()}
    found["together"] = [sum(column) for column in zip(*found.values(), strict=True)]
    cells = {name: [_cell(value) for value in figures] for name, figures in found.items()}
    lines = ["".join([" " * 8, *(f"{head:>{len(head) + 2}}" for head in heads)])]
    for name, row in cells.items():
        pairs = zip(heads, row, strict=True)
        lines.append(f"{name:<8}" + "".join(f"{cell:>{len(head) + 2}}" for head, cell in pairs))
    if width is None or max(map(len, lines)) < width:
        return lines
    return _upright([head.strip() for head in heads], cells, width)


def _upright(heads: list[str], cells: dict[str, list[str]], width: int) -> list[str]:
    """Columns of `cells` beside their heads, in as many blocks as it takes."""
    label = max(map(len, heads))
    lines: list[str] = []
    block: list[str] = []
    for name, texts in cells.items():
        column = 2 + max(map(len, (name, *texts)))
        if block and len(block[0]) + column >= width:
            lines += [*block, ""]
            block = []
        block = block or [f"{head:<{label}}" for head in ("", *heads)]
        pairs = zip(block, (name, *texts), strict=True)
        block = [f"{line}{text:>{column}}" for line, text in pairs]
    return lines + block


def _figures(segment: Segment) -> list[float]:
    core = segment.core
    return [
        segment.forwards, segment.rows, segment.tokens, segment.seconds * 1000,
        core.get("expert_uses", 0), core.get("expert_bytes", 0) / 1e6,
        core.get("expert_loads", 0) + core.get("pilot_reads", 0), core.get("read_bytes", 0) / 1e6,
        core.get("dense_bytes", 0) / 1e6, core.get("head_bytes", 0) / 1e6,
        core.get("index_scores", 0),
    ]  # fmt: skip


def _cell(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else f"{value}"


def _rows(receipt: Receipt) -> list[tuple[str, str]]:
    counters = receipt.answer_counters
    both = {k: v + receipt.prompt_counters[k] for k, v in counters.items()}
    return [
        ("model", receipt.model),
        ("engine", f"{receipt.isa}, {plural(receipt.threads, 'thread')}, "
                   f"loaded in {_seconds(receipt.load_seconds)}, "
                   f"peak memory {memory_size(receipt.peak_bytes)}"),
        ("context", f"{receipt.read_tokens + receipt.answer_tokens} of {receipt.context} tokens"),
        ("prompt", f"{plural(receipt.prompt_tokens, 'token')}{_reused(receipt)}, "
                   f"{_seconds(receipt.prompt_seconds)}{_per_second(receipt.prompt_rate)}"),
        ("answer", f"{plural(receipt.answer_tokens, 'token')}, {_seconds(receipt.answer_seconds)}"
                   f"{_per_second(receipt.answer_rate)}, "
                   f"first after {_seconds(receipt.first_token_seconds)}"),
        ("drafts", _drafts(receipt)),
        ("forwards", f"{counters['forwards']} of {plural(counters['rows'], 'row')} for the answer"
                     f"{_each(receipt)}"),
        ("experts", _experts(receipt, both)),
        ("sampling", _sampling(receipt)),
        ("finish", _finish(receipt)),
        *(("note", note) for note in receipt.notes),
    ]  # fmt: skip


def _experts(receipt: Receipt, counters: dict[str, int]) -> str:
    used = f"{counters['expert_uses']} used ({file_size(counters['expert_bytes'])})"
    if not receipt.slots_per_layer:
        return f"{used}, {receipt.io}"
    waited = _seconds(counters["read_wait_ns"] / 1e9)
    ahead = ""
    if counters["pilot_reads"]:
        ahead = (
            f" when asked for, {counters['pilot_reads']} ahead "
            f"({counters['pilot_useful']} of them of use)"
        )
    text = (
        f"{used}, {counters['expert_loads']} read{ahead}, {file_size(counters['read_bytes'])} in "
        f"all, {receipt.io}, {waited} waited, {plural(receipt.slots_per_layer, 'slot')} a layer"
    )
    if counters["mirror_bytes"]:
        text += f", {file_size(counters['mirror_bytes'])} of all from mirrors"
    if counters["repeated_reads"]:
        text += f", {plural(counters['repeated_reads'], 'read')} failed and had to be repeated"
    return text


def _drafts(receipt: Receipt) -> str:
    proposed, accepted = receipt.drafts
    if receipt.drafter is None:
        return "none"
    rate = f" ({100 * accepted / proposed:.0f}%)" if proposed else ""
    rule = "exact match" if receipt.sampling.greedy else receipt.mode
    return f"{receipt.drafter}, {accepted} of {proposed} kept{rate}, {rule}"


def _reused(receipt: Receipt) -> str:
    return f", {receipt.reused_tokens} found in the cache" if receipt.reused_tokens else ""


def _each(receipt: Receipt) -> str:
    each = receipt.ledger.tokens_per_forward
    return f", {each:.2f} tokens each" if each else ""


def _sampling(receipt: Receipt) -> str:
    params = receipt.sampling
    values = {"temperature": f"{params.temperature:g}"}
    if not params.greedy:
        values |= {"top_p": f"{params.top_p:g}", "top_k": f"{params.top_k}"}
        values |= {"min_p": f"{params.min_p:g}", "seed": f"{receipt.seed}"}
    star = {name: "*" if name in receipt.recommended else "" for name in values}
    text = ", ".join(f"{name} {value}{star[name]}" for name, value in values.items())
    return text + (" (* the model's own)" if "*" in text else "")


def _finish(receipt: Receipt) -> str:
    if receipt.finish_reason == LENGTH:
        still = ", still reasoning" if receipt.reasoning_alone else ""
        return f"stopped at the limit of {plural(receipt.max_tokens, 'token')}{still}"
    return {
        STOP: "complete",
        CONTEXT: f"stopped: the context of {receipt.context} tokens is full",
        INTERRUPTED: "interrupted",
    }.get(receipt.finish_reason, receipt.finish_reason)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _per_second(rate: float | None) -> str:
    return "" if rate is None else f" ({amounts.rate(rate)}/s)"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else elapsed(seconds)

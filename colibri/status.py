"""The quiet line after each turn of a chat: its receipt in a few words."""

from colibri.amounts import elapsed, rate
from colibri.stats import CONTEXT, INTERRUPTED, LENGTH, Receipt, missed

_ENDS = {
    INTERRUPTED: "interrupted, /more goes on",
    LENGTH: "cut at the limit, /more goes on",
    CONTEXT: "the context is full, /reset begins anew",
}


def status(receipt: Receipt, width: int) -> str:
    """Lines of at most `width` - 1 columns; one where it fits."""
    lines = [""]
    for part in parts(receipt):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if lines[-1] and len(joined) >= width:
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(line[: max(1, width - 1)] for line in lines)


def parts(receipt: Receipt) -> list[str]:
    """Speed, first token, experts found in memory, drafts kept, context used, how it ended."""
    found = []
    if receipt.answer_rate:
        found.append(f"{rate(receipt.answer_rate)} tok/s")
    if receipt.first_token_seconds is not None:
        found.append(f"first {elapsed(receipt.first_token_seconds)}")
    hits = hit_rate(receipt)
    if hits is not None:
        found.append(f"{100 * hits:.0f}% hits")
    proposed, accepted = receipt.drafts
    if proposed:
        found.append(f"{accepted}/{proposed} drafts")
    used = receipt.read_tokens + receipt.answer_tokens
    found.append(f"{used}/{receipt.context} context")
    end = _ENDS.get(receipt.finish_reason)
    return [*found, end] if end else found


def hit_rate(receipt: Receipt) -> float | None:
    """Fraction of the answer's expert uses that found the expert in a slot; None where mapped."""
    counters = receipt.answer_counters
    uses = counters["expert_uses"]
    if not receipt.slots_per_layer or not uses:
        return None
    # A cancelled step's reads count, its uses do not.
    return 1 - min(missed(counters), uses) / uses

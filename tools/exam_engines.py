"""Two ways to run the demo model for its exam: the PyTorch definition, and colibri itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

DRAFT_STEPS = 3


@dataclass(frozen=True)
class Scores:
    """What the model says about a text of T tokens, teacher forced.

    logits [T, V]: row j predicts token j+1. drafts[g] [T-1-g, V]: row j, of draft step g, predicts
    token j+g+2 from the trunk's row j and the true tokens up to j+g+1.
    """

    logits: np.ndarray
    drafts: list[np.ndarray]


class Engine(Protocol):
    """What the exam needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def greedy(self, ids: Sequence[int], limit: int) -> list[int]:
        """The continuation without its end token."""
        ...

    def score(self, ids: Sequence[int]) -> Scores: ...


class TorchEngine:
    """tools/demo_model.py in float32; every token recomputes the whole text."""

    def __init__(self, directory: Path, topk: int | None = None) -> None:
        import torch
        from export_demo import load_model
        from tokenizers import Tokenizer

        torch.set_num_threads(1)
        self.torch = torch
        self.model = load_model(directory)
        self.model.topk = topk or self.model.shape.index_topk
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        names = ("<|endoftext|>", "<|user|>", "<|observation|>")
        self.ends = {self.tokenizer.token_to_id(name) for name in names}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def greedy(self, ids: Sequence[int], limit: int) -> list[int]:
        text, start = list(ids), len(ids)
        with self.torch.inference_mode():
            while len(text) < start + limit:
                hidden = self.model.trunk(self.torch.tensor([text]))
                token = int(self.model.logits(hidden[0, -1]).argmax())
                if token in self.ends:
                    break
                text.append(token)
        return text[start:]

    def score(self, ids: Sequence[int]) -> Scores:
        tokens = self.torch.tensor([list(ids)])
        padded = self.torch.cat((tokens, tokens.new_zeros(1, DRAFT_STEPS)), 1)
        with self.torch.inference_mode():
            hidden = self.model.trunk(tokens)
            steps = self.model.drafts(hidden, padded[:, 1:], DRAFT_STEPS)
            drafts = [
                self.model.logits(rows[0, : len(ids) - 1 - step]).numpy()
                for step, rows in enumerate(steps)
            ]
            return Scores(self.model.logits(hidden[0]).numpy(), drafts)


class ColibriEngine:
    """The installed engine on a container directory."""

    def __init__(self, directory: Path, context: int = 1024) -> None:
        from colibri.container import Container
        from colibri.model import Model
        from colibri.session import Session
        from colibri.tokenizer import Tokenizer

        model = Model.open(Container.open(directory))
        self.session: Any = Session(model, context)
        self.tokenizer: Any = Tokenizer.load(directory)
        self.hidden_size = model.config.hidden_size
        self.ends = set(model.config.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode_template(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def _clear(self) -> None:
        self.session.mtp_rewind(0)
        self.session.rewind(0)

    def greedy(self, ids: Sequence[int], limit: int) -> list[int]:
        self._clear()
        logits, found = self.session.prefill(list(ids), prime=False), []
        while len(found) < limit:
            token = int(np.argmax(logits))
            if token in self.ends:
                break
            found.append(token)
            logits = self.session.step_all([token], "last")[0]
        return found

    def score(self, ids: Sequence[int]) -> Scores:
        """One trunk row, one absorbed MTP row and its later draft steps at a time."""
        self._clear()
        ids = list(ids)
        logits, drafts = [], [[] for _ in range(DRAFT_STEPS)]
        state = np.empty(self.hidden_size, np.float32)
        for row, token in enumerate(ids):
            logits.append(self.session.step_all([token], "all")[0].copy())
            following = ids[row + 1 : row + 1 + DRAFT_STEPS]
            for step, after in enumerate(following):
                if step == 0:
                    hidden = self.session.hidden[:1].copy()
                    drafts[0].append(self.session.mtp_absorb(hidden, [after], state).copy())
                else:
                    drafts[step].append(self.session.mtp_draft(after, step, state).copy())
        return Scores(np.stack(logits), [np.stack(rows) for rows in drafts])


def open_engine(kind: str, directory: Path, topk: int | None = None) -> Engine:
    """`kind` is torch (an HF directory) or colibri (a container directory)."""
    return TorchEngine(directory, topk) if kind == "torch" else ColibriEngine(directory)

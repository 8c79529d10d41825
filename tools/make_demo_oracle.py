"""Makes tests/fixtures/oracle-demo.npz: what transformers computes on the demo container's weights.

    python tools/make_demo_oracle.py       # needs torch 2.13, transformers >= 5.24 < 6, tokenizers

The weights are the dequantised ones, so that what is left between these results and the engine's is
the rounding of activations and nothing else. Run it again whenever the demo model is replaced: the
fixture knows the files it was made from.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from make_oracle import TESTS, Oracle
from tokenizers import Tokenizer
from transformers.cache_utils import DynamicCache

ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))

import oracle as fixtures  # noqa: E402
import tiny  # noqa: E402
from stored import getter  # noqa: E402

from colibri.container import Container  # noqa: E402

PROMPTS = ("Tell me a story about a fox.", "What is 27 plus 15?")
TEMPLATE = "[gMASK]<sop><|user|>{}<|assistant|><think></think>"
TOKENS = 96  # of prompt and greedy answer
HEADS = 8  # the last rows' logits are kept, every row's hidden
DRAFTS = 3


def dequantise(container: Container, directory: Path) -> None:
    """Writes the container as a float32 checkpoint with the published names."""
    shutil.copy(container.directory / "config.json", directory)
    config = json.loads((directory / "config.json").read_text())
    get = getter(container)
    named = ((name, np.asarray(get(name), np.float32)) for name in tiny.shapes(config))
    tiny.write_safetensors(directory / "model.safetensors", named)


def conversation(oracle: Oracle, tokenizer: Tokenizer, question: str) -> torch.Tensor:
    """A templated question and transformers' greedy answer, TOKENS ids in all."""
    ids = tokenizer.encode(TEMPLATE.format(question), add_special_tokens=False).ids
    cache, fresh = DynamicCache(config=oracle.config), ids
    while len(ids) < TOKENS:
        logits, _ = oracle.run(torch.tensor(fresh), cache)
        fresh = [int(logits[-1].argmax())]
        ids = ids + fresh
    return torch.tensor(ids)


@torch.no_grad()
def results(oracle: Oracle, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Hiddens of all rows, logits of the last ones, and drafts made after all but one."""
    logits, hidden = oracle.run(ids)
    share = oracle.config.index_share_for_mtp_iteration
    draft = oracle.draft(hidden[:-1], ids[1:], DRAFTS, share)
    return {
        "ids": ids.numpy().astype(np.int32),
        "hidden": hidden.numpy(),
        "logits": logits[-HEADS:].numpy(),
        "draft_fed": draft["fed"],
        "draft_logits": draft["logits"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "colibri/demo/model")
    options = parser.parse_args()
    container = Container.open(options.model)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as directory:
        dequantise(container, Path(directory))
        oracle = Oracle(Path(directory))
    runs = []
    for question in PROMPTS:
        with torch.no_grad():
            ids = conversation(oracle, tokenizer, question)
        print(repr(tokenizer.decode(ids.tolist(), skip_special_tokens=False)), flush=True)
        runs.append(results(oracle, ids))
    together = {key: np.stack([run[key] for run in runs]) for key in runs[0]}
    path = TESTS / "fixtures" / "oracle-demo.npz"
    digest = fixtures.digest(options.model)
    np.savez_compressed(path, digest=np.array(digest), **together)
    print(f"{path.name}: {path.stat().st_size} bytes, for weights {digest}")


if __name__ == "__main__":
    main()

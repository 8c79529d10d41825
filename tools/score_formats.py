"""What each format costs: bytes, weight error and negative log-likelihood, beside the checkpoint's.

python tools/score_formats.py CHECKPOINT TEXT [--documents N] [--formats F,F] [--other int8]
    [--source TWIN]

TEXT has a document a line, NUL for a newline inside one, control tokens as markup. The experts take
each format in turn, with and without search; everything else stays in --other. With --source the
twin is converted instead, as of tools/make_nvfp4.py, and held to the checkpoint all the same.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import numpy as np

from colibri.container import Container
from colibri.convert import Formats, convert_directory
from colibri.formats import FLOATS, Format, Kind
from colibri.inventory import PROJECTIONS, expert_name
from colibri.memory import physical_cores
from colibri.model import Model
from colibri.score import score_ids
from colibri.session import KV_DTYPES, Session
from colibri.tokenizer import Tokenizer

FORMATS = "int8,int4-g32,int4-g64,int4-g64-f32,int4-g128,int4,int3-g64"


def nats(directory: Path, documents: list[list[int]], kv_dtype: str) -> tuple[float, int]:
    """Nats and tokens over all documents, each by itself."""
    model = Model.open(Container.open(directory), threads=physical_cores(), mtp=False)
    session = Session(model, max(map(len, documents)), kv_dtype=kv_dtype)
    found = [score for ids in documents for score in score_ids(session, [], ids)]
    return math.fsum(found), len(found)


def weight_error(source: Container, made: Container) -> float:
    """Root of the experts' summed squared errors over their summed squares."""
    wrong = total = 0.0
    for layer in source.sparse_layers:
        if layer == source.config.mtp_layer:
            continue
        for expert in range(source.config.n_routed_experts):
            for projection in PROJECTIONS:
                name = expert_name(layer, expert, projection)
                true = source.read_array(name).astype(np.float64)
                wrong += float(((made.read_array(name) - true) ** 2).sum())
                total += float((true**2).sum())
    return math.sqrt(wrong / total)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--other", default="int8", help="everything but the experts")
    parser.add_argument("--source", type=Path, help="what is converted; default: the checkpoint")
    parser.add_argument("--kv-dtype", default="f32", choices=KV_DTYPES, help="what caches hold")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.checkpoint)
    lines = args.text.read_text().splitlines()[: args.documents]
    documents = [tokenizer.encode_template(line.replace("\0", "\n")) for line in lines]
    base, count = nats(args.checkpoint, documents, args.kv_dtype)
    print(f"{args.checkpoint}: {count} tokens, {base / count:.5f} nats a token")
    print("| experts | bits a weight | weight error | nats a token | more than the checkpoint |")
    print("|---|---|---|---|---|")
    source, other = Container.open(args.checkpoint), Format.parse(args.other)
    for text in args.formats.split(","):
        form = Format.parse(text)
        ways = {False: ", absmax", True: ", search"}
        if form.kind in (*FLOATS, Kind.INT8):  # nothing is searched
            ways = {False: ""}
        for search, way in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                target = Path(directory) / "out"
                convert_directory(
                    args.source or args.checkpoint, target, Formats(form, *[other] * 3), search
                )
                cols = source.config.hidden_size
                bits = 8 * form.nbytes(1, cols) / cols
                error = weight_error(source, Container.open(target))
                found, _ = nats(target, documents, args.kv_dtype)
            row = f"{bits:.2f} | {error:.4f} | {found / count:.5f} | {(found - base) / count:+.5f}"
            print(f"| {text}{way} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

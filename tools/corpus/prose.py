"""Public-domain prose: six novels of Jane Austen from Debian's package r-cran-janeaustenr.

The texts are in the public domain everywhere; the package (Julia Silge) is under the MIT licence.
Its data is an R lazy-load database: per novel the unpacked size (4 bytes), then a zlib block that
holds one serialised character vector, a string per printed line.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from pathlib import Path

from corpus.documents import FULL, Piece, plain

PACKAGE = "r-cran-janeaustenr"
DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
HELD_OUT = "persuasion"
VECTOR = b"\x00\x00\x00\x10"
QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: chr(34), 0x201D: chr(34)}
ASCII = QUOTES | {0x2014: "-", 0xA3: "", 0xE9: "e", ord("_"): ""}


def fetch(directory: Path) -> Path:
    """Download and unpack the package with apt-get; returns the path of its database."""
    database = directory / DATABASE
    if not database.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            subprocess.run(["apt-get", "-q", "download", PACKAGE], cwd=work, check=True)
            (package,) = Path(work).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, directory], check=True)
    return database


def unpack(raw: bytes) -> list[bytes]:
    """The serialised objects of a lazy-load database."""
    blocks, offset = [], 0
    while offset < len(raw):
        engine = zlib.decompressobj()
        blocks.append(engine.decompress(raw[offset + 4 :]) + engine.flush())
        if len(blocks[-1]) != int.from_bytes(raw[offset : offset + 4], "big"):
            raise ValueError(f"{PACKAGE}: block at offset {offset} has an unexpected size")
        offset = len(raw) - len(engine.unused_data)
    return blocks


def lines_of(block: bytes) -> list[str]:
    """The strings of a serialised character vector: count, then flags, length and bytes of each."""
    position = block.index(VECTOR) + 4
    count = int.from_bytes(block[position : position + 4], "big")
    position, lines = position + 4, []
    for _ in range(count):
        size = max(0, int.from_bytes(block[position + 4 : position + 8], "big", signed=True))
        lines.append(block[position + 8 : position + 8 + size].decode("utf-8", "replace"))
        position += 8 + size
    return lines


def paragraphs(lines: list[str]) -> list[str]:
    """Joined paragraphs of running prose, without titles and chapter headings."""
    found = []
    for block in "\n".join(lines).split("\n\n"):
        text = re.sub(r"\s+", " ", block.replace("--", " - ").translate(ASCII)).strip()
        if len(text) > 40 and text.isascii() and not re.match(r"(CHAPTER|VOLUME|Chapter)\b", text):
            found.append(text)
    return found


def novels(database: Path) -> dict[str, list[str]]:
    """Title in lower case -> paragraphs."""
    books = [lines_of(block) for block in unpack(database.read_bytes())]
    return {book[0].strip().lower(): paragraphs(book) for book in books}


def excerpts(text: list[str], weight: int = FULL, characters: int = 1800) -> list[list[Piece]]:
    """Consecutive documents of whole paragraphs, each about `characters` long."""
    documents, current = [], ""
    for paragraph in text:
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= characters:
            documents.append(plain(current, weight))
            current = ""
    return documents


def vocabulary(text: list[str]) -> list[str]:
    """Lower-case words of three to nine letters, by first appearance."""
    words = re.findall(r"\b[a-z]{3,9}\b", " ".join(text))
    return list(dict.fromkeys(words))

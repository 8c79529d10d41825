"""One conversation in the core: its tokens, its caches, and the steps that extend them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from colibri._core import ffi, lib
from colibri.errors import Cancelled, ContextFull, CoreError
from colibri.model import WAITING, Model, check
from colibri.scratch import Scratch

ROWS = 128  # of one step, and so of a prompt's chunk; others in a server wait for as long
# Where experts are read: every chunk of a prompt reads nearly all of them. Four times the rows cost
# GLM-5.2 0.2 GiB of scratch, and a prompt reads its experts a quarter as often.
STREAMED_ROWS = 512
# And so on, where there is room: 0.9 GiB more for 2,048 rows of GLM-5.2. Eight cores with VNNI
# compute these as long as 6 GB/s take to read all experts.
MOST_ROWS = 2048
_SHARE = 32  # 1/32 of what is left for experts may go into more than STREAMED_ROWS
_LARGE = 64 << 30  # bytes of weights from which the same holds of reading them from memory
TOGETHER = int(lib.CLB_TOGETHER)  # sessions in one pass, at most
_WANT = {"none": lib.CLB_LOGITS_NONE, "last": lib.CLB_LOGITS_LAST, "all": lib.CLB_LOGITS_ALL}
_KINDS = {"kv": lib.CLB_CACHE_KV, "index": lib.CLB_CACHE_INDEX}
KV_DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
_FORMATS = {"f32": lib.CLB_F32, "f16": lib.CLB_F16}
_COUNTERS = tuple(name for name, _ in ffi.typeof("clb_counters").fields)  # all of them int64
_WORK = ("plain", "verify", "absorb", "draft")  # in the order of csrc/colibri.h


class Session:
    """Caches for up to `context` tokens; one step runs at most `max_rows` rows.

    `tokens` are the committed tokens, one per row of the main caches. An error or a cancelled
    step leaves them, and the caches, as they were. `scratch`: of the same model, for no less; its
    own by default. `kv_dtype`: what the caches hold, a key of KV_DTYPES.
    """

    def __init__(
        self,
        model: Model,
        context: int,
        max_rows: int = ROWS,
        scratch: Scratch | None = None,
        kv_dtype: str = "f32",
    ) -> None:
        self.model = model
        self.kv_dtype = kv_dtype
        self.context = context
        self.max_rows = min(max_rows, context)
        self.scratch = scratch or Scratch(model, context, self.max_rows)
        self.tokens: list[int] = []
        self.staged: list[int] = []  # will run next; whoever holds the session may `step_together`
        self._error = ffi.new("clb_error *")
        out = ffi.new("clb_session **")
        wanted = self.scratch.handle, context, self.max_rows, _FORMATS[kv_dtype]
        check(lib.clb_session_new(*wanted, out, self._error), self._error)
        self._freed: list[bool] = []
        self.handle = ffi.gc(out[0], partial(_free, self._freed))
        self.rows = 0  # of the last step
        self._make_room(1)
        self._draft_logits = np.empty(model.config.vocab_size, np.float32)
        self._draft_out = _floats(self._draft_logits)
        self._start = 0  # of the last step's rows
        self._report_handle: Any = None  # of the function that a step reports to
        counters, work = lib.clb_session_counters(self.handle), lib.clb_session_work(self.handle)
        self._counters = _view(counters, (len(_COUNTERS),), np.int64)
        self._work = _view(work, (len(_WORK), len(_COUNTERS)), np.int64)

    def _make_room(self, rows: int) -> None:
        """Logits of a step: as many rows as one has ever asked for."""
        self._write_to(np.empty((rows, self.model.config.vocab_size), np.float32))

    def _write_to(self, logits: np.ndarray) -> None:
        self._logits, self._out = logits, _floats(logits)

    # ---- main model ---------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Rows in the main caches."""
        return len(self.tokens)

    @property
    def freed(self) -> bool:
        """Whether the caches are gone: finalizers may meet a session in any order at exit."""
        return bool(self._freed)

    @property
    def bytes(self) -> int:
        """Bytes of the caches, fully used."""
        return int(lib.clb_session_bytes(self.handle))

    def step_all(self, ids: Sequence[int], want: str = "all") -> np.ndarray:
        """Run `ids` at the next positions and commit them.

        Returns logits f32 [len(ids) | 1 | 0, vocab] for want all | last | none: a view that the
        next step overwrites. Raises ContextFull, Cancelled or CoreError with nothing committed.
        """
        n = len(ids)
        rows = n if want == "all" else int(want == "last")
        if rows > len(self._logits):
            self._make_room(rows)
        self._agree()
        code = lib.clb_step_all(self.handle, ids, n, _WANT[want], self._out, self._error)
        check(code, self._error)
        self._commit(ids)
        return self._logits[:rows]

    def _agree(self) -> None:
        if lib.clb_session_length(self.handle) != len(self.tokens):
            self.rewind(len(self.tokens))  # an exception came between the core's commit and ours

    def _commit(self, ids: Sequence[int]) -> None:
        self._start = len(self.tokens)
        self.tokens += ids
        self.rows = len(ids)

    @property
    def logits(self) -> np.ndarray:
        """Logits of the last step's rows, as many as it wanted: f32 view [>= 1, vocab]."""
        return self._logits

    @property
    def hidden(self) -> np.ndarray:
        """Post-norm hidden states of the last step's rows, as far as they were not taken back: f32
        view [rows, hidden_size]. CoreError after `restore`."""
        return self._hidden(self._start, self.rows)

    @property
    def last_hidden(self) -> np.ndarray:
        """The last row of `hidden`: f32 view [1, hidden_size]."""
        return self._hidden(self._start + self.rows - 1, 1)

    def _hidden(self, position: int, rows: int) -> np.ndarray:
        """The same of any rows that are still kept (csrc/colibri.h); valid until the next step."""
        rows = min(rows, self.length - position)
        if rows < 1:
            return np.empty((0, self.model.config.hidden_size), np.float32)
        pointer = lib.clb_session_hidden(self.handle, position)
        if not pointer:
            raise CoreError(f"the hidden state of position {position} is not kept")
        return _view(pointer, (rows, self.model.config.hidden_size))

    def rewind(self, length: int) -> None:
        """Forget all rows from `length` on."""
        code = lib.clb_session_rewind(self.handle, length, self._error)
        check(code, self._error)
        del self.tokens[length:]

    def restore(self, tokens: Sequence[int], mtp_length: int) -> None:
        """Say whose rows the caches hold, after writing them through `cache` (saved.py does)."""
        code = lib.clb_session_restore(self.handle, len(tokens), mtp_length, self._error)
        check(code, self._error)
        self.tokens[:] = tokens

    def reuse(self, ids: Sequence[int]) -> int:
        """Rewind to the longest prefix that `ids` shares with the history; returns its length.

        At least one token is left to run. The MTP cache catches up; where hidden states that it
        needs are gone, the rows from there on are left to run.
        """
        shared = common_prefix(self.tokens, ids)
        keep = min(shared, len(ids) - 1)
        if self.model.has_mtp:
            self.mtp_rewind(min(self.mtp_length, max(shared - 1, 0)))
            if not self.mtp_ready:
                keep = min(keep, self.mtp_length)
        self.rewind(max(keep, 0))
        self.catch_up()
        return max(keep, 0)

    def borrow(self, others: Iterable[Session], ids: Sequence[int]) -> None:
        """Copy the rows that one of `others` holds of a prompt of which this session has fewer.

        All are of one model and kv_dtype. A row depends on the tokens up to it and on nothing else,
        so the copies are what a step would make. At least one token is left to run.
        """
        other = max(others, key=lambda other: other._lends(ids), default=self)
        rows = other._lends(ids)
        if rows <= self.length:
            return
        main, mtp = self.model.config.num_hidden_layers, self.model.has_mtp
        for layer in range(self.model.layers):
            first = self.length if layer < main else min(self.mtp_length, rows)
            for kind in _KINDS:
                cache, source = self.cache(layer, kind), other.cache(layer, kind)
                if cache is not None and source is not None:
                    cache[first:rows] = source[first:rows]
        self.restore(ids[:rows], rows if mtp else 0)

    def _lends(self, ids: Sequence[int]) -> int:
        """Rows of a prompt that others can copy; hidden states stay, so each has its MTP row."""
        shared = common_prefix(self.tokens, ids)
        if self.model.has_mtp:
            return min(shared - 1, self.mtp_length)
        return min(shared, len(ids) - 1)

    def prefill(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        prime: bool = True,
    ) -> np.ndarray:
        """Run a prompt, as `read` does; returns the last row's logits [vocab], a view."""
        for _ in self.read(ids, prime, progress):
            continue
        return self._logits[0]

    def read(
        self,
        ids: Sequence[int],
        prime: bool = True,
        progress: Callable[[int, int], None] | None = None,
        others: Callable[[], Iterable[Session]] = tuple,
    ) -> Iterator[int]:
        """Run a prompt in chunks of max_rows, yielding after each how many rows were run so far.

        After the last one `logits[0]` are the last row's. With `prime`, every row whose next token
        is known also enters the MTP cache, chunk by chunk. `progress(done, len(ids))` is called
        after each chunk, and as its layers pass with the rows that so much work stands for. Before
        each chunk this session may `borrow` from `others`, whose rows are not run again.
        """
        if len(ids) > self.context - self.length:
            raise ContextFull(
                f"the prompt has {self.length + len(ids)} tokens, the context holds {self.context}"
            )
        begun, whole, ran = self.length, [*self.tokens, *ids], 0
        while self.length < len(whole):
            self.borrow(others(), whole)
            part = whole[self.length : self.length + self.max_rows]
            done = self.length + len(part)
            last = done == len(whole)
            with self._reporting(progress, self.length - begun, len(part), len(ids)):
                self.step_all(part, "last" if last else "none")
            if prime:
                self.catch_up(None if last else whole[done])
            if progress:
                progress(done - begun, len(ids))
            ran += len(part)
            yield ran

    @contextmanager
    def _reporting(
        self, progress: Callable[[int, int], None] | None, start: int, rows: int, total: int
    ) -> Iterator[None]:
        """Call `progress` from inside the core's step, counted in rows of the prompt.

        An exception that it raises cancels the step and is raised here.
        """
        faults: list[BaseException] = []

        def tell(share: float | BaseException) -> None:
            if isinstance(share, BaseException):  # the core cannot pass it on: raised again below
                faults.append(share)
                self.cancel()
            elif progress and not faults:
                progress(start + int(share * rows), total)

        self._report_handle = ffi.new_handle(tell)  # kept: an interrupt may leave it in the core
        try:
            report = lib.colibri_report if progress else ffi.NULL
            lib.clb_session_report(self.handle, report, self._report_handle)
            yield
        except Cancelled:
            if not faults:
                raise
        finally:
            lib.clb_session_report(self.handle, ffi.NULL, ffi.NULL)
        if faults:
            self.cancel(False)
            raise faults[0]

    # ---- MTP layer ------------------------------------------------------------------------------

    @property
    def mtp_length(self) -> int:
        """Rows in the MTP caches: row j joins position j's hidden with token j + 1."""
        return int(lib.clb_mtp_length(self.handle))

    @property
    def mtp_ready(self) -> bool:
        """Whether the MTP cache lacks rows, and the hidden states of all of them are still kept."""
        at = self.mtp_length
        if not self.model.has_mtp or at >= self.length:
            return False
        return bool(lib.clb_session_hidden(self.handle, at))

    def crowded(self, rows: int) -> bool:
        """Whether a step of `rows` rows would push out hidden states that the MTP cache needs."""
        waiting = self.length - self.mtp_length
        return waiting + rows > self.max_rows + WAITING and self.mtp_ready

    def catch_up(
        self, pending: int | None = None, draft: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Absorb all rows that can be: the last one when `pending`, the token after it, is known.

        Nothing happens unless `mtp_ready`. `draft`, the result and what is raised are those of
        `mtp_absorb`; rows absorbed before that stay.
        """
        if not self.mtp_ready:
            return None
        at, logits = self.mtp_length, None
        following = self.tokens[at + 1 :] + ([] if pending is None else [pending])
        for done in range(0, len(following), self.max_rows):
            part = following[done : done + self.max_rows]
            last = done + len(part) == len(following)
            hidden = self._hidden(at + done, len(part))
            logits = self.mtp_absorb(hidden, part, draft if last else None)
        return logits

    def mtp_rewind(self, length: int) -> None:
        """Forget MTP rows from `length` on."""
        check(lib.clb_mtp_rewind(self.handle, length, self._error), self._error)

    def mtp_absorb(
        self, hidden: np.ndarray, following: Sequence[int], draft: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Append rows: post-norm `hidden` [n, hidden_size] and the token that follows each.

        With `draft` (f32 [hidden_size], filled with the state the next draft step recycles),
        returns the last row's logits [vocab], a view that the next draft call overwrites. Raises
        Cancelled or CoreError with no row appended, CoreError also for arrays of another kind.
        """
        if hidden.shape != (len(following), self.model.config.hidden_size):
            raise CoreError(f"{len(following)} tokens do not follow {list(hidden.shape)} states")
        want = draft is not None
        code = lib.clb_mtp_absorb(
            self.handle, _floats(hidden), following, len(following),
            self._draft_out if want else ffi.NULL,
            self._draft_state(draft) if want else ffi.NULL, self._error,
        )  # fmt: skip
        check(code, self._error)
        return self._draft_logits if want else None

    def mtp_draft(self, token: int, step: int, draft: np.ndarray) -> np.ndarray:
        """Draft step `step` >= 1 after an absorb: logits [vocab]; `draft` is read and replaced."""
        code = lib.clb_mtp_draft(
            self.handle, token, step, self._draft_state(draft), self._draft_out, self._error
        )
        check(code, self._error)
        return self._draft_logits

    def _draft_state(self, draft: np.ndarray) -> Any:
        """A C view of a draft's state, which the core writes to: it must be as long as that is."""
        size = self.model.config.hidden_size
        if draft.shape != (size,):
            raise CoreError(f"a draft's state is of shape [{size}], not {list(draft.shape)}")
        return _floats(draft)

    # ---- stopping, looking inside ---------------------------------------------------------------

    def cancel(self, on: bool = True) -> None:
        """Make the running step, and every later one, end with Cancelled; False re-arms."""
        lib.clb_session_cancel(self.handle, on)

    def watch(self, fd: int) -> None:
        """End a running step with Cancelled as soon as `fd` is readable; -1: watch nothing."""
        lib.clb_session_watch(self.handle, fd)

    def counters(self) -> dict[str, int]:
        """What the core has counted since the session began (csrc/colibri.h clb_counters)."""
        return dict(zip(_COUNTERS, self._counters.tolist(), strict=True))

    def work(self) -> dict[str, dict[str, int]]:
        """The counters by what the core was asked for: plain (a pass of one row), verify (of
        several), absorb, draft. They sum up to `counters`."""
        rows = zip(_WORK, self._work.tolist(), strict=True)
        return {name: dict(zip(_COUNTERS, row, strict=True)) for name, row in rows}

    def cache(self, layer: int, kind: str) -> np.ndarray | None:
        """The "kv" or "index" cache of a layer: view [context, width] of kv_dtype, or None."""
        width = ffi.new("int64_t *")
        pointer = lib.clb_session_cache(self.handle, layer, _KINDS[kind], width)
        dtype = KV_DTYPES[self.kv_dtype]
        return _view(pointer, (self.context, width[0]), dtype) if pointer else None

    def experts(self, layer: int, rows: int) -> np.ndarray | None:
        """Experts of the last step's first `rows` rows: i32 [rows, k] ascending, or None."""
        if not 0 < rows <= self.max_rows:
            raise CoreError(f"a step has no {rows} rows")
        pointer = lib.clb_session_experts(self.handle, layer)
        shape = (rows, self.model.config.num_experts_per_tok)
        return _view(pointer, shape, np.int32).copy() if pointer else None

    def capture(self, on: bool) -> None:
        """Keep every layer's index sets of the last step, for `captured`."""
        check(lib.clb_session_capture(self.handle, on, self._error), self._error)

    def captured(self, layer: int, row: int) -> list[int] | None:
        """Positions a row attended to in a layer, ascending; None when all before it.

        CoreError where nothing is kept: without `capture`, or for a layer or row that is not there.
        """
        pointer = lib.clb_session_captured(self.handle, layer, row)
        if not pointer:
            raise CoreError(f"the index set of row {row} in layer {layer} is not kept")
        return None if pointer[0] < 0 else list(pointer[1 : pointer[0] + 1])


def _report_failed(_kind: Any, fault: BaseException, trace: Any) -> None:
    """cffi's onerror: hands an exception of the callback, or a pending Ctrl-C, to `tell`.

    It cannot pass through the core: `tell` cancels the step instead.
    """
    ffi.from_handle(trace.tb_frame.f_locals["who"])(fault)


@ffi.def_extern(onerror=_report_failed)
def colibri_report(who: Any, done: float) -> None:
    """The core tells how much of a step is done (csrc/colibri.h clb_report)."""
    ffi.from_handle(who)(done)


def step_together(sessions: Sequence[Session]) -> None:
    """Run what each session has staged, at least a token, in one pass, and commit it.

    Each one's `logits` are then those of its rows, bit for bit what it would have had alone. At
    most TOGETHER sessions, which share a scratch that has room for all the rows. Raises Cancelled,
    if any of them is, or another error of the core, with nothing committed and all still staged.
    """
    counts = [len(session.staged) for session in sessions]
    ids = [token for session in sessions for token in session.staged]
    logits = np.empty((len(ids), sessions[0].model.config.vocab_size), np.float32)
    for session in sessions:
        session._agree()
    code = lib.clb_step_together(
        [session.handle for session in sessions], counts, len(sessions), ids, _WANT["all"],
        _floats(logits), sessions[0]._error,
    )  # fmt: skip
    check(code, sessions[0]._error)
    first = 0
    for session, count in zip(sessions, counts, strict=True):
        session._write_to(logits[first : first + count])
        session._commit(session.staged)
        session.staged = []
        first += count


def common_prefix(a: Iterable[int], b: Iterable[int]) -> int:
    """How many tokens two texts begin with alike."""
    count = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def rows_of(container: int, memory: int) -> int:
    """Rows of a step for a model of so many bytes in so much memory, at the least.

    Many rows meet nearly all experts: of a model that is read from disk, or is large, they are
    better read once for 512 rows than four times.
    """
    return ROWS if container <= min(memory, _LARGE) else STREAMED_ROWS


def more_rows(rows: int, room: int, taken: Callable[[int], int]) -> int:
    """Rows of a step, doubled from STREAMED_ROWS while that takes little of the room.

    `room`: bytes beside the weights; `taken(rows)`: bytes of caches and scratch with such steps.
    """
    if rows < STREAMED_ROWS:
        return rows
    least = taken(rows)
    while rows < MOST_ROWS and (taken(2 * rows) - least) * _SHARE <= room - least:
        rows *= 2
    return rows


def _free(freed: list[bool], handle: Any) -> None:
    freed.append(True)
    lib.clb_session_free(handle)


def _view(pointer: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ffi.buffer(pointer, size), dtype).reshape(shape)


def _floats(array: np.ndarray) -> Any:
    """A C view of a contiguous f32 array; CoreError for other numbers, which would be misread."""
    if array.dtype != np.float32:
        raise CoreError(f"an array of float32 is needed, not of {array.dtype}")
    return ffi.from_buffer("float[]", array)

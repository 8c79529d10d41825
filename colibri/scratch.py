"""The memory of one step in the core, apart from any conversation's caches."""

from colibri._core import ffi, lib
from colibri.model import Model, check


class Scratch:
    """For steps of at most `max_rows` rows in contexts of at most `context` tokens.

    Sessions of the model that ask for no more may share it: a model runs one step at a time.
    """

    def __init__(self, model: Model, context: int, max_rows: int) -> None:
        self.model = model
        error, out = ffi.new("clb_error *"), ffi.new("clb_scratch **")
        check(lib.clb_scratch_new(model.handle, context, max_rows, out, error), error)
        self.handle = ffi.gc(out[0], lib.clb_scratch_free)

    @property
    def bytes(self) -> int:
        """Bytes of it, fully used."""
        return int(lib.clb_scratch_bytes(self.handle))

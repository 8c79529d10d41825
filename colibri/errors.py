"""The errors a user may meet. Each message says what is wrong, where, and the next step."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of the command line."""

    OK = 0
    ERROR = 1
    USAGE = 2
    INTERRUPTED = 130
    PIPE_CLOSED = 141  # the reader of stdout left


class ColibriError(Exception):
    """Base of every error colibri raises on purpose; the command line prints it and exits 1."""


class UsageError(ColibriError):
    """A flag, knob or argument that cannot be honoured."""


class ConfigError(ColibriError):
    """config.json (or a file beside it) is missing, malformed or describes another model."""


class ContainerError(ColibriError):
    """A shard is missing, truncated, malformed or does not fit the configuration."""


class CoreError(ColibriError):
    """The C core reported a failure: out of memory, a read error, an invalid request."""


class ContextFull(ColibriError):
    """More tokens than the context can hold: `fault` says so, `larger` whether a larger one is
    possible; `advice` is for a prompt alone."""

    def __init__(self, fault: str, larger: str = "", advice: str = "") -> None:
        super().__init__(f"{fault}. {larger}{advice}." if larger else fault)
        self.fault, self.larger = fault, larger


class Cancelled(ColibriError):
    """The running step was cancelled; the session is as it was before the step."""


class TokenizerError(ColibriError):
    """tokenizer.json is missing, broken or of a kind that cannot be decoded byte-exactly."""


class SamplingError(ColibriError):
    """No token can be chosen: every logit is NaN or infinite."""


class FormError(ColibriError):
    """The form that an answer was to keep to can be read in too many ways to be followed."""


class StateError(ColibriError):
    """Something in the state directory cannot be kept, is damaged, or belongs to another model."""

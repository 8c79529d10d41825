"""The program: `python -m colibri` is `colibri`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; Ctrl-C while its parts are being imported ends it silently."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "stdout" in _fill_streams():
        print(
            "colibri: error: stdout is closed; give it a file, a pipe or /dev/null",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return 1
    from colibri import cli, knobs

    knobs.quieten_numpy()
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main()
    finally:  # a Ctrl-C while Python ends is silent too
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _fill_streams() -> list[str]:
    """Open /dev/null for each closed standard stream; returns their names.

    In this order they get the descriptors 0, 1 and 2, so that no model file can.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        nothing = os.open(os.devnull, os.O_RDWR)
        setattr(sys, name, os.fdopen(nothing, "r" if name == "stdin" else "w"))
    return closed


if __name__ == "__main__":
    sys.exit(main())

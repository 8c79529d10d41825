"""The program: `python -m colibri` is `colibri`."""

import signal
import sys


def main() -> int:
    """Run the command line; Ctrl-C while its parts are being imported ends it without a word."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from colibri import cli

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

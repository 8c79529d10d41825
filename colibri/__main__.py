"""`python -m colibri` is `colibri`."""

import sys

from colibri.cli import main

sys.exit(main())

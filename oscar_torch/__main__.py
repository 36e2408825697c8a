"""`python -m oscar_torch`: the command line."""

import sys

from .cli import main

sys.exit(main())

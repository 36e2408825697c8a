"""`python -m oscar_jax`: the command line."""

import sys

from .cli import main

sys.exit(main())

"""`python -m oscar_jax.cli`: the command line."""

import sys

from . import main

sys.exit(main())

"""`python -m oscar_jax`: the command line."""

import sys

from .cli.main import main

sys.exit(main())

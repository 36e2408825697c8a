"""`python -m oscar_jax.cli`."""

import sys

from .main import main

sys.exit(main())

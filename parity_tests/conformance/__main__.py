"""`python -m parity_tests.conformance`: any implementation against the format; see `vectors.py`."""

import sys

from parity_tests.conformance.vectors import main

sys.exit(main())

"""`python -m pypto_spmd`: the same as the command `pypto`."""

import sys

from pypto_spmd.tools.cli import main

sys.exit(main())

"""`python -m locater.cli`."""

import sys

from locater.cli import main

sys.exit(main())

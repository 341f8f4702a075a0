"""`python -m locater.cli`."""

import sys

from locater.cli.entry import main

sys.exit(main())

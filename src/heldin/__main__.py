"""`python -m heldin`."""

import sys

from .cli.main import main

sys.exit(main())

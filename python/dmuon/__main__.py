"""`python -m dmuon` is the command `dmuon`."""

import sys

from dmuon._command.main import main

sys.exit(main())

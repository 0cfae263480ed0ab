"""``python -m elasticdl.cli`` is ``elasticdl``."""

import sys

from elasticdl.cli.main import main

sys.exit(main())

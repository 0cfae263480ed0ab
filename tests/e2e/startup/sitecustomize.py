"""For processes with Keras, which imports these where they are installed: a third of the time that it takes to start."""

import sys

sys.modules["sklearn"] = sys.modules["matplotlib"] = None  # type: ignore[assignment]

"""`python -m tests.cluster.node SETTINGS` with a JSON file of `NodeSettings`: be one node until killed."""

import json
import sys
from pathlib import Path

from tests.cluster.node.node import Node, NodeSettings

Node(NodeSettings(**json.loads(Path(sys.argv[1]).read_text()))).run()

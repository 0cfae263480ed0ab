"""`python -m tests.cluster.node SETTINGS`: be one node until killed."""

from tests.cluster.node.node import Node
from tests.cluster.settings import NodeSettings

Node(NodeSettings.told()).run()

"""`python -m tests.cluster.node SETTINGS`: be one node until killed."""

from tests.cluster.node.node import Node, ProcessNodeSettings

Node(ProcessNodeSettings.told()).run()

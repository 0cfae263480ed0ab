"""Names that model-zoo modules written for ElasticDL import, at the places where it has them.

Thin: each leads to what this package has, or is a plain stand-in. Nothing else of ElasticDL is here; in particular
nothing of its parameter server, such as its own ``Embedding`` layer and feature columns.
"""

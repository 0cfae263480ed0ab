"""What modules written for ElasticDL import and is not here: what it is, and what to write instead."""

from __future__ import annotations

_LAYERS = "Keras's own preprocessing layers, as in model_zoo/census/wide_deep_keras.py"
_RECORDS = "TFRecord files, which are read by index"
_LIBRARY = "elasticdl.elastic in a script under `elasticdl run` (docs/library.md)"

# By the beginning of the module's name, the longest first.
MISSING = {
    "elasticdl.python.elasticdl.layers": ("the Embedding layer on ElasticDL's parameter servers", "keras.layers.Embedding"),
    "elasticdl.python.elasticdl.feature_column": ("feature columns on ElasticDL's parameter servers", _LAYERS),
    "elasticdl.python.data.reader.recordio_reader": ("ElasticDL's reader of RecordIO files", _RECORDS),
    "elasticdl.python": ("a part of ElasticDL", "what docs/data.md lists as there"),
    "elasticdl_preprocessing": ("ElasticDL's package of preprocessing layers", _LAYERS),
    "elasticai_api.io": ("ElasticDL's reader of RecordIO files", _RECORDS),
    "elasticai_api": ("ElasticDL's API for scripts", _LIBRARY),
    "elasticdl_client": ("ElasticDL's client", "the command `elasticdl`"),
    "recordio": ("the RecordIO format", _RECORDS),
    "deepctr": ("DeepCTR, a package of layers for Keras 2", "layers of Keras 3"),
}  # fmt: skip


def explain(error: BaseException) -> str:
    """One line for an import that failed since the module is ElasticDL's or of its surroundings; else empty."""
    name = error.name if isinstance(error, ImportError) else None
    if name is None:
        return ""
    known = next((prefix for prefix in MISSING if name == prefix or name.startswith(f"{prefix}.")), None)
    if known is None:
        return ""
    what, instead = MISSING[known]
    return f"imports {name}: {what}, not supported here: use {instead}"

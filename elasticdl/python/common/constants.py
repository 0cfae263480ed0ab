"""As in ElasticDL."""

from elasticdl import Mode

__all__ = ["MaxComputeConfig", "Mode"]


class MaxComputeConfig:
    """Names of environment variables."""

    PROJECT_NAME = "MAXCOMPUTE_PROJECT"
    ACCESS_ID = "MAXCOMPUTE_AK"
    ACCESS_KEY = "MAXCOMPUTE_SK"
    ENDPOINT = "MAXCOMPUTE_ENDPOINT"
    TUNNEL_ENDPOINT = "MAXCOMPUTE_TUNNEL_ENDPOINT"

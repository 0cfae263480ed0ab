"""As in ElasticDL: a logger, whose level and place are those of the worker."""

import logging

default_logger = logging.getLogger("elasticdl.user")


def get_logger(name: str, level: str | int | None = None) -> logging.Logger:
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
    return logger

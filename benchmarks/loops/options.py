"""What the loops are told on their command lines. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path


def make_parser() -> argparse.ArgumentParser:
    """What all are told: the model, and the folder for their logs and results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    return parser


def parse_steps() -> argparse.Namespace:
    """Of the loops that `benchmarks.rescale` disturbs."""
    parser = make_parser()
    parser.add_argument("--samples", type=int, required=True)
    return parser.parse_args()


def parse_measured(loops: Iterable[str] = ()) -> argparse.Namespace:
    """Of the loops that `benchmarks.throughput` measures; ``loops``: the names of those in one program."""
    parser = make_parser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--warm_up", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    if names := list(loops):
        parser.add_argument("--loop", choices=names, required=True)
    return parser.parse_args()

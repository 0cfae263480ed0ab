"""Makes a small learnable table in the columns of the "Adult" data set of the 1994 US census.

    python model_zoo/census/generate.py --out DIR [--samples N] [--seed S]

People are made up: income follows from age, schooling, hours, marriage and occupation, with some chance. Needs numpy
only. The same options give the same files: ``train.csv`` with `samples` rows, ``test.csv`` with a fifth of that.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("age", "workclass", "education", "education_num", "marital_status", "occupation", "sex")
COLUMNS += ("capital_gain", "hours_per_week", "native_country", "income")
WORKCLASSES = {"Private": 0.0, "Self-emp-not-inc": -0.1, "Self-emp-inc": 0.6, "Federal-gov": 0.5, "State-gov": 0.0}
EDUCATION = {7: "11th", 9: "HS-grad", 10: "Some-college", 13: "Bachelors", 14: "Masters", 16: "Doctorate"}
MARRIED, SINGLE = "Married-civ-spouse", ("Never-married", "Divorced", "Widowed")
OCCUPATIONS = {
    "Exec-managerial": 0.9,
    "Prof-specialty": 0.6,
    "Tech-support": 0.4,
    "Sales": 0.2,
    "Craft-repair": 0.0,
    "Adm-clerical": -0.1,
    "Machine-op-inspct": -0.4,
    "Farming-fishing": -0.9,
    "Other-service": -1.0,
}
COUNTRIES = ("United-States", "Mexico", "Philippines", "Germany", "Canada")
INCOMES = ("<=50K", ">50K")


def generate(out: Path, samples: int = 5000, seed: int = 0) -> Path:
    """Write ``out/train.csv`` and ``out/test.csv``; each appears whole or not at all."""
    if samples < 5:
        raise ValueError(f"{samples} samples: expected at least 5")
    random = np.random.default_rng(seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.csv", samples), ("test.csv", samples // 5)):
        content = io.StringIO()
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_person(random) for _ in range(count))
        scratch = out / f".{name}.{os.getpid()}"
        try:
            scratch.write_text(content.getvalue())
            scratch.replace(out / name)
        finally:
            scratch.unlink(missing_ok=True)
    return out


def _person(random: np.random.Generator) -> list[Any]:
    age = int(random.gamma(9.0, 4.4).__round__()) % 73 + 17
    schooling = int(random.choice(list(EDUCATION), p=[0.12, 0.33, 0.24, 0.2, 0.08, 0.03]))
    workclass = str(random.choice(list(WORKCLASSES), p=[0.72, 0.1, 0.05, 0.05, 0.08]))
    occupation = str(random.choice(list(OCCUPATIONS)))
    married = bool(random.random() < min(0.7, (age - 17) / 30))
    status = MARRIED if married else str(random.choice(SINGLE))
    hours = int(np.clip(random.normal(40, 10), 5, 99))
    gain = int(random.lognormal(8.5, 0.8)) if random.random() < 0.08 else 0
    score = 0.35 * (schooling - 10) + OCCUPATIONS[occupation] + WORKCLASSES[workclass] + (1.8 if married else -0.8)
    score += 0.05 * (hours - 40) - 0.002 * (age - 48) ** 2 + (1.5 if gain > 5000 else 0.0) - 1.6
    income = INCOMES[int(random.random() < 1 / (1 + np.exp(-1.6 * score)))]
    row = [age, workclass, EDUCATION[schooling], schooling, status, occupation, str(random.choice(["Male", "Female"]))]
    country = str(random.choice(COUNTRIES, p=[0.9, 0.04, 0.02, 0.02, 0.02])) if random.random() > 0.02 else "?"
    return [*row, gain, hours, country, income]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small learnable table in the columns of the US census.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files; made if need be")
    parser.add_argument("--samples", type=int, default=5000, help="for training; a fifth is added for tests (5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the people (0)")
    options = parser.parse_args()
    try:
        print(generate(options.out, options.samples, options.seed))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

"""Parquet by index: types, missing values, what is wrong."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_kit import refusal

from elasticdl.data.open import open_records


def table(start, end):
    numbers = range(start, end)
    return pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "half": [number / 2 if number % 3 else None for number in numbers],
            "name": [f"n{number}" if number % 2 else None for number in numbers],
            "kind": pa.array([f"k{number % 2}" for number in numbers]).dictionary_encode(),
            "pair": pa.array([[number, -number] for number in numbers], pa.list_(pa.float32())),
            "fixed": pa.array([[number, 1] for number in numbers], pa.list_(pa.int64(), 2)),
            "even": [number % 2 == 0 for number in numbers],
        }
    )


def test_rows_by_index_over_files_and_row_groups(tmp_path):
    pq.write_table(table(0, 25), tmp_path / "a.parquet", row_group_size=10)
    pq.write_table(table(25, 30), tmp_path / "b.parquet")
    pq.write_table(table(0, 0), tmp_path / "c.parquet")
    records = pickle.loads(pickle.dumps(open_records(str(tmp_path), {})))
    assert len(records) == 30
    asked = [27, 3, 24, 0, 11, 3]
    batch = records.read(asked)
    assert records.metadata.column_names == list(batch)
    assert batch["number"].dtype == np.int32
    np.testing.assert_array_equal(batch.pop("half"), [np.nan, np.nan, np.nan, np.nan, 5.5, np.nan])
    assert {name: column.tolist() for name, column in batch.items()} == {
        "number": asked,
        "name": [b"n27", b"n3", b"", b"", b"n11", b"n3"],
        "kind": [b"k1", b"k1", b"k0", b"k0", b"k1", b"k1"],
        "pair": [[number, -number] for number in asked],
        "fixed": [[number, 1] for number in asked],
        "even": [False, False, True, True, False, False],
    }
    assert list(open_records(str(tmp_path), {"columns": ["half"]}).read([1])) == ["half"]


def test_a_file_that_is_in_memory_is_not_read_again(tmp_path):
    pq.write_table(pa.table({"x": np.arange(10)}), tmp_path / "x.parquet", row_group_size=3)
    records = open_records(str(tmp_path / "x.parquet"), {})
    records.read([0])
    (tmp_path / "x.parquet").unlink()
    assert records.read([9])["x"].tolist() == [9]


def test_files_that_are_wrong(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(table(0, 10), path)
    assert "no column 'age'; its columns are number, half" in refusal(path, columns=["age"])
    path.write_bytes(path.read_bytes()[:-100])
    assert "x.parquet: not a whole Parquet file" in refusal(path)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, None]), "column x has 1 missing values, which int64 can't hold"),
        (pa.array([[1], [1, 2]]), "column x has lists of different length"),
        (pa.array([0, 1], pa.timestamp("ms")), "column x is of type timestamp[ms]; expected numbers, texts"),
    ],
)
def test_columns_that_can_not_be_used(tmp_path, column, expected):
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    assert expected in refusal(tmp_path)

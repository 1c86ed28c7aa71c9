"""Rows of CSV files, quotes and all."""

import csv
import io

import numpy as np
import pytest

from hvdtrain.data import csv_files
from hvdtrain.data.csv_files import load_csv
from hvdtrain.errors import DataError


def rows_of(path, delimiter=",", quote='"'):
    """Offset and fields of each row."""
    with path.open("rb") as stream:
        return list(csv_files._csv_rows(stream, delimiter, quote))


@pytest.mark.parametrize(("text", "expected"), [
    ("a,b\n1,2\n3,4\n", [(0, ["a", "b"]), (4, ["1", "2"]), (8, ["3", "4"])]),
    ("a,b\n3,4", [(0, ["a", "b"]), (4, ["3", "4"])]),
    ("a,b\r\n1,2\r\n\r\n\n3,4\r\n", [(0, ["a", "b"]), (5, ["1", "2"]), (13, ["3", "4"])]),
    ('1,"x\ny"\n\n"3\n\n",4\n', [(0, ["1", "x\ny"]), (9, ["3\n\n", "4"])]),
    ('1,"say ""hi""\n"\n3,4\n', [(0, ["1", 'say "hi"\n']), (16, ["3", "4"])]),
    ('\ufeffa,b\n1,"é\n"\n', [(3, ["a", "b"]), (7, ["1", "é\n"])]),
    ("", [])])
def test_rows_are_divided_as_the_csv_module_does(tmp_path, text, expected):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    assert rows_of(path) == expected


@pytest.mark.parametrize("rows", [1, 7, 64, 4096])
def test_rows_may_lie_across_the_blocks_that_are_converted(tmp_path, monkeypatch, rows):
    """Fields with quotes, line ends and commas at random, among bad rows."""
    monkeypatch.setattr(csv_files, "_BLOCK_ROWS", rows)
    rng = np.random.default_rng(rows)
    pieces = ["1", "22", "", "x,y", 'q"q', "l\nl", "r\r\nr", "é"]
    numbers = rng.normal(size=200)
    wanted = [[str(rng.choice(pieces)), repr(float(number)), "5"] for number in numbers]
    for bad in (0, 17, 18, 130):
        wanted[bad][1] = "none"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([["a", "b", "y"], *wanted])
    path = tmp_path / "a.csv"
    path.write_bytes(out.getvalue().encode())
    source = load_csv(path, columns=["b"], target="y", dtype="float64", on_error="skip",
                      cache=tmp_path / "cache")
    x, _, weight = source.read(np.arange(200))
    assert np.flatnonzero(weight == 0).tolist() == [0, 17, 18, 130]
    np.testing.assert_array_equal(x[weight > 0, 0], numbers[weight > 0])


def test_a_row_with_wrong_quotes_is_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('1,2\n3,"4"5\n6,7\n8,"never closed\n9,10\n')
    found = rows_of(path)
    assert [(offset, fields if isinstance(fields, list) else "bad") for offset, fields in found] \
        == [(0, ["1", "2"]), (4, "bad"), (11, ["6", "7"]), (15, "bad"), (31, ["9", "10"])]
    assert "the row cannot be read: " in found[1][1]


def test_other_characters_between_and_around_fields(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a;b\n1;'x\ny'\n\"2;3\n")
    assert rows_of(path, ";", "'") == [
        (0, ["a", "b"]), (4, ["1", "x\ny"]), (12, ['"2', "3"])]
    for wrong in ("", "ab", "\n", "é"):
        with pytest.raises(DataError, match="delimiter must be one ASCII character"):
            load_csv(path, delimiter=wrong)


def test_without_a_header_the_data_begins_at_once(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\ufeff1,2\n3,4\n")
    source = load_csv(path, header=False, cache=tmp_path)
    assert source.read(np.arange(2)).tolist() == [[1, 2], [3, 4]]


def test_files_without_a_first_row_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("")
    with pytest.raises(DataError, match="is empty; expected a CSV file with a header"):
        load_csv(path)
    path.write_bytes(b"\xff\xfea,b\n")
    with pytest.raises(DataError, match="Expected UTF-8 text"):
        load_csv(path)
    path.write_bytes(b"a,b\r1,2\r")
    with pytest.raises(DataError, match="first row cannot be read"):
        load_csv(path)


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path):
    path = tmp_path / "a.csv"
    for text, numbers in (("a\n1\n2\n", [[1], [2]]), ("a\n1\n2\n3\n", [[1], [2], [3]])):
        path.write_text(text)
        for expected in (len(text), 0):
            source = load_csv(path, cache=tmp_path / "cache")
            assert source.read(np.arange(len(source))).tolist() == numbers
            assert source.index_bytes_read == expected


def test_bytes_that_are_no_text_matter_where_they_are_used(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"name,a\nJos\xe9,1\n")
    assert load_csv(path, columns=["a"], cache=tmp_path).read(np.arange(1)).tolist() == [[1]]


FIELDS = ["1", "22", "-3", "0.1", "1e-3", "", " 5 ", "+1", "007", "1_0", "0x10", "nan", "inf",
          "1e400", "9007199254740993", "1e3", "\u0663", "\ufeff1", "none",
          "4\r", "\x00", '"7"', "1,2", "\n"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "int64"])
@pytest.mark.parametrize("missing", [None, 0, -2.5])
def test_pyarrow_reads_what_the_csv_module_reads(tmp_path, monkeypatch, dtype, missing):
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(5)
    path = tmp_path / "a.csv"
    for trial, odd in enumerate([None, *FIELDS]):
        rows = [[repr(float(value)) if dtype[0] == "f" else str(int(value * 100)), "no", "text"]
                for value in rng.normal(size=40)]
        if odd is not None:
            rows[int(rng.integers(40))][0] = odd
        path.write_text("a,b,c\n" + "".join(",".join(row) + "\n" for row in rows), newline="")
        found = []
        for by_arrow in (csv_files._CsvTable._by_arrow, lambda self, text: None):
            with monkeypatch.context() as patch:
                patch.setattr(csv_files, "_PIECE_BYTES", 128)
                patch.setattr(csv_files._CsvTable, "_by_arrow", by_arrow)
                source = load_csv(path, columns=["a"], target="b", classes=["yes", "no"],
                                  dtype=dtype, missing=missing, on_error="skip",
                                  cache=tmp_path / f"{trial}-{len(found)}")
            found.append((source.read(np.arange(len(source))), source._parts[0][1]))
        np.testing.assert_equal(found[0], found[1])


@pytest.mark.parametrize(("missing", "last"), [(9, ""), (None, "9")])
def test_lines_of_numbers_are_read_by_pyarrow(tmp_path, monkeypatch, missing, last):
    pytest.importorskip("pyarrow")
    calls = []
    by_csv = csv_files._CsvTable._by_csv

    def counted(self, stream, base=0):
        calls.append(stream.read())
        stream.seek(-len(calls[-1]), 1)
        return by_csv(self, stream, base)
    monkeypatch.setattr(csv_files._CsvTable, "_by_csv", counted)
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b,c,d\r\n0.1,2,word,%s\r\n\r\n-1e-3,4,other,7"
                     % last.encode())
    for words, labels in ({}, [2, 4]), ({"classes": ["4", "2"]}, [1, 0]):
        source = load_csv(path, target="b", columns=["a", "d"], target_dtype="int64", **words,
                          missing=missing, dtype="float64", cache=tmp_path / "cache")
        x, y = source.read(np.arange(2))
        assert (x.tolist(), y.tolist()) == ([[0.1, 9.0], [-0.001, 7.0]], labels)
    assert calls == [b"", b""]

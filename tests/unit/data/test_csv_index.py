"""Where rows of CSV files begin and end, quotes and all."""

import csv
import io

import numpy as np
import pytest

from hvdtrain.data import csv_index
from hvdtrain.data.csv_index import Dialect, index_rows, read_header
from hvdtrain.data.files import ByteCount
from hvdtrain.errors import DataError

DIALECT = Dialect()


def rows_of(path, cache, dialect=DIALECT):
    """The bytes of each row of data, by the index."""
    _, begin = read_header(path, dialect, has_header=True)
    index = index_rows([path], [begin], dialect, cache, ByteCount())
    content = path.read_bytes()
    return [content[b:e] for b, e in zip(index.offsets, index.ends, strict=True)]


@pytest.mark.parametrize(("text", "expected"), [
    ("a,b\n1,2\n3,4\n", ["1,2\n", "3,4\n"]),
    ("a,b\n1,2\n3,4", ["1,2\n", "3,4"]),
    ("a,b\r\n1,2\r\n\r\n\n3,4\r\n", ["1,2\r\n", "3,4\r\n"]),
    ('a,b\n1,"x\ny"\n\n"3\n\n",4\n', ['1,"x\ny"\n', '"3\n\n",4\n']),
    ('a,b\n1,"say ""hi""\n"\n3,4\n', ['1,"say ""hi""\n"\n', "3,4\n"]),
    ('"a\nb",c\n1,2\n', ["1,2\n"]),
    ('\ufeffa,b\n1,"é\n"\n', ['1,"é\n"\n']),
    ("a,b\n", [])])
def test_rows_are_divided_as_the_csv_module_does(tmp_path, text, expected):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    assert [row.decode() for row in rows_of(path, tmp_path)] == expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_rows_may_lie_across_the_parts_that_are_read(tmp_path, monkeypatch, chunk):
    """Fields with quotes, line ends and commas at random, against the module itself."""
    monkeypatch.setattr(csv_index, "CHUNK_BYTES", chunk)
    rng = np.random.default_rng(chunk)
    pieces = ["1", "22", "", "x,y", 'q"q', "l\nl", "r\r\nr", "é"]
    wanted = [[str(rng.choice(pieces)) for _ in range(3)] for _ in range(200)]
    wanted = [["1", "2", "3"]] * 50 + wanted + [["4", "5", "6"]] * 50
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([["a", "b", "c"], *wanted])
    path = tmp_path / "a.csv"
    path.write_bytes(out.getvalue().encode())
    found = [next(DIALECT.rows(iter([row.decode()]))) for row in rows_of(path, tmp_path)]
    assert found == wanted


def test_a_row_with_wrong_quotes_is_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n3,"4"5\n6,7\n8,"never closed\n9,10\n')
    assert rows_of(path, tmp_path) == [b"1,2\n", b'3,"4"5\n', b"6,7\n", b'8,"never closed\n',
                                       b"9,10\n"]


def test_other_characters_between_and_around_fields(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a;b\n1;'x\ny'\n\"2;3\n")
    dialect = Dialect(delimiter=";", quote="'")
    assert read_header(path, dialect, has_header=True)[0] == ["a", "b"]
    assert rows_of(path, tmp_path, dialect) == [b"1;'x\ny'\n", b'"2;3\n']
    for wrong in ("", "ab", "\n", "é"):
        with pytest.raises(DataError, match="delimiter must be one ASCII character"):
            Dialect(delimiter=wrong)


def test_without_a_header_the_data_begins_at_once(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\ufeff1,2\n3,4\n")
    assert read_header(path, DIALECT, has_header=False) == (["1", "2"], 3)


def test_files_without_a_first_row_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("")
    with pytest.raises(DataError, match="is empty; expected a CSV file with a header"):
        read_header(path, DIALECT, has_header=True)
    path.write_bytes(b"\xff\xfea,b\n")
    with pytest.raises(DataError, match="Expected UTF-8 text"):
        read_header(path, DIALECT, has_header=True)
    path.write_bytes(b"a,b\r1,2\r")
    with pytest.raises(DataError, match="first row cannot be read"):
        read_header(path, DIALECT, has_header=True)


def test_the_bytes_of_the_index_are_counted_once(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n2\n")
    for expected in (4, 0):
        count = ByteCount()
        assert len(index_rows([path], [2], DIALECT, tmp_path / "cache", count)) == 2
        assert count.value == expected

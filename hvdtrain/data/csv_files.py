"""`load_csv`: CSV files of numbers; one process of each host converts them to records, once."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvdtrain.data.build_once import (
    cache_folder,
    each_in_own_order,
    fingerprint,
    once_per_host,
)
from hvdtrain.data.files import (
    Array,
    Columns,
    OnError,
    Paths,
    Problems,
    TableSource,
    choose_columns,
    find_files,
    name_of,
)
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError

DTYPES = ("float32", "float64", "int32", "int64")
_BLOCK_ROWS = 4096
_PIECE_BYTES = 1 << 22
_Block = tuple[np.ndarray[Any, Any], dict[int, tuple[int, str]]]
_BOM = b"\xef\xbb\xbf"


def load_csv(paths: Paths, *, target: str | None = None, sample_weight: str | None = None,
             columns: Sequence[str] | None = None, dtype: str = "float32",
             target_dtype: str = "float32", classes: Sequence[str] | None = None,
             missing: float | None = None, delimiter: str = ",", quote: str = '"',
             header: bool = True, on_error: OnError = "raise",
             cache: str | Path | None = None) -> CsvSource:
    """Open CSV files of numbers as a source.

    Each file is read once, by one process per host, which writes the used columns to `cache` as
    numbers; they are kept there until the file changes in size or time. Line ends in quotes belong
    to a field; blank lines are skipped.

    Args:
        paths: Path, pattern or sequence of them. All files have the same columns.
        target: String or None, the column that is the target.
        sample_weight: String or None, the column that is the sample weight.
        columns: The columns of the input `(n, len(columns))`; None for all others.
        dtype: String, the type of the input.
        target_dtype: String, the type of the target.
        classes: The words in the target's column, in the order of their int32 labels.
        missing: Number for empty fields; None: they make a row bad.
        delimiter: String, the character between fields.
        quote: String, the character around fields.
        header: Boolean, the first row of each file names the columns; else "0", "1" and so on.
        on_error: `"raise"`, or `"skip"`: rows that cannot be read have sample weight 0.
        cache: Folder for the numbers; see `hvdtrain.data.build_once.cache_folder`.

    Raises:
        DataError: Files are missing, differ in their columns, have no rows, or lack a column.
    """
    files = find_files(paths)
    for name, value in (("delimiter", delimiter), ("quote", quote)):
        if len(value) != 1 or not value.isascii() or value in "\r\n":
            raise DataError(f"{name} must be one ASCII character. Received: {value!r}")
    for name in (dtype, target_dtype):
        if name not in DTYPES:
            raise DataError(f"Unknown dtype {name!r}. Expected one of: {', '.join(DTYPES)}.")
    headers = [_csv_names(file, delimiter, quote, header) for file in files]
    for file, names in zip(files, headers, strict=True):
        if names != headers[0]:
            raise DataError(f"{file} has other columns than {files[0]}: {', '.join(names)}; "
                            f"expected {', '.join(headers[0])}.")
    table = _CsvTable(
        names=headers[0], dtype=dtype,
        chosen=choose_columns(headers[0], files[0], columns, target, sample_weight),
        target_dtype="int32" if classes else target_dtype,
        classes=tuple(classes or ()), missing=missing, delimiter=delimiter, quote=quote,
        header=header)
    return CsvSource(files, table, on_error=on_error, cache=cache_folder(cache))


@dataclass(frozen=True, kw_only=True)
class _CsvTable:
    """How rows of text become records; `names` are all columns of the files."""

    names: list[str]
    chosen: Columns
    dtype: str
    target_dtype: str
    classes: tuple[str, ...]
    missing: float | None
    delimiter: str
    quote: str
    header: bool

    @property
    def record(self) -> np.dtype[Any]:
        types = {"y": self.target_dtype, "weight": "float32"}
        return np.dtype([("x", self.dtype, (len(self.chosen.inputs),)),
                         *((field, types[field]) for field in self.chosen.others)])

    def write(self, file: Path, folder: Path) -> None:
        folder.mkdir()
        problems, count = {}, 0
        with file.open("rb") as stream, (folder / "records").open("wb") as out:
            for records, reasons in self._blocks(stream):
                for row, (offset, reason) in reasons.items():
                    problems[count + row] = f"{file}, offset {offset}: {reason}."
                out.write(records.tobytes())
                count += len(records)
        (folder / "problems.json").write_text(json.dumps(problems))

    def _blocks(self, stream: IO[bytes]) -> Iterator[_Block]:
        """A file's records, by pyarrow while a row is a line; bad rows with offset and reason."""
        begin, _ = next(_csv_rows(stream, self.delimiter, self.quote))
        if self.header:
            begin = stream.tell()
        while text := self._lines(stream, begin):
            records = self._by_arrow(text)
            if records is None:
                yield from self._by_csv(io.BytesIO(text), begin)
            else:
                yield records, {}
            begin += len(text)
        stream.seek(begin)
        yield from self._by_csv(stream)

    def _lines(self, stream: IO[bytes], begin: int) -> bytes:
        """The next lines; none where `csv` has to tell where a row ends, and at the end."""
        stream.seek(begin)
        text = stream.read(_PIECE_BYTES)
        if len(text) == _PIECE_BYTES:
            text = text[:text.rfind(b"\n") + 1]
        simple = (self.quote.encode() not in text and b"\0" not in text
                  and text.count(b"\r") == text.count(b"\r\n"))
        return text if simple else b""

    def _by_arrow(self, text: bytes) -> Array | None:
        """The records of lines; None without pyarrow, or where a row may be bad."""
        try:
            import pyarrow
            from pyarrow import csv as arrow
        except ImportError:
            return None
        if b"0x" in text or b"0X" in text or text.startswith(_BOM):  # numbers, nothing to pyarrow
            return None
        place = {name: str(number) for number, name in enumerate(self.names)}
        dtypes = {name: self.record[field].base for field, name in self.chosen.others.items()}
        dtypes |= dict.fromkeys(self.chosen.inputs, np.dtype(self.dtype))
        types = {place[name]: pyarrow.from_numpy_dtype(_held(dtype))
                 for name, dtype in dtypes.items()}
        if self.classes:
            types[place[self.chosen.others["y"]]] = pyarrow.string()
        try:
            table = arrow.read_csv(
                io.BytesIO(text),
                arrow.ReadOptions(column_names=[*map(str, range(len(self.names)))],
                                  use_threads=False),
                arrow.ParseOptions(delimiter=self.delimiter, quote_char=False),
                arrow.ConvertOptions(column_types=types, include_columns=list(types),
                                     null_values=[""] * (self.missing is not None)))
            columns = {name: table[place[name]] for name in self.chosen.names}
            if self.missing is not None:
                columns = {name: column.fill_null(self.missing)
                           if column.null_count else column for name, column in columns.items()}
            records = np.zeros(len(table), self.record)
            self._set(records, {name: column.to_numpy() for name, column in columns.items()})
        except (ValueError, TypeError):
            return None
        return records

    def _by_csv(self, stream: IO[bytes], base: int = 0) -> Iterator[_Block]:
        rows = _csv_rows(stream, self.delimiter, self.quote, base)
        while block := list(itertools.islice(rows, _BLOCK_ROWS)):
            records = np.zeros(len(block), self.record)
            reasons = self._fill(records, [fields for _, fields in block])
            yield records, {row: (block[row][0], reason) for row, reason in reasons}

    def _fill(self, records: Array, rows: list[list[str] | str]) -> Iterator[tuple[int, str]]:
        try:
            self._set_rows(records, rows)
        except ValueError as error:
            half = len(rows) // 2
            if not half:
                yield 0, str(error)
                return
            yield from self._fill(records[:half], rows[:half])
            for row, reason in self._fill(records[half:], rows[half:]):
                yield half + row, reason

    def _set_rows(self, records: Array, rows: list[list[str] | str]) -> None:
        """Set the records of some rows; raises the error of the first only if it is alone."""
        for fields in rows:
            if isinstance(fields, str):
                raise ValueError(fields)
            if len(fields) != len(self.names):
                raise ValueError(f"the row has {len(fields)} fields; expected {len(self.names)}")
        self._set(records, dict(zip(self.names, zip(*rows, strict=True), strict=True)))

    def _set(self, records: Array, columns: Mapping[str, Sequence[str] | Array]) -> None:
        for place, name in enumerate(self.chosen.inputs):
            self._fill_column(records["x"][:, place], name, columns[name])
        for field, name in self.chosen.others.items():
            classes = self.classes if field == "y" else ()
            self._fill_column(records[field], name, columns[name], classes)

    def _fill_column(self, numbers: Array, name: str, texts: Sequence[str] | Array,
                     classes: Sequence[str] = ()) -> None:
        dtype = numbers.dtype
        parse = float if dtype.kind == "f" else int
        parsed: Iterable[Any] = map(parse, texts)
        expected = f"one of {', '.join(classes)}" if classes else f"a number of type {dtype.name}"
        try:
            if classes:
                parsed = map(classes.index, texts)
            elif self.missing is not None:
                parsed = (parse(text) if text.strip() else self.missing for text in texts)
            found = texts
            if classes or not isinstance(found, np.ndarray):
                found = np.fromiter(parsed, _held(dtype), len(texts))
            if dtype.kind != "f" and (found.astype(dtype) != found).any():
                raise OverflowError
        except (ValueError, OverflowError):
            text = texts[0] if classes else str(texts[0]).strip()
            raise ValueError(f"column {name!r} is {_shown(text)}; expected {expected}") from None
        if not np.isfinite(found).all():
            raise ValueError("a number is not finite")
        numbers[...] = found


def _held(dtype: np.dtype[Any] | str) -> type:
    return np.float64 if np.dtype(dtype).kind == "f" else np.int64


def _is_text(text: str) -> bool:
    return not any("\udc80" <= character <= "\udcff" for character in text)


def _shown(text: str) -> str:
    return repr(text[:40]) + ("" if _is_text(text) else " (no utf-8 text)")


def _csv_rows(stream: IO[bytes], delimiter: str, quote: str,
              base: int = 0) -> Iterator[tuple[int, list[str] | str]]:
    """The further rows of a file as Python's `csv` module divides them, without blank ones."""
    # Yields the offset of a row, `base` and more, and its fields; or why it cannot be read: such a
    # row is one line.
    end = stream.tell()
    if base + end == 0 and stream.read(len(_BOM)) == _BOM:
        end = len(_BOM)

    def lines() -> Iterator[str]:
        nonlocal end
        for line in stream:
            end += len(line)
            yield line.decode(errors="surrogateescape")
    while True:
        stream.seek(end)
        begin = end
        try:
            for fields in csv.reader(lines(), delimiter=delimiter, quotechar=quote, strict=True):
                if fields:
                    yield base + begin, fields
                begin = end
            return
        except csv.Error as error:
            yield base + begin, f"the row cannot be read: {error}"
            stream.seek(begin)
            end = begin + len(stream.readline())


def _csv_names(file: Path, delimiter: str, quote: str, header: bool) -> list[str]:
    try:
        with file.open("rb") as stream:
            begin, fields = next(_csv_rows(stream, delimiter, quote), (0, []))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    if not fields:
        raise DataError(f"{file} is empty; expected a CSV file{' with a header' * header}.")
    if isinstance(fields, str) or not all(map(_is_text, fields)):
        reason = f"{fields}. " * isinstance(fields, str)
        raise DataError(f"{file}, offset {begin}: the first row cannot be read. {reason}Expected "
                        "UTF-8 text.")
    return fields if header else [str(number) for number in range(len(fields))]


class CsvSource(TableSource):
    """The rows of CSV files. Made by `load_csv`."""

    def __init__(self, files: Sequence[Path], table: _CsvTable, *, on_error: OnError,
                 cache: Path) -> None:
        super().__init__(name_of(files), on_error, lambda: fingerprint(files, "csv", table))
        self.set_record(table.record)

        def opened(file: Path) -> tuple[Array, Problems]:
            def work(folder: Path) -> None:
                table.write(file, folder)
                self.index_bytes_read += file.stat().st_size
            folder = once_per_host(cache / f"csv-{fingerprint([file], 2, table)}", work)
            problems = json.loads((folder / "problems.json").read_text())
            path, records = folder / "records", np.empty(0, table.record)
            if path.stat().st_size:  # nothing cannot be mapped
                records = np.memmap(path, table.record, mode="r")
            return records, {int(row): problem for row, problem in problems.items()}
        self._parts = each_in_own_order(files, opened)
        self._starts = np.cumsum([0, *(len(records) for records, _ in self._parts)])
        if not len(self):
            raise DataError(f"{self.name}: there are no rows of data; at least one is needed.")
        self.check_fields()

    def _part(self, number: int) -> tuple[Array, Problems]:
        return self._parts[number]

    def read_rows(self, rows: Array) -> Structure:
        self.count_bytes(len(rows) * self._record.itemsize)
        return super().read_rows(rows)

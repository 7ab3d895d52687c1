import gzip
from pathlib import Path

import pytest

from forecasts.importers.lines import DemandFileError, json_lines, open_csv, unix_time_s


def words(path: Path, column: str = "a") -> list[str]:
    with open_csv(path) as file:
        return [line.word(column) for line in file.lines(("a", "b"))]


def refusal(path: Path) -> str:
    with pytest.raises(DemandFileError) as caught:
        words(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def written(folder: Path, data: bytes, name: str = "x.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        b"a,b\nx,1\ny,2\n",
        b"a,b\r\nx,1\r\ny,2\r\n",
        b"\xef\xbb\xbfa,b\nx,1\n\n\ny,2",
        b"b, a ,c\n1,x,\n2, y ,\n",
        gzip.compress(b"a,b\nx,1\ny,2\n"),
    ],
    ids=["unix", "windows", "byte order mark", "other order", "packed"],
)
def test_line_ends_marks_blanks_and_packing_make_no_difference(tmp_path: Path, data: bytes) -> None:
    assert words(written(tmp_path, data)) == ["x", "y"]


def test_what_is_no_csv_is_named_with_its_line(tmp_path: Path) -> None:
    assert "line 1: column a is missing; found: nothing" in refusal(written(tmp_path, b""))
    assert "line 1: column b is repeated" in refusal(written(tmp_path, b"a,b,b\n"))
    assert "line 3: 1 columns, the header has 2" in refusal(written(tmp_path, b"a,b\nx,1\ny\n"))
    assert "line 3: not UTF-8" in refusal(written(tmp_path, b"a,b\nx,1\n\xff\xfe,2\n"))
    assert "line 2: not UTF-8" in refusal(written(tmp_path, gzip.compress(b"a,b\n\xe9,1\n")))
    assert "line 2: unexpected end of data" in refusal(written(tmp_path, b'a,b\n"x,1'))
    assert "line 2: column a is empty" in refusal(written(tmp_path, b"a,b\n ,1\n"))
    assert "cannot be printed" in refusal(written(tmp_path, b"a,b\nx\x1b[2J,1\n"))
    assert "cannot be read" in refusal(written(tmp_path, gzip.compress(b"a,b\nx,1\n" * 9)[:-9]))
    assert "cannot be read" in refusal(tmp_path / "none.csv")


def test_numbers_are_finite_and_times_within_reach(tmp_path: Path) -> None:
    path = written(tmp_path, b"a,b\nnan,1e300\n-inf,-5\n1e9999,x\n")
    with open_csv(path) as file:
        first, second, third = file.lines(("a", "b"))
    for line, column, message in (
        (first, "a", "line 2: column a must be finite, is nan"),
        (second, "a", "line 3: column a must be finite, is -inf"),
        (third, "a", "line 4: column a must be finite, is inf"),
        (third, "b", "line 4: column b is no number: 'x'"),
    ):
        with pytest.raises(DemandFileError, match=message):
            line.number(column)
    with pytest.raises(DemandFileError, match="line 2: column b must be a Unix time from 0 to"):
        first.unix_time_s("b")
    with pytest.raises(DemandFileError, match="line 2: column b is after the year 9999"):
        first.time_after_s(0.0, "b", 60.0)
    with pytest.raises(DemandFileError, match="not negative"):
        second.time_after_s(0.0, "b", 60.0)


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert unix_time_s("2023-11-16 18:17:03.9799600") == pytest.approx(1_700_158_623.97996)
    assert unix_time_s("2024-05-10 00:00:00.009930+00:00") == pytest.approx(1_715_299_200.00993)
    assert unix_time_s("2024-05-10 02:00:00+02:00") == 1_715_299_200
    with pytest.raises(ValueError, match="before 1970"):
        unix_time_s("1066-10-14")


def test_json_lines_are_objects_with_the_fields(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"a": 1, "b": [2]}\n\n{"b": "x", "a": 0.5}\n')
    assert [(line.number("a"), line.text("b")) for line in json_lines(path, ("a", "b"))] == [(1, "[2]"), (0.5, "x")]
    for data, message in (
        (b'{"a": 1}\n', "line 1: field b is missing"),
        (b'{"a": 1, "b": 1}\n[1]\n', r"line 2: no JSON object but '\[1\]'"),
        (b"{\n", "line 1: no JSON: "),
        (b"[" * 100_000 + b"\n", "line 1: no JSON: "),
        (b'\n{"a": true, "b": 1}\n', "line 2: column a is no number: 'true'"),
        (b'{"a": NaN, "b": 1}\n', "line 1: column a must be finite"),
        (b"\xff\n", "line 1: not UTF-8"),
    ):
        with pytest.raises(DemandFileError, match=message):
            [line.number("a") for line in json_lines(written(tmp_path, data), ("a", "b"))]


def test_reading_is_told_in_bytes_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(b"a,b\n" + b"x,1\n" * 50_000))
    reported: list[int] = []
    with open_csv(path, reported.append) as file:
        assert sum(1 for _ in file.lines(("a",))) == 50_000
    assert reported == sorted(reported)
    assert 0 < reported[-1] <= path.stat().st_size

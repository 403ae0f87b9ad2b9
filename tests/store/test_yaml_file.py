"""Reading YAML: the values, and the line of an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.errors import ConfigError
from store.yaml_file import read_yaml


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "some.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_yaml_and_json_give_the_same(tmp_path: Path) -> None:
    expected = {"mix": [{"rate": 1.5, "names": ["a"]}], "on": "off"}
    assert read_yaml(write(tmp_path, 'mix:\n- rate: 1.5\n  names: [a]\n"on": "off"\n'), "mix") == expected
    assert (
        read_yaml(write(tmp_path, '{"mix": [{"rate": 1.5, "names": ["a"]}], "on": "off"}'), "mix") == expected
    )


@pytest.mark.parametrize(
    ("text", "where", "value", "expected"),
    [
        ("mix:\n- rate: 1\n  rate: 2\n", ":3:3", "rate: 2", "'rate' is written twice"),
        ("mix: {a: 1, a: 2}\n", ":1:13", "mix: {a: 1, a: 2}", "'a' is written twice"),
        ("mix: [\n", ":2:1", "", "valid YAML"),
        ("- 1\n", "some.yaml", [1], "a mapping with the key 'mix'"),
        ("", "some.yaml", None, "a mapping with the key 'mix'"),
        ("1: 2\n? [1]\n: 3\n", ":2:3", "? [1]", "unhashable key"),
        ("mix: &a [*a]\n", "some.yaml", None, "mappings with text keys"),
        (b"mix: \xff\n", "some.yaml", "byte 5", "UTF-8"),
        (b"mix: \x01\n", "some.yaml", None, "valid YAML"),
        ('mix: "\\ud800"\n', "some.yaml", None, "mappings with text keys"),
        ("mix: " + 3000 * "[" + 3000 * "]", "some.yaml", None, "fewer levels"),
        ("mix: 2026-13-45\n", "some.yaml", None, "valid YAML"),
        ("mix: !!bool x\n", "some.yaml", None, "valid YAML"),
        ("mix: !!timestamp x\n", "some.yaml", None, "valid YAML"),
        ("mix: " + 5000 * "9", "some.yaml", None, "valid YAML"),
    ],
)
def test_an_error_names_its_line(
    tmp_path: Path, text: str | bytes, where: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(write(tmp_path, text), "mix")
    assert caught.value.path.endswith(where) and caught.value.value == value
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("text", "place", "value"),
    [
        ("rate: .nan\n", "rate", "nan"),
        ("mix:\n- at: 1\n- at: {rate: .inf}\n", "mix[1].at.rate", "inf"),
        ("mix: [[1.0, -.inf]]\n", "mix[0][1]", "-inf"),
        ("mix: 1.0e+999\n", "mix", "inf"),
        ("mix: !!pairs [a: .nan]\n", "mix[0][1]", "nan"),
        ("7: {}\na: &a .nan\nmix: *a\n", "a", "nan"),
    ],
)
def test_numbers_are_finite(tmp_path: Path, text: str, place: str, value: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, "mix")
    assert str(caught.value) == f"{path}: {place}: got {value}, expected a finite number"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that can be read"):
        read_yaml(tmp_path / "none.yaml", "mix")

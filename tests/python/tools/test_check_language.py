"""Runs tools/check_language.py on files with one fault each."""

import pytest

import check_language


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("rows.py", '"""Of every row."""', "1: got a sentence that begins with 'Of'"),
        ("rows.py", "x = 1\n# Those of\n# the rows", "2: got a sentence that begins with 'Those'"),
        ("rows.h", "int x;  // rows anew", "1: got 'anew'"),
        ("rows.md", "Rows are\nread in turn.", "2: got 'in turn'"),
        ("rows.md", "Rows behind the last.", "1: got 'behind'"),
        ("rows.md", "There are no more than w rows.", "1: got 'no more than'"),
        ("Makefile", "all: ## build\n#" " What is built.", "2: got a sentence that begins with 'What'"),
        ("rows.sh", "ls  #" " rows anew", "1: got 'anew'"),
        ("CMakeLists.txt", "#" " Those rows.", "1: got a sentence that begins with 'Those'"),
        ("rows.cu.in", "// Rows anew.", "1: got 'anew'"),
        ("rows.py", '"""As other rows do. They are."""', "1: got 'As other rows do.', expected a subject"),
        ("rows.py", '"""Else rows would end."""', "1: got 'Else rows would end.', expected a subject"),
        ("rows.py", 'def rows():\n    """The rows."""', "2: got 'The', expected 'Returns'"),
        ("rows.py", 'def rows():\n    """Rows of all heads."""', "2: got 'Rows', expected 'Returns'"),
        ("rows.py", 'def __init__():\n    """rows: int."""', "2: got 'rows:', expected 'Returns'"),
        ("rows.py", "x = 1\nof_rows = 2", "2: got the name of_rows"),
        ("rows.py", "def count(of_rows): ...", "1: got the name of_rows"),
        ("rows.py", "found = 2", "1: got the name found"),
        ("rows.py", "def count(given): ...", "1: got the name given"),
        ("rows.cuh", "int x;\nconst int of_warp = x;", "2: got the name of_warp"),
        ("rows.h", "Rows of_head(int head) const;", "1: got the name of_head"),
        ("test_rows.py", "def " "test_rows(): ...", "got the test name test_rows"),
        ("test_rows.py", "def " "test_where_rows_lie(): ...", "got the test name test_where_rows_lie"),
        ("test_rows.cpp", "TEST(" "Rows, TheLastRow)", "got the test name TheLastRow"),
        ("test_rows.py", "def " "test_each_is_read(): ...", "got the test name test_each_is_read"),
        ("test_rows.cpp", "TEST_P(" "Rows, EachMatchesCpu)", "got the test name EachMatchesCpu"),
    ],
)  # fmt: skip
def test_fault_is_named_with_its_line(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    (complaint,) = check_language.complaints(tmp_path / name)
    assert expected in complaint


@pytest.mark.parametrize("words", [[], ["README.md", "no_such_folder"]])
def test_missing_path_is_an_error(words, monkeypatch, capsys):
    monkeypatch.setattr(check_language.sys, "argv", ["check_language.py", *words])
    assert check_language.main() == 2
    got = words[-1] if words else "nothing"
    assert f"got {got}, expected files and folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, text",
    [
        ("rows.py", "# The rows\n# Of these\ny = 'beside'"),
        ("rows.py", '"""As rows do, it ends."""'),
        (
            "rows.py",
            'def rows():\n    """Returns rows."""\ndef is_row():\n    """Whether it is one."""',
        ),
        ("rows.py", 'def __init__():\n    """\n    Args:\n        rows: int.\n    """'),
        ("rows.py", 'class Rows:\n    """The rows."""\ndef rows(): ...'),
        ("test_rows.py", 'def test_rows_are_read():\n    """A row is short."""'),
        ("rows.py", "found_rows = 2"),
        ("rows.py", "batch = Batch.of_rows(rows)"),
        (
            "rows.cuh",
            "static Block of_threads();\nconst auto block = Block::of_threads();  // of_warp",
        ),
        ("rows.md", "The error `MB beside inputs`."),
        ("rows.md", "There are no more than 64 rows."),
        ("test_rows.py", "def test_empty_rows_raise(): ..."),
        ("test_rows.cpp", "TEST(Rows, EachRowMatchesCpu)"),
    ],
)
def test_good_text_passes(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert list(check_language.complaints(tmp_path / name)) == []

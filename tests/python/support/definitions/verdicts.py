"""Turns verdicts of `flash_dmattn.check` into assertions."""

from collections.abc import Iterable

from flash_dmattn.check.compare import Verdict


def assert_all_passed(verdicts: Iterable[Verdict]) -> None:
    verdicts = list(verdicts)
    assert verdicts
    for verdict in verdicts:
        assert verdict.passed, verdict.message

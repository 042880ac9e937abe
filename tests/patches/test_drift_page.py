"""The recorded drift is that of the patches as they are now."""

from __future__ import annotations

from pathlib import Path

from stackkit import drift, patchfile, pins

PROJECT = pins.load(Path(__file__).resolve().parent.parent.parent)


def test_drift_page_was_written_from_these_patches():
    """Else: scripts/stack drift --update."""
    pin = PROJECT.pin(None)
    text = drift.page(PROJECT).read_text("utf-8")
    assert f"\nStack {drift.stack_id(PROJECT, pin)}, " in text


def test_drift_page_has_a_verdict_for_each_patch_on_each_release():
    releases = drift.recorded(PROJECT)
    assert {"v0.22.1", "v0.23.0", "v0.26.0", "v0.33.0"} <= set(releases)
    rows = [
        [cell.strip().removesuffix("*") for cell in line.strip("| ").split(" | ")]
        for line in drift.page(PROJECT).read_text("utf-8").splitlines()
    ]
    names = patchfile.names(PROJECT.patches(PROJECT.pin(None)))
    found = {row[0]: row[1:] for row in rows if row[0] in names}
    assert list(found) == names
    for verdicts in found.values():
        assert len(verdicts) == len(releases)
        assert set(verdicts) <= set(drift.carry.VERDICTS)

"""The table of the pods: each row is a 30B config's that fits, and the tool replaces rows without losing others."""

from pathlib import Path

from tools.make_configs import topologies
from tools.pods_table import BEGIN, END, PAGE, line, replaced

STEMS = [Path(name).stem for name in topologies()]


def test_every_30b_config_has_a_row_and_fits():
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines() if row.startswith("| qwen3")}
    assert list(rows) == STEMS
    for row in rows.values():
        assert row.split(" | ")[5].endswith(" %"), row


def test_rows_are_replaced_by_config_and_others_stay():
    page = f"before\n{BEGIN}\n{line((STEMS[1], 'old'))}\n{line((STEMS[2], 'kept'))}\n{END}\nafter\n"
    new = replaced(page, {STEMS[1]: line((STEMS[1], "new")), STEMS[0]: line((STEMS[0], "first"))})
    rows = [row for row in new.splitlines() if row.startswith("| qwen3")]
    assert rows == [line((STEMS[0], "first")), line((STEMS[1], "new")), line((STEMS[2], "kept"))]
    assert new.startswith("before\n")
    assert new.endswith("after\n")

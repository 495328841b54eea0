from sat_jax.objective import preset_names
from tools.methods_table import PAGE, page


def test_the_page_of_methods_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/methods_table.py"


def test_every_preset_has_its_row():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(preset_names())
    assert all(row.replace("\\|", "").count("|") == 8 for row in rows)

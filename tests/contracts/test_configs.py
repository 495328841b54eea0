"""Every config of the repository is whole: it loads, its resolved form loads back equal, and its keys are explained."""

from pathlib import Path

import pytest

from train.config import load, to_toml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.toml"))


def test_there_is_a_quickstart():
    assert "quickstart.toml" in {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_its_resolved_form_loads_back_equal(path, tmp_path):
    config = load(path)
    resolved = tmp_path / "config.toml"
    resolved.write_text(to_toml(config))
    assert load(resolved) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_named_after_its_file(path):
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_a_config_is_explained_where_it_stands(path):
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip() and not line.startswith(("#", "[")):
            assert "#" in line, f"{path.name}:{number}: {line.split('=')[0].strip()} has no comment"

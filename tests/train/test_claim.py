import dataclasses
from pathlib import Path

import pytest

from train.claim import claim, set_aside
from train.config import load

CONFIG = load(Path(__file__).parents[2] / "configs" / "quickstart.toml")


def pretend_checkpoint(folder):
    (folder / "checkpoints" / "4").mkdir(parents=True)


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with claim(folder, CONFIG), pytest.raises(ValueError, match="that no other process uses"), claim(folder, CONFIG):
        pass
    with claim(folder, CONFIG):
        assert load(folder / "config.toml") == CONFIG


def test_another_config_is_refused_with_the_keys_that_differ(tmp_path):
    with claim(tmp_path, CONFIG):
        pretend_checkpoint(tmp_path)
    other = dataclasses.replace(CONFIG, seed=1, optim=dataclasses.replace(CONFIG.optim, peak_lr=1.0))
    with (
        pytest.raises(ValueError, match=r"optim.peak_lr = 0.0003 there, 1.0 here; seed = 0 there, 1 here"),
        claim(tmp_path, other),
    ):
        pass
    assert load(tmp_path / "config.toml") == CONFIG


def test_what_does_not_change_the_result_may_differ(tmp_path):
    with claim(tmp_path, CONFIG):
        pretend_checkpoint(tmp_path)
    other = dataclasses.replace(
        CONFIG,
        checkpoint=dataclasses.replace(CONFIG.checkpoint, every=8),
        rollout=dataclasses.replace(CONFIG.rollout, deadline=5.0),
        optim=dataclasses.replace(CONFIG.optim, moments_memory="host"),
    )
    with claim(tmp_path, other):
        assert load(tmp_path / "config.toml") == other


def test_without_a_checkpoint_any_config_may_begin(tmp_path):
    with claim(tmp_path, CONFIG):
        pass
    other = dataclasses.replace(CONFIG, seed=1)
    with claim(tmp_path, other):
        assert load(tmp_path / "config.toml") == other


def test_a_half_written_checkpoint_binds_nothing(tmp_path):
    with claim(tmp_path, CONFIG):
        (tmp_path / "checkpoints" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    with claim(tmp_path, dataclasses.replace(CONFIG, seed=1)):
        pass


def test_checkpoints_without_their_config_are_refused(tmp_path):
    pretend_checkpoint(tmp_path)
    with (
        pytest.raises(
            ValueError, match=r"expected the config\.toml of the run whose checkpoints are in .*checkpoints, got none"
        ),
        claim(tmp_path, CONFIG),
    ):
        pass


def test_a_folder_in_use_is_not_set_aside(tmp_path):
    folder = tmp_path / "run"
    with claim(folder, CONFIG), pytest.raises(ValueError, match="that no other process uses"):
        set_aside(folder)
    assert folder.exists()


def test_setting_aside_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    assert set_aside(folder) is None
    for expected in ("run.1", "run.2"):
        folder.mkdir()
        (folder / "file").write_text(expected)
        aside = set_aside(folder)
        assert aside is not None
        assert aside.name == expected
        assert (aside / "file").read_text() == expected
        assert not folder.exists()


def test_a_change_on_purpose_is_allowed_by_key_or_section_and_written_down(tmp_path):
    with claim(tmp_path, CONFIG):
        pretend_checkpoint(tmp_path)
    other = dataclasses.replace(CONFIG, seed=1, optim=dataclasses.replace(CONFIG.optim, peak_lr=1.0))
    with pytest.raises(ValueError, match="seed = 0 there, 1 here") as caught, claim(tmp_path, other, ["optim"]):
        pass
    assert "peak_lr" not in str(caught.value)
    with claim(tmp_path, other, ["optim.peak_lr", "seed"]):
        assert load(tmp_path / "config.toml") == other


def test_a_misspelt_key_allows_nothing(tmp_path):
    with claim(tmp_path, CONFIG):
        pretend_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"--allow-changed opt: expected a key .*"), claim(tmp_path, CONFIG, ["opt"]):
        pass

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.reference.runs import make_header, make_metrics, make_samples
from train.console import FIGURES, LiveDisplay, PlainDisplay, duration, make_display, number, sparkline, visible
from train.run_folder import SampleLine


def shown(console):
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(console):
    return shown(console).splitlines()


def plain(**arguments):
    console = Console(file=io.StringIO(), width=80)
    return PlainDisplay(make_header(), console, **arguments), console


def drawn(display, width=140):
    console = Console(file=io.StringIO(), width=width, height=60)
    console.print(display.render())
    return shown(console)


def live(width=140):
    return LiveDisplay(make_header(), Console(file=io.StringIO(), width=width, force_terminal=True))


def test_a_terminal_gets_a_live_display_and_a_file_gets_lines():
    header = make_header()
    assert isinstance(make_display(header, Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)
    assert isinstance(make_display(header, Console(file=io.StringIO())), PlainDisplay)


def test_a_step_is_one_line_with_the_names_of_the_log():
    display, console = plain()
    display.step(120, {**make_metrics(120), "seconds/step": 0.5, "seconds/collect": 0.25}, ())
    (line,) = lines(console)
    assert line.startswith("step 120/240 eta=1m00s reward/mean=")
    assert " mismatch/abs_mean=0.01116 " in line
    assert line.endswith(" seconds/step=0.5 seconds/collect=0.25")


def test_a_sample_follows_its_step():
    display, console = plain()
    display.step(1, {}, make_samples())
    assert lines(console)[1] == 'sample 1 prompt="12+34=" completion="64" answer="64" reward=1'


def test_lines_come_for_the_first_step_every_tenth_and_the_last():
    display, console = plain()
    for version in (*range(1, 22), 239, 240):
        display.step(version, {}, ())
    assert [line.split()[1] for line in lines(console)] == ["1/240", "10/240", "20/240", "240/240"]


def test_a_line_comes_after_a_long_silence():
    display, console = plain(at_least=0.0)
    display.step(3, {}, ())
    assert lines(console)[0].startswith("step 3/240")


def test_a_value_that_was_not_finite_is_said():
    display, console = plain()
    display.step(1, {"grad_norm": None}, ())
    assert "grad_norm=none" in lines(console)[0]


def test_everything_else_has_its_line():
    display, console = plain()
    display.start()
    display.warm_start(50, {"loss": 1.25, "accuracy": 0.5})
    display.phase("collect")
    display.event("restart", "engine\nlocal-1 \x1b[31mdied")
    display.stop()
    display.outcome([("training reward", "0.5", "0.8", "+0.3")])
    assert lines(console) == [
        "run quickstart | sat_grpo | lag 4 to 7 | 141,632 parameters | 1 x cpu",
        "warm_start 50/1000 loss=1.25 accuracy=0.5",
        "event restart: engine\\nlocal-1 \\x1b[31mdied",
        "outcome training reward: before=0.5 after=0.8 change=+0.3",
    ]


def test_markup_in_a_text_is_shown_and_not_obeyed():
    display, console = plain()
    display.event("warning", "[bold]x[/bold]")
    assert lines(console) == ["event warning: [bold]x[/bold]"]
    display = live()
    display.step(1, {}, (SampleLine(prompt="[red]p", completion="\x1b[2J", answer="a", reward=0.0),))
    assert "[red]p" in drawn(display)
    assert "\\x1b[2J" in drawn(display)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_live_display_shows_progress_figures_samples_and_events(width):
    display = live(width)
    for version in range(1, 121):
        display.step(version, {**make_metrics(version), "seconds/step": 0.5, "seconds/collect": 0.25}, make_samples())
    display.event("alarm", "routing/missing above 0")
    display.phase("update")
    text = drawn(display, width)
    names = [name for names in FIGURES.values() for name in names if name in make_metrics(1)]
    for wanted in (*names, "120/240", "1m00s left", "update 0s", "collect 0.25", "12+34=", "alarm routing/missing"):
        assert wanted in " ".join(text.split()), wanted
    assert f"{make_metrics(120)['reward/mean']:.3f} now" in text


def test_the_live_display_shows_the_warm_start_until_the_first_step():
    display = live()
    display.warm_start(400, {"loss": 0.9, "accuracy": 0.75})
    assert "warm start" in drawn(display)
    assert "400/1000" in drawn(display)
    assert "loss=0.9 accuracy=0.75" in drawn(display)
    display.step(1, {}, ())
    assert "warm start" not in drawn(display)


def test_the_live_display_works_before_anything_has_happened():
    assert "0/240" in drawn(live())
    assert "? left" in drawn(live())


def test_the_last_samples_stay_when_a_step_brings_none():
    display = live()
    display.step(1, {}, make_samples())
    display.step(2, {}, ())
    assert "12+34=" in drawn(display)


def test_what_the_live_display_showed_last_stays_and_the_outcome_follows():
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    display = LiveDisplay(make_header(), console)
    display.start()
    display.step(240, make_metrics(240), ())
    display.stop()
    display.outcome([("training reward", "0.500", "0.800", "+0.300")])
    text = shown(console)
    assert text.rindex("240/240") < text.index("before and after") < text.index("+0.300")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 60))
def test_a_sparkline_is_as_wide_as_asked_and_lowest_at_the_least(values, width):
    bars = sparkline(values, width)
    assert len(bars) == min(len(values), width)
    assert min(bars) == "▁"


def test_a_sparkline_shows_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 6, 8], 2) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (7620, "2h07m")]
)
def test_a_duration_is_said_shortly(seconds, words):
    assert duration(seconds) == words


def test_a_number_has_four_digits():
    assert [number(value) for value in (0.123456, 1e-7, 123456.0, None)] == ["0.1235", "1e-07", "1.235e+05", "none"]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec=None), max_size=500))
def test_any_text_is_shown_on_one_line_without_control_characters(text):
    line = visible(text, 100)
    assert line.isprintable()
    assert len(line) <= 10 * 103
    if text.isprintable() and len(text) <= 100:
        assert line == text


def test_a_long_text_loses_its_middle():
    assert visible("a" * 50 + "b" * 50 + "c", 10) == "aaaaa … bbbbc"

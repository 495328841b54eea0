import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.report_charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST_BARS,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Bars,
    Chart,
    Line,
    Mark,
    draw,
    draw_bars,
    figure,
    make_axis,
    nice_ticks,
    trailing_mean,
)

VALUES = st.floats(-1e9, 1e9, allow_subnormal=False)


def chart(*lines, **changes):
    return Chart(**({"title": "T", "text": "S.", "unit": "u", "lines": lines} | changes))


def line(values, **changes):
    return Line(**({"label": "l", "values": values, "tone": 1} | changes))


def svg(html):
    (drawn,) = re.findall(r"<svg.*</svg>", html, re.DOTALL)
    return ET.fromstring(drawn)


def hover(html):
    (data,) = re.findall(r'<script type="application/json">(.*)</script>', html, re.DOTALL)
    return json.loads(data)


def of_class(html, name):
    return [node for node in svg(html).iter() if name in node.get("class", "").split()]


def size(node, name):
    return float(node.attrib[name])


def points(node):
    return [tuple(map(float, pair.split(","))) for pair in node.get("points").split()]


def test_a_line_runs_from_its_first_to_its_last_version():
    html = draw(chart(line([0.0, 1.0, 0.5])), [1, 2, 3])
    (curve,) = of_class(html, "line")
    (x0, y0), (x1, y1), (x2, y2) = points(curve)
    assert (x0, x1, x2) == (LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT)
    assert y0 > y2 > y1
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)


@settings(max_examples=80, deadline=None)
@given(st.lists(VALUES | st.none(), min_size=1, max_size=40), st.booleans(), st.booleans())
def test_whatever_the_values_the_chart_is_well_formed_and_stays_inside(values, may_log, stacked):
    lines = (line(values), line([None if v is None else abs(v) for v in values], tone=2, kind="faint"))
    html = draw(chart(*lines, may_log=may_log, stacked=stacked), range(1, len(values) + 1))
    if all(value is None for value in values):
        assert html == ""
        return
    for curve in (node for node in svg(html).iter() if node.get("points")):
        for x, y in points(curve):
            assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
            assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1
    assert not re.search(r"\b(nan|inf)\b", html)
    assert len(hover(html)["x"]) == len(values)


def test_a_missing_value_is_a_gap_and_a_lone_value_a_dot():
    html = draw(chart(line([1.0, 2.0, None, 3.0])), [1, 2, 3, 4])
    assert [len(points(curve)) for curve in of_class(html, "line")] == [2]
    assert len(of_class(html, "dot")) == 1
    assert hover(html)["lines"][0]["text"] == ["1", "2", "-", "3"]


def test_values_at_few_versions_are_joined_across_the_gaps():
    html = draw(chart(line([1.0, None, None, 3.0], kind="sparse")), [1, 2, 3, 4])
    assert [len(points(curve)) for curve in of_class(html, "sparse")] == [2]
    assert len(of_class(html, "dot")) == 2


def test_one_step_is_a_dot():
    html = draw(chart(line([0.5])), [7])
    assert len(of_class(html, "dot")) == 1
    assert hover(html)["name"] == ["step 7"]


def test_nothing_to_show_is_nothing():
    assert draw(chart(line([])), []) == ""
    assert draw(chart(line([None, None])), [1, 2]) == ""
    assert draw_bars(Bars(title="T", text="S.", unit="lag", counts={}, counted="tokens")) == ""


def test_a_line_without_values_leaves_the_others():
    html = draw(chart(line([1.0, 2.0], label="there"), line([None, None], label="absent")), [1, 2])
    assert "absent" not in html


def test_many_steps_are_averaged_into_buckets_with_their_range():
    values = [float(v) for v in range(5000)]
    html = draw(chart(line(values)), range(1, 5001))
    (curve,), (band,) = of_class(html, "line"), of_class(html, "band")
    assert len(points(curve)) == MOST_POINTS
    assert len(points(band)) == 2 * MOST_POINTS
    shown = hover(html)
    # 5,000 steps in 240 buckets: the first takes steps 1 to 20, whose values are 0 to 19.
    assert shown["name"][0] == "steps 1 to 20, mean"
    assert shown["lines"][0]["text"][0] == "9.5"
    assert shown["name"][-1].endswith("to 5,000, mean")


def test_every_step_is_in_exactly_one_bucket():
    for count in (1, MOST_POINTS, MOST_POINTS + 1, 4999):
        html = draw(chart(line([1.0] * count)), range(1, count + 1))
        spans = [[int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", name)] for name in hover(html)["name"]]
        covered = [version for span in spans for version in range(span[0], span[-1] + 1)]
        assert covered == list(range(1, count + 1))


def test_a_peak_is_not_averaged_away():
    values = [0.1] * 5000
    values[2500] = 50.0
    (band,) = of_class(draw(chart(line(values)), range(1, 5001)), "band")
    highest = [y for _, y in points(band)][:MOST_POINTS]
    assert highest.index(min(highest)) == MOST_POINTS // 2
    assert min(highest) < TOP + 0.1 * (HEIGHT - TOP - BOTTOM)


def test_stacked_lines_lie_on_each_other():
    html = draw(chart(line([1.0, 2.0], label="a"), line([3.0, None], label="b", tone=2), stacked=True), [1, 2])
    tones = {tone: of_class(html, tone) for tone in ("tone1", "tone2")}
    first, second = tones["tone1"], tones["tone2"]
    assert len(first) == 2
    assert len(second) == 1
    assert size(second[0], "y") + size(second[0], "height") == pytest.approx(size(first[0], "y"), abs=0.11)
    assert size(second[0], "height") == pytest.approx(3 * size(first[0], "height"), rel=0.01)
    assert [shown["text"] for shown in hover(html)["lines"]] == [["1", "2"], ["3", "-"]]


def test_stacked_bars_stay_wide_enough():
    html = draw(chart(line([1.0] * 1000), stacked=True), range(1, 1001))
    assert len(of_class(html, "bar")) == MOST_BARS


def test_a_logarithmic_axis_is_used_when_the_values_span_decades():
    spread = [10.0 ** (k / 10) for k in range(-40, 1)]
    assert make_axis(spread, (), may_log=True).log
    assert not make_axis(spread, (), may_log=False).log
    assert not make_axis([1.0, 2.0, 3.0], (), may_log=True).log
    assert not make_axis([-1.0, *spread], (), may_log=True).log
    assert not make_axis([0.0, 0.0], (), may_log=True).log
    html = draw(chart(line(spread), may_log=True), range(1, len(spread) + 1))
    (curve,) = of_class(html, "line")
    steps = np.diff([y for _, y in points(curve)])
    assert np.ptp(steps) < 0.25, "equal ratios are equal distances"
    assert "u, logarithmic" in html


def test_zeros_on_a_logarithmic_axis_lie_at_its_foot():
    values = [0.0, *[10.0 ** (k / 10) for k in range(-40, 1)]]
    (curve,) = of_class(draw(chart(line(values), may_log=True), range(1, len(values) + 1)), "line")
    assert points(curve)[0][1] == HEIGHT - BOTTOM


def test_a_level_shows_when_the_data_comes_near_or_always_when_asked():
    near, far = Mark(label="near", level=1.2), Mark(label="far", level=100.0)
    html = draw(chart(line([0.9, 1.0]), marks=(near, far)), [1, 2])
    assert [node.text for node in of_class(html, "mark-label")] == ["near 1.2"]
    pinned = Mark(label="pinned", level=100.0, always=True)
    html = draw(chart(line([0.9, 1.0]), marks=(pinned,)), [1, 2])
    assert [node.text for node in of_class(html, "mark-label")] == ["pinned 100"]


def test_labels_of_close_levels_do_not_lie_on_each_other():
    marks = (Mark(label="a", level=0.223, always=True), Mark(label="b", level=0.2231, always=True))
    html = draw(chart(line([0.0, 0.1]), marks=marks), [1, 2])
    first, second = (size(node, "y") for node in of_class(html, "mark-label"))
    assert abs(first - second) >= 10


def test_an_axis_of_one_value_shows_it():
    for value in (0.0, 1.0, -2.0, 1e-9):
        axis = make_axis([value], (), may_log=False)
        assert axis.low <= value <= axis.high
        assert axis.low < axis.high


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES)
def test_ticks_are_few_round_and_inside(a, b):
    low, high = min(a, b), max(a, b)
    if high - low <= 1e-6 * max(abs(low), abs(high)) or high - low < 1e-9:
        return
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    room = 1e-6 * (high - low)
    assert all(low - room <= tick <= high + room for tick in ticks)


def test_ticks_are_those_a_person_would_choose():
    assert nice_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(1, 240) == [50, 100, 150, 200]
    assert [tick for tick in make_axis([1e-5, 1.0], (), may_log=True).ticks()] == pytest.approx(
        [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3) | st.none(), max_size=30), st.integers(1, 8))
def test_a_trailing_mean_is_that_of_the_last_values(values, window):
    means = trailing_mean(values, window)
    for index, mean in enumerate(means):
        present = [value for value in values[max(0, index - window + 1) : index + 1] if value is not None]
        assert mean == (pytest.approx(np.mean(present), abs=1e-9) if present else None)


def test_bars_show_shares_and_count_absent_keys_as_none():
    html = draw_bars(Bars(title="T", text="S.", unit="lag", counts={4: 30, 6: 10}, counted="tokens"))
    shown = hover(html)
    assert shown["name"] == ["lag 4", "lag 5", "lag 6"]
    assert shown["lines"][0]["text"] == ["30 (75.0%)", "0 (0.0%)", "10 (25.0%)"]
    heights = [size(node, "height") for node in of_class(html, "bar")]
    assert heights[0] == pytest.approx(3 * heights[2], rel=0.01)
    assert heights[1] == 0


def test_texts_are_escaped_everywhere():
    evil = '</script><b>"&'
    html = draw(chart(line([1.0, 2.0], label=evil), line([2.0, 1.0]), title=evil, text=evil, unit=evil), [1, 2])
    assert "<b>" not in html.split('<script type="application/json">')[0]
    assert html.count("</script>") == 1
    assert hover(html)["lines"][0]["label"] == evil


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0312345, "0.0312"), (1234.0, "1,234"), (1234567.8, "1,234,568"), (3.14e-5, "3.1e-05"), (0.0, "0"), (1, "1")],
)
def test_a_number_is_shown_as_a_reader_wants_it(value, text):
    assert figure(value) == text
    assert figure(None) == "not finite"

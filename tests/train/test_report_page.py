import html.parser
import json
import re

import pytest

from tests.reference.runs import make_header, make_metrics, make_rows, make_samples
from train.report import Report
from train.report_page import write_page
from train.run_folder import SampleLine, encode, rewrite

VOID = {"meta", "line", "rect", "circle", "polyline", "polygon", "br", "path"}
SECTIONS = ["outcome", "learning", "mismatch", "trust", "routing", "optimizer", "time", "samples", "events", "run"]


class Balance(html.parser.HTMLParser):
    """Fails on a tag that is closed out of order; collects ids, links and what would need the network."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.fetched = [], [], [], []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named["href"]] if tag == "a" else []
        self.fetched += [named[key] for key in ("src", "srcset", "data", "xlink:href") if key in named]
        self.fetched += [named["href"]] if tag == "link" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check(page):
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert {link.removeprefix("#") for link in parser.links} <= set(parser.ids)
    assert parser.fetched == []
    assert not re.search(r"url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", page)
    for block in re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL):
        json.loads(block, parse_constant=pytest.fail)
    return parser


def page_of(folder, made=30, summary=None, **changes):
    with Report(folder, make_header(**changes), console=False, tensorboard=False) as report:
        for step in (500, 1000):
            report.warm_start(step, loss=1000 / step, accuracy=0.7)
        for version in range(1, made + 1):
            report.write(version, make_metrics(version), make_samples(), {4: 400, 5: 380})
        if summary is not None:
            report.write_summary(summary)
    return (folder / "report.html").read_text()


def text_of(page):
    return " ".join(re.sub(r"<(script|style)\b.*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL).split())


def hover(page, title):
    """Hover data of the chart of this title."""
    (data,) = re.findall(rf'<h3>{title}</h3>(?:(?!</figure>).)*?json">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)["lines"]


def titles(page):
    return re.findall(r"<h3>([^<]*)</h3>", page)


def test_a_whole_run_is_explained_on_one_page_that_needs_no_network(tmp_path):
    summary = {
        "prompts": 512,
        "before": {"eval/sampled_accuracy": 0.503, "eval/greedy_accuracy": 0.975, "entropy": 0.61},
        "after": {"eval/sampled_accuracy": 0.861, "eval/greedy_accuracy": 0.986, "entropy": 0.19},
        "facts": {"peak memory": "1.5 GB"},
    }
    (tmp_path / "config.toml").write_text('name = "quickstart"  # <what>\n')
    page = page_of(tmp_path, summary=summary)
    parser = check(page)
    assert [key for key in parser.ids if key != "theme"] == SECTIONS
    text = text_of(page)
    for wanted in (
        "A mixture-of-experts policy of 142 thousand parameters was trained by reinforcement learning while a separate "
        "fleet sampled with older weights (lag 4 to 7). Objective sat_grpo, reward exact_match, 240 steps planned.",
        "step 30 of 240",
        "no alarms",
        "held-out accuracy, sampled 0.503 ± 0.044 0.861 ± 0.031 +0.358",
        "entropy, nats per token 0.610 0.190 -0.420",
        "20% of their answer tokens were replaced by others on purpose",
        "Part of the gain is therefore this noise, removed",
        "sat-jax train runs/quickstart/config.toml",
        "peak memory 1.5 GB",
        "name = &quot;quickstart&quot; # &lt;what&gt;",
        "python 3.11.7",
    ):
        assert wanted in text, wanted
    assert {
        "Training reward",
        "Entropy",
        "Mismatch",
        "Divergence from the sampler",
        "Threshold q",
        "Effective clip radii",
        "Gate and clip rates",
        "Age of the tokens, whole run",
        "Routing agreement",
        "Missing routes",
        "Gradient norm",
        "Seconds per step, by phase",
        "Tokens per step",
        "Step 1",
        "Step 30",
    } <= set(titles(page))


def test_a_finished_run_is_called_finished(tmp_path):
    assert "finished, 3 steps" in text_of(page_of(tmp_path, made=3, steps=3))


def test_a_run_of_one_step_has_its_page(tmp_path):
    page = page_of(tmp_path, made=1)
    check(page)
    assert "training reward (first and last step)" in text_of(page)
    assert "there is no evaluation after it" in text_of(page)


def test_a_run_before_its_first_step_has_its_page(tmp_path):
    page = page_of(tmp_path, made=0)
    check(page)
    assert "No step has finished yet." in text_of(page)
    assert "Warm start" in titles(page)
    assert "Training reward" not in titles(page)


def test_a_run_of_five_thousand_steps_has_a_page_of_bounded_size(tmp_path):
    rewrite(tmp_path / "metrics.jsonl", make_rows(5000))
    page = write_page(tmp_path).read_text()
    check(page)
    assert len(page) < 1_000_000
    assert "5,000" in text_of(page)


def test_a_folder_with_nothing_but_its_log_has_a_page(tmp_path):
    rows = [{"version": v, "reward/mean": 0.5, "entropy": None if v == 2 else 0.25} for v in range(1, 4)]
    rewrite(tmp_path / "metrics.jsonl", rows)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 4, "rew')
    page = write_page(tmp_path).read_text()
    check(page)
    assert "no run.json" in text_of(page)
    assert titles(page)[:2] == ["Training reward", "Entropy"]
    assert "entropy not finite 1 of 3, from 2 to 2" in text_of(page)
    assert "1 alarm " in text_of(page)


def test_levels_that_were_passed_are_counted_and_explained(tmp_path):
    with Report(tmp_path, make_header(), console=False, tensorboard=False) as report:
        for version in range(1, 11):
            report.write(version, make_metrics(version) | {"mismatch/abs_mean": 0.02 + 0.002 * version, "tokens": 0.0})
    text = text_of((tmp_path / "report.html").read_text())
    assert "1 alarm 1 warning" in text
    assert "mismatch/abs_mean above 0.03 5 of 10, from 6 to 10 0.04 The policy has moved far" in text
    assert "tokens at most 0 10 of 10, from 1 to 10 0 The step trained on no token." in text


def test_what_a_policy_samples_is_shown_and_never_run(tmp_path):
    evil = "</script><script>alert(1)</script>\x1b[31m\ud800<img src=x>"
    with Report(tmp_path, make_header(name=evil), console=False, tensorboard=False) as report:
        sample = SampleLine(prompt=evil, completion=evil + "\nsecond line", answer=evil, reward=0.0)
        report.write(1, make_metrics(1), [sample])
        report.event(evil, evil)
        report.write_summary({"after": {"eval/x": 0.5}, "facts": {evil: evil}})
    (tmp_path / "config.toml").write_text("x = '</pre><script>alert(1)</script>'")
    page = write_page(tmp_path).read_text()
    parser = check(page)
    assert "alert(1)" not in "".join(re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.DOTALL))
    assert page.count("<script") == page.count("</script>")
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\nsecond line" in page
    assert "outcome" in parser.ids


def test_a_long_completion_is_shortened(tmp_path):
    with Report(tmp_path, make_header(), console=False, tensorboard=False) as report:
        sample = SampleLine(prompt="p", completion="a" * 50_000, answer="a", reward=0.0)
        report.write(1, {"reward/mean": 0.5}, [sample])
    page = (tmp_path / "report.html").read_text()
    assert "aaa … aaa" in page
    assert page.count("a" * 1000) == 0


def test_the_first_and_the_last_samples_are_shown(tmp_path):
    with Report(tmp_path, make_header(), console=False, tensorboard=False) as report:
        for version in range(1, 4):
            sample = SampleLine(prompt=f"prompt{version}", completion="c", answer="a", reward=0.0)
            report.write(version, {}, [sample])
    text = text_of((tmp_path / "report.html").read_text())
    assert "prompt1" in text
    assert "prompt2" not in text
    assert "prompt3" in text


def test_the_switch_off_levels_and_the_nominal_radii_are_drawn(tmp_path):
    page = page_of(tmp_path, eps_low=0.2, eps_high=0.28)
    # log(1.28) = 0.2469, -log(0.8) = 0.2231
    for label in ("off above, upper side: 0.247", "off above, lower side: 0.223", "nominal, upper: 0.28"):
        assert label in page
    page = page_of(tmp_path / "wide", eps_low=1.0, eps_high=3.0)
    assert "lower side" not in page


def test_a_fixed_clip_is_not_explained_as_sat(tmp_path):
    page = page_of(tmp_path, objective="grpo", radii="fixed")
    check(page)
    assert "off above" not in page
    assert not {"Effective clip radii", "Sides on which SAT is active"} & set(titles(page))
    assert {"Threshold q", "Gate and clip rates"} <= set(titles(page))
    assert "do not follow the threshold" in text_of(page)


def test_routes_that_are_not_replayed_are_not_shown(tmp_path):
    page = page_of(tmp_path, replay=False)
    assert "routing" not in check(page).ids
    assert "routes not replayed" in text_of(page)


def test_a_control_run_says_that_it_is_one(tmp_path):
    assert "This is a control" in text_of(page_of(tmp_path, reward="random"))


def test_a_warm_start_without_noise_claims_none(tmp_path):
    text = text_of(page_of(tmp_path, warm_start_noise=0.0))
    assert "1,000 supervised steps taught" in text
    assert "on purpose" not in text
    assert "How to read the gain" not in text_of(page_of(tmp_path / "none", warm_start_steps=0))


def test_a_gate_that_drops_nothing_has_no_chart_and_one_that_does_has(tmp_path):
    def page_with(dropped, folder):
        rewrite(folder / "metrics.jsonl", ({**row, "gate/dropped": dropped} for row in make_rows(20)))
        return titles(write_page(folder).read_text())

    assert "Dropped by the gate" not in page_with(0.0, tmp_path)
    assert "Dropped by the gate" in page_with(0.01, tmp_path)


def test_phases_are_stacked_to_the_whole_step(tmp_path):
    rows = ({**row, "seconds/step": 2.0, "seconds/update": 1.0, "seconds/collect": 0.25} for row in make_rows(10))
    rewrite(tmp_path / "metrics.jsonl", rows)
    page = write_page(tmp_path).read_text()
    lines = hover(page, "Seconds per step, by phase")
    assert [(line["label"], line["text"][0]) for line in lines] == [
        ("collect", "0.25"),
        ("update", "1"),
        ("other", "0.75"),
    ]


def test_throughput_is_tokens_per_second(tmp_path):
    rows = ({**row, "seconds/step": 0.5, "tokens": 600.0} for row in make_rows(3))
    rewrite(tmp_path / "metrics.jsonl", rows)
    page = write_page(tmp_path).read_text()
    assert hover(page, "Throughput")[0]["text"] == ["1,200"] * 3


def test_the_lag_histogram_adds_up_the_steps(tmp_path):
    page = page_of(tmp_path, made=10)
    assert "4,000 (51.3%)" in page
    assert "3,800 (48.7%)" in page


def test_many_events_are_shortened_and_the_rest_is_named(tmp_path):
    rewrite(tmp_path / "metrics.jsonl", make_rows(2))
    events = ({"time": 1e9 + k, "version": 1, "kind": "restart", "text": f"event-{k:03}"} for k in range(250))
    rewrite(tmp_path / "events.jsonl", events)
    text = text_of(write_page(tmp_path).read_text())
    assert "200 events, latest first; 50 earlier ones are in events.jsonl" in text
    assert text.index("event-249") < text.index("event-050")
    assert "event-049" not in text
    assert "2001-09-09 01:46:40" not in text
    assert "2001-09-09 01:50:49" in text


def test_a_run_that_went_on_after_a_failure_is_not_called_failed(tmp_path):
    rewrite(tmp_path / "metrics.jsonl", make_rows(2))
    events = [{"time": 1e9, "version": 1, "kind": kind, "text": "it died"} for kind in ("error", "resume")]
    rewrite(tmp_path / "events.jsonl", events)
    text = text_of(write_page(tmp_path).read_text())
    assert "failed" not in text
    assert "stopped at step" not in text
    rewrite(tmp_path / "events.jsonl", events[:1])
    assert "failed at step 2" in text_of(write_page(tmp_path).read_text())


def test_a_damaged_summary_is_an_error_that_names_it(tmp_path):
    rewrite(tmp_path / "metrics.jsonl", make_rows(2))
    (tmp_path / "summary.json").write_text(encode({"a": 1})[:-1])
    with pytest.raises(ValueError, match=r"summary\.json: expected one JSON object"):
        write_page(tmp_path)

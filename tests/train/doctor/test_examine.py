from pathlib import Path

from tests.train.test_setup import QUICKSTART
from train.config import load
from train.doctor.examine import examine, examine_data, examine_machine, examine_verifier
from train.doctor.finding import healthy
from train.setup import make_problem


def test_what_needs_no_fleet_is_well_for_the_quickstart(tmp_path):
    config = load(QUICKSTART)
    problem = make_problem(config)
    found = [
        *examine_data(config, problem),
        *examine_verifier(config, problem),
        *examine_machine(config, problem, tmp_path / "runs" / "quickstart"),
    ]
    assert healthy(found)
    assert {finding.check.split(":")[0] for finding in found} == {"data", "tokenizer", "prompt", "verifier", "machine"}
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_bad_line_ends_the_examination_with_its_place(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    config = load(QUICKSTART, [f"data.path={path}", "data.holdout=0", "eval.prompts=0"])
    (found,) = examine(config, tmp_path / "run")
    assert (found.check, found.status.value) == ("data: lines", "fail")
    assert "bad.jsonl:2: expected the key 'answer'" in found.found


def test_a_function_of_a_user_that_fails_is_found_with_its_words():
    for name, said in (("returns_none", "got None (NoneType)"), ("no_such", "expected a function that loads")):
        config = load(QUICKSTART, [f"reward=tests.reference.faulty_rewards:{name}"])
        (found,) = examine_verifier(config, make_problem(config))
        assert (found.check, found.status.value) == ("verifier: gold", "fail")
        assert said in found.found


def test_a_folder_that_cannot_be_written_is_found():
    config = load(QUICKSTART)
    found, *_ = examine_machine(config, make_problem(config), Path("/proc/self/runs/quickstart"))
    assert (found.check, found.status.value) == ("machine: disk", "fail")
    assert "cannot be written" in found.found

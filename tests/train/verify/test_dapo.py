import pytest

from train.verify.dapo import dapo, dapo_boxed, extract, normalise


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Thus 3 + 4 = 7.\nAnswer: 7", "7", 1.0),
        ("answer :   7", "7", 1.0),
        ("Answer: 8", "7", 0.0),
        ("Answer: 6\nNo, wait.\nAnswer: 7", "7", 1.0),  # the last one counts
        ("Answer: 7\nAnswer: 6", "7", 0.0),
        ("Answer: $7$", "7", 1.0),
        (r"Answer: $\boxed{7}$", "7", 1.0),
        (r"Answer: x = 7", "7", 1.0),
        ("Answer: 7 degrees", "7", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        (r"Answer: 12{,}345", "12345", 1.0),
        ("Answer: 007", "7", 1.0),
        ("Answer: 7.0", "7", 1.0),
        ("Answer: -7", "7", 0.0),
        ("7", "7", 0.0),  # no cue
        (r"\boxed{7}", "7", 0.0),
        ("Answer:", "7", 0.0),
        ("", "7", 0.0),
        ("Answer: 7\n" + "." * 300, "7", 0.0),  # beyond the last 300 characters
        ("Answer: 7\n" + "." * 289, "7", 1.0),
        ("." * 5000 + "\nAnswer: 7", "7", 1.0),
        ("Answer: 77", "7", 0.0),
    ],
)
def test_the_last_answer_line_of_the_last_300_characters_counts(completion, answer, reward):
    assert dapo(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"so it is \boxed{7}", 1.0),
        (r"\boxed{6} or \boxed{7}", 1.0),
        (r"\boxed{7} or \boxed{6}", 0.0),
        (r"\boxed{7}" + "." * 100, 0.0),  # beyond the last 100 characters
        (r"\boxed{7", 0.0),
        ("Answer: 6\nthat is \\boxed{7}", 0.0),  # an answer line goes before a box
        ("Answer: 7\nnot \\boxed{6}", 1.0),
    ],
)
def test_the_fallback_reads_a_box_where_there_is_no_answer_line(completion, reward):
    assert dapo_boxed(completion, "7") == reward


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"$x=5$ units", "5"),
        (r"\text{five}", "five"),
        (r"90^\circ", "90"),
        (r"a cat", "cat"),
        (r"1,000,000", "1000000"),
        (r"(1,2)", "(1,2)"),
    ],
)
def test_answers_are_normalised(given, normal):
    assert normalise(given) == normal


def test_nothing_is_extracted_without_a_cue():
    assert extract("The result is 5.") is None
    assert extract("ANSWER:5") == "5"

import pytest

from train.verify.math_verify import math_verify


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{7}", "7", 1.0),
        (r"so \boxed{8}", "7", 0.0),
        (r"so $x = 7$", "7", 1.0),
        (r"\boxed{1} \boxed{2} \boxed{3} \boxed{7} \boxed{8}", "7", 0.0),  # the last box alone
        (r"\boxed{8} \boxed{7}", "7", 1.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", 1.0),
        (r"\boxed{(((((", "7", 0.0),
    ],
)
def test_the_last_answer_is_compared_as_mathematics(completion, answer, reward):
    assert math_verify(completion, answer) == reward


def test_an_answer_that_cannot_be_parsed_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match=r"answer: expected one that math-verify parses, got '\\\\text\{\}'"):
        math_verify(r"\boxed{7}", r"\text{}")

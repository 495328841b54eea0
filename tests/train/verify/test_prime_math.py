import pytest

from train.verify.prime_math import equal, extract, prime_math


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("The answer is 5", "5"),
        ("Answer: 5", "5"),
        (r"Hence \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and then \boxed{4}", "4"),
        (r"\boxed{\sqrt{\frac{3}{4}}}", r"\sqrt{\frac{3}{4}}"),  # nested braces
        (r"\fbox{9}", "9"),
        ("So x = 12", "12"),
        ("5 is the answer", "5"),
        ("We get 7", "7"),
        ("It is 3. And so on", "3"),  # only the text before the last ". "
        ("The answer is yes", None),  # no digit
        ("", None),
    ],
)
def test_the_answer_is_found_where_the_rule_looks(completion, found):
    assert extract(completion) == found


@pytest.mark.parametrize(
    ("given", "answer", "same"),
    [
        ("5", "5", True),
        ("5.0", "5", True),
        ("1,234", "1234", True),
        ("5", "6", False),
        (r"\frac{1}{2}", r"\dfrac{1}{2}", True),
        (r"\frac12", r"\frac{1}{2}", True),
        ("1/2", r"\frac{1}{2}", True),
        ("2/4", "1/2", False),  # not reduced
        (r"\frac{2}{4}", r"\frac{1}{2}", False),
        ("0.5", r"\frac{1}{2}", True),  # by sympy
        ("4/2", "2", False),  # an integer is given as one
        ("2+3", "5", False),
        ("(1, 2)", "(1,2)", True),
        ("(1,2)", "[1,2]", False),
        ("(1,2)", "(1,3)", False),
        ("(1,2,3)", "(1,2)", False),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("x+1", "1+x", True),
        ("50%", r"50\%", True),
        (r"30^\circ", "30", True),
        ("5 cm", "5", True),
        ("3.14159", "3.1416", True),  # within 1e-4 of a number that is no integer
        ("3.15", "3.1416", False),
        ("", "5", False),
        ("9^9^9^9^9", "1.5", False),  # never evaluated
        ("10^{100000000}", "2.5", False),
        ("((((", "2.5", False),
        ("__import__('os').getpid()", "2.5", False),
    ],
)
def test_answers_are_compared_as_the_rule_says(given, answer, same):
    assert equal(given, answer) is same


def test_gold_scores_one_and_corrupted_zero():
    for gold in ("17", r"\frac{3}{7}", r"2\sqrt{5}", "(3,4)", "-12", "1000000"):
        assert prime_math(f"We conclude that the answer is \\boxed{{{gold}}}", gold) == 1.0
        assert prime_math(f"We conclude that the answer is \\boxed{{{gold}9}}", gold) == 0.0
        assert prime_math("I do not know.", gold) == 0.0

"""Two-digit addition with the digits of the sum reversed: a task that a tiny policy learns in minutes.

Reversed, every digit depends on the digits and the carry before it only, so it is learnt in fewer steps.
"""

from train.tasks.example import Example

_NUMBERS = 100


def examples() -> list[Example]:
    """All 10,000 pairs of 0..99, e.g. "7+85=" with the answer "29" (92 reversed)."""
    return [
        Example(prompt=f"{left}+{right}=", answer=str(left + right)[::-1], where=f"addition {left}+{right}")
        for left in range(_NUMBERS)
        for right in range(_NUMBERS)
    ]

"""Judges of open exercises: each makes inputs, compares with an oracle, and counts.

A judge is a module with TITLE, UNIT, BUDGET and `judge(load, rng) -> count`. `load()` runs the answer's module and
gives it. Less is better; an answer meets the budget with a count of at most BUDGET. A judge may have `beside(rng)`:
lines about what else there is on the same input.
"""


class Refused(Exception):
    """An answer is wrong, or keeps none of the rules: why, in a sentence."""

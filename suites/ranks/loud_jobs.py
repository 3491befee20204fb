"""Jobs that print, or say, more than anybody reads, or raise what can hardly be told."""

from __future__ import annotations

import itertools
import sys


def print_for_ever(rank, world, payload):
    for number in itertools.count(1):
        print(f"line {number} " + "x" * 10_000)


def print_much(rank, world, mebibytes):
    for number in range(mebibytes):
        begin, end = f"mebibyte {number} ", f" mebibyte {number}\n"
        sys.stdout.write(begin + "x" * ((1 << 20) - len(begin) - len(end)) + end)


def print_lines(rank, world, lines):
    for number in range(lines):
        print(f"line {number} " + "x" * 90)


def raise_at_length(rank, world, characters):
    raise ValueError("x" * characters)


class Odd(Exception):
    def __str__(self):
        if self.args[0] == "no text":
            return 3
        return str(self) if self.args[0] == "both raise" else 1 / 0

    def __repr__(self):
        raise ValueError("no repr either")


class Unsendable(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.kept = (lambda: None, b)

    def __reduce__(self):
        raise RuntimeError("y" * 1_000_000)


def raise_oddly(rank, world, how):
    match how:
        case "sys.exit":
            sys.exit()
        case "sys.exit(0)":
            sys.exit(0)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "cannot be pickled":
            raise Unsendable(3, 4)
        case "group":
            raise ExceptionGroup("several", [Odd("a"), ValueError("b")])
    raise Odd(how)


def return_oddly(rank, world, payload):
    return Unsendable(1, 2)
